"""Tests of conversion: replaced, grouped and latent attention; verification, reports and files."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard import convert, masks as M
from regard.cache import KVCache
from regard.convert._report import compare
from regard.nn import Attention, Block, FeedForward, LatentAttention, Stack
from regard.positions import AlibiBias, LinearScaling, Rotary, YaRN
from support import rel_l2
from support.processes import killed_while_writing

POSITIONS: dict[str, Any] = {
    "none": lambda: None,
    "halves": lambda: Rotary(8),
    "part, interleaved": lambda: Rotary(4, layout="interleaved"),
    "YaRN": lambda: Rotary(8, scaling=YaRN(4.0, 16)),
}


def attention(kv_heads: int = 6, rule: str = "none", **options: Any) -> Attention:
    sizes: dict[str, Any] = {"kv_heads": kv_heads, "head_dim": 8, "value_dim": 10}
    return Attention(48, 6, position=POSITIONS[rule](), mask=M.Causal(), **sizes, **options).eval()


def tokens(B: int = 8, L: int = 33) -> Tensor:
    """Returns tokens (B, L, 48) whose principal directions differ in scale, as in real models."""
    basis, _ = torch.linalg.qr(torch.randn(48, 48, generator=torch.Generator().manual_seed(7)))
    return torch.randn(B, L, 48) * torch.linspace(0.05, 2, 48) @ basis


# Replacing


class Encoder(nn.Module):
    """A model of two layers and one attention module that is registered under two names."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.shared = nn.MultiheadAttention(16, 2, batch_first=True)
        self.again = self.shared

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        x = self.layers(x, src_key_padding_mask=padding)
        for attend in (self.shared, self.again):
            x = x + attend(x, x, x, key_padding_mask=padding)[0]
        return x


NAMES = ("layers.layers.0.self_attn", "layers.layers.1.self_attn", "shared")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_replace_and_restore(training: bool, padded: bool) -> None:
    model, x = Encoder().train(training), torch.randn(3, 7, 16)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for attention in (m for m in model.modules() if isinstance(m, nn.MultiheadAttention)):
        attention.dropout = 0.0
    padding = torch.arange(7) >= torch.tensor([7, 4, 5])[:, None] if padded else None
    real = slice(None) if padding is None else ~padding
    parameters, state = list(model.parameters()), set(model.state_dict())
    expected = model(x, padding)[real]
    assert convert.replace_attention(model) == NAMES
    assert all(type(model.get_submodule(name)) is regard.nn.MultiheadAttention for name in NAMES)
    assert model.again is model.shared
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert set(model.state_dict()) == state
    assert rel_l2(model(x, padding)[real], expected) < 1e-6
    assert convert.replace_attention(model) == ()
    assert convert.restore_attention(model) == NAMES
    assert all(type(model.get_submodule(name)) is nn.MultiheadAttention for name in NAMES)
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert torch.equal(model(x, padding)[real], expected)


def test_hooks_and_optimizers_survive() -> None:
    model = nn.MultiheadAttention(8, 2)
    called = []
    model.register_forward_hook(lambda *_: called.append(1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    assert convert.replace_attention(model) == ("",)
    x = torch.randn(3, 1, 8)
    model(x, x, x)[0].square().sum().backward()
    before = model.in_proj_weight.detach().clone()
    optimizer.step()
    assert called == [1]
    assert not torch.equal(model.in_proj_weight, before)


def test_a_subclass_is_rejected_before_anything_changes() -> None:
    class Own(nn.MultiheadAttention):
        pass

    model = nn.Sequential(nn.MultiheadAttention(8, 2), Own(8, 2))
    with pytest.raises(TypeError, match="its subclass Own at '1'"):
        convert.replace_attention(model)
    assert type(model[0]) is nn.MultiheadAttention


@pytest.mark.parametrize("function", [convert.replace_attention, convert.replaced_attention])
def test_a_model_with_nothing_to_replace_raises(function: Any) -> None:
    message = (
        r"expected nn.MultiheadAttention modules or a Hugging Face model, got Sequential with neither; .*sdpa"
    )
    with pytest.raises(ValueError, match=message):
        function(nn.Sequential(nn.Linear(4, 4)))
    with regard.see.capture(nn.Sequential(nn.Linear(4, 4))) as seen:
        assert len(seen) == 0


# Verifying


def test_verify_keeps_training_modes() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].eval()
    convert.verify(model, torch.randn(5, 4))
    assert [module.training for module in model.modules()] == [True, True, False]


def test_verify() -> None:
    model = Encoder()
    convert.replace_attention(model)
    differences = convert.verify(model, torch.randn(2, 9, 16))
    assert 0 < differences.output < 1e-5
    assert 0 < differences.gradient < 1e-5
    assert differences.output < 4 * differences.plain_output
    assert set(differences.gradients) == {name for name, _ in model.named_parameters()}
    assert all(p.grad is None for p in model.parameters())
    assert model.training
    assert "from float64" in str(differences)


def test_verify_detects_wrong_results(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Encoder(), torch.randn(2, 9, 16)
    convert.replace_attention(model)
    original = regard.nn.multihead.attention
    monkeypatch.setattr(regard.nn.multihead, "attention", lambda *a, **o: original(*a, **o) * 1.01)
    differences = convert.verify(model, {"x": x})
    assert differences.output > 1e-4 > differences.plain_output
    assert differences.gradient > 1e-4 > differences.plain_gradient
    assert convert.verify(model, (x, None)).output == differences.output
    assert convert.verify(model, x, padding=None).output == differences.output


def test_verify_takes_the_inputs_of_the_model() -> None:
    model, x = Encoder(), torch.randn(2, 9, 16)
    convert.replace_attention(model)
    padding = torch.arange(9) >= torch.tensor([[9], [6]])
    expected = convert.verify(model, {"x": x, "padding": padding})
    assert convert.verify(model, x, padding) == expected
    assert convert.verify(model, x, padding=padding) == expected
    assert convert.verify(model, x) != expected


class SequenceFirst(nn.Module):
    """A model of tokens (B, L) whose attention reads B as the length, because batch_first is missing."""

    def __init__(self, batch_first: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(23, 16)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=batch_first)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        out: Tensor = self.attention(x, x, x)[0]
        return out


def test_verify_warns_if_samples_interact() -> None:
    tokens = torch.randint(23, (3, 7))
    tokens[1] = (tokens[0] + 1) % 23
    for replaced in (False, True):
        model = SequenceFirst()
        if replaced:
            convert.replace_attention(model)
        with pytest.warns(
            UserWarning, match="output of sample 0 changes by .* may need batch_first=True"
        ) as seen:
            assert convert.verify(model, tokens).output < 1e-5
        assert [Path(warning.filename).name for warning in seen] == ["test_convert.py"]
    encoder = nn.TransformerEncoderLayer(16, 4)
    with pytest.warns(UserWarning, match="the model mixes samples"):
        convert.verify(encoder, torch.randn(2, 9, 16))


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (SequenceFirst(batch_first=True), torch.arange(21).view(3, 7)),
        (SequenceFirst(), torch.arange(7)[None]),  # one sample
        (SequenceFirst(), torch.arange(7).expand(3, 7)),  # equal samples show nothing
        (nn.TransformerEncoderLayer(16, 4), torch.randn(9, 16)),  # (L, d): dim 0 is the sequence
    ],
)
def test_verify_does_not_warn_without_a_reason(model: nn.Module, inputs: Tensor) -> None:
    convert.verify(model, inputs)


def test_verify_allows_matrices_that_compare_samples() -> None:
    class Similarity(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            features = super().forward(x).mean(1)
            return features, features @ features.mT  # (B, d), (B, B)

    convert.verify(Similarity(16, 8), torch.randn(3, 9, 16))


def test_verify_skips_the_batch_check_if_the_model_rejects_it() -> None:
    class Distinct(SequenceFirst):
        def forward(self, tokens: Tensor) -> Tensor:
            if tokens[0].equal(tokens[1]):
                raise ValueError("tokens: expected different samples")
            return super().forward(tokens)

    convert.verify(Distinct(), torch.arange(14).view(2, 7))


# Grouped heads


@pytest.mark.parametrize("method", ["mean", "first", "aligned"])
@pytest.mark.parametrize("rule", POSITIONS)
def test_keeping_all_heads_changes_nothing(rule: str, method: str) -> None:
    module, x = attention(rule=rule), tokens()
    after, report = convert.to_grouped(module, 6, method, calibration=x)
    assert report.exact < 1e-5
    assert report.verdict == "equivalent"
    assert rel_l2(after(x), module(x)) < 1e-6


def test_mean_averages_neighbouring_heads() -> None:
    module = attention(bias=False)
    after, _ = convert.to_grouped(module, 2)
    k = module.qkv.weight[48:96].view(2, 3, 8, 48)
    assert rel_l2(after.qkv.weight[48:64].view(2, 8, 48), k.mean(1)) < 1e-6
    first, _ = convert.to_grouped(module, 2, "first")
    assert torch.equal(first.qkv.weight[48:64].view(2, 8, 48), k[:, 0])
    assert torch.equal(first.qkv.weight[:48], module.qkv.weight[:48])


def shuffled_and_rotated(module: Attention, kv_heads: int) -> Attention:
    """Returns a module whose key heads are shuffled and rotated copies of `kv_heads` key heads.

    Queries and output projections are rotated alike, so the rotations change no score.
    """
    from regard.convert._parts import Parts, channels, parts_of, regrouped

    parts, rotary, n = parts_of(module), channels(module), module.kv_heads
    shuffled = torch.randperm(n)
    K, V, Q, O = (x.clone() for x in (parts.k, parts.v, parts.q, parts.out))
    group_size = module.heads // n
    for index, head in enumerate(shuffled.tolist()):
        source = shuffled[index % kv_heads]
        G = torch.eye(8).double()
        angle = torch.rand(len(rotary.first)).double() * 6
        G[rotary.first, rotary.first] = G[rotary.second, rotary.second] = angle.cos()
        G[rotary.second, rotary.first] = angle.sin()
        G[rotary.first, rotary.second] = -angle.sin()
        m = len(rotary.unrotated)
        G[rotary.unrotated[:, None], rotary.unrotated], _ = torch.linalg.qr(torch.randn(m, m).double())
        Gv, _ = torch.linalg.qr(torch.randn(10, 10).double())
        K[head], V[head] = G @ parts.k[source], Gv @ parts.v[source]
        for h in range(group_size * head, group_size * head + group_size):
            Q[h], O[h] = G @ parts.q[h], parts.out[h] @ Gv.T
    return regrouped(module, Parts(Q, K, V, O))


@pytest.mark.parametrize("rule", POSITIONS)
def test_aligned_recovers_heads_that_are_shuffled_and_rotated(rule: str) -> None:
    """Alignment is lossless for any order and rotation of these heads. Averaging is not."""
    module, x = shuffled_and_rotated(attention(rule=rule), 2), tokens()
    after, report = convert.to_grouped(module, 2, "aligned", calibration=x)
    assert report.verdict == "equivalent"
    assert rel_l2(after(x), module(x)) < 1e-5
    assert report.held_out is not None
    assert (
        max(*report.held_out.heads, *report.held_out.weights) < 1e-5
    )  # each head is compared with its original
    _, mean_report = convert.to_grouped(module, 2, calibration=x)
    assert mean_report.held_out is not None
    assert mean_report.held_out.output > 0.1
    assert "needs training; do not deploy" in mean_report.verdict


def test_aligned_has_less_error_than_mean_and_mean_than_first() -> None:
    module, x = attention(rule="halves"), tokens()
    reports = [convert.to_grouped(module, 2, m, calibration=x)[1] for m in ("aligned", "mean", "first")]
    errors = [report.held_out.output for report in reports if report.held_out]
    assert errors == sorted(errors)
    assert len(errors) == 3


@pytest.mark.parametrize("make", [nn.MultiheadAttention, regard.nn.MultiheadAttention])
@pytest.mark.parametrize("bias", [True, False])
def test_multihead_becomes_grouped(make: Any, bias: bool) -> None:
    module, x = make(48, 6, bias=bias, batch_first=True).eval(), tokens()
    after, report = convert.to_grouped(module, 6, calibration=x)
    assert report.exact < 1e-5
    assert rel_l2(after(x), module(x, x, x, need_weights=False)[0]) < 1e-6
    fewer, _ = convert.to_grouped(module, 3, calibration=x)
    assert fewer.kv_heads == 3


def test_other_options_of_a_module_are_kept() -> None:
    module = attention(sink=True, gate=True, softcap=5.0, qk_norm=nn.RMSNorm)
    nn.init.normal_(module.sink)
    after, report = convert.to_grouped(module, 3, calibration=tokens())
    assert report.exact < 1e-5
    assert torch.equal(after.sink, module.sink)
    assert after.softcap == 5.0
    assert after.sink is not module.sink


def test_without_calibration_nothing_is_measured() -> None:
    _, report = convert.to_grouped(attention(), 2)
    assert report.verdict == "not measured: pass calibration tokens; do not deploy"
    assert report.exact < 1e-5
    assert report.bytes_before == 3 * report.bytes_after


# Latent


@pytest.mark.parametrize("kv_heads", [6, 2, 1])
@pytest.mark.parametrize("rule", POSITIONS)
def test_full_rank_changes_nothing(rule: str, kv_heads: int) -> None:
    module, x = attention(kv_heads, rule), tokens()
    after, report = convert.to_latent(module, calibration=x)
    assert report.exact < 1e-5
    assert report.verdict == "equivalent"
    with torch.no_grad():
        for absorb in (True, False):
            assert rel_l2(after(x, absorb=absorb), module(x)) < 1e-5


def test_full_rank_of_many_heads() -> None:
    """With eight key heads of ordinary size, the full rank is the width of the tokens."""
    module = Attention(256, 16, kv_heads=8, head_dim=32, position=Rotary(32), mask=M.Causal()).eval()
    x = torch.randn(4, 64, 256)
    _, report = convert.to_latent(module, calibration=x)
    assert report.exact < 1e-5
    assert report.title.endswith("latent of 256 + 256 (all: 256 + 256)")


@pytest.mark.parametrize("rule", POSITIONS)
def test_error_falls_as_the_rank_grows(rule: str) -> None:
    module = attention(3, rule)
    _, report = convert.to_latent(module, 20, calibration=tokens(16))
    errors = [point.error for point in report.curve]
    sizes = [point.nbytes for point in report.curve]
    assert len(errors) >= 8
    assert all(a > b for a, b in pairwise(errors))
    assert all(a < b for a, b in pairwise(sizes))
    assert errors[-1] < 1e-5


def test_error_falls_with_more_rotary_channels() -> None:
    module, x = attention(3, "halves"), tokens(16)
    errors = []
    for dims in (0, 4, 12, 20, 24):
        _, report = convert.to_latent(module, None, dims, calibration=x)
        errors.append(report.steps[0][1])
    assert all(a > b for a, b in pairwise(errors))
    assert errors[-1] < 1e-5


def test_heads_with_zero_keys() -> None:
    """If all keys are zero, the conversion is equivalent for any number of rotary dims."""
    module = attention(3, "halves")
    with torch.no_grad():
        module.qkv.weight[48:72].zero_()
        module.qkv.bias[48:72].zero_()
    for rope_dims in (None, 4, 0):
        _, report = convert.to_latent(module, rope_dims=rope_dims, calibration=tokens())
        assert report.verdict == "equivalent"


def test_low_rank_tokens_need_only_a_low_rank() -> None:
    """Tokens in a 12-dimensional subspace need a latent of rank 12, which calibration finds."""
    module, x = attention(6, bias=False), tokens(8) @ torch.randn(48, 12) @ torch.randn(12, 48)
    _, report = convert.to_latent(module, 12, calibration=x)
    assert report.verdict == "equivalent"
    _, smaller = convert.to_latent(module, 8, calibration=x)
    assert smaller.held_out is not None
    assert smaller.held_out.output > 1e-3


@pytest.mark.parametrize("rule", POSITIONS)
def test_reported_bytes_match_the_caches(rule: str) -> None:
    module, x = attention(3, rule), tokens(4, 21)
    dims = 0 if rule == "none" else 4
    after, report = convert.to_latent(module, 20, dims, calibration=x, held_out=x[:2])
    kv_cache = KVCache(2, 3, 8, 10, capacity=21)
    latent_cache = after.new_cache(2, capacity=21)
    assert (report.bytes_before, report.bytes_after) == (kv_cache.nbytes, latent_cache.nbytes)
    assert report.tokens == 42
    assert report.bytes_before == 42 * 3 * (8 + 10) * 4
    assert report.bytes_after == 42 * (20 + dims) * 4
    point = next(p for p in report.curve if p.size == 20)
    assert point.nbytes == report.bytes_after
    assert report.held_out is not None
    assert point.error == report.held_out.output == report.steps[-1][1]


def test_a_converted_module_decodes() -> None:
    module, x = attention(3, "halves"), tokens(2, 13)
    after, _ = convert.to_latent(module, 20, 8, calibration=x)
    cache = after.new_cache(2)
    with torch.no_grad():
        steps = [after(chunk, cache=cache) for chunk in x.split((8, 1, 1, 3), 1)]
        assert rel_l2(torch.cat(steps, 1), after(x)) < 2e-6


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    """Rounding to 16 bits changes the held-out error, but not `exact`, the error at full size."""
    module, x = attention(3, "halves").to(dtype), tokens()
    after, report = convert.to_latent(module, calibration=x)
    grouped, grouped_report = convert.to_grouped(module, 1, "aligned", calibration=x)
    for converted, conversion_report in ((after, report), (grouped, grouped_report)):
        assert converted.out.weight.dtype == dtype
        assert conversion_report.exact < 1e-5
    assert report.held_out is not None
    assert report.held_out.output < {torch.float64: 1e-12, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    assert report.bytes_before == report.tokens * 3 * 18 * dtype.itemsize


# The report


def test_errors_are_reported_by_head() -> None:
    """Changes the queries of one head. Only that head is reported, and only its weights differ."""
    module, x = attention(3, "halves"), tokens()
    changed = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in (changed.qkv.weight, changed.qkv.bias):
            parameter[32:40].mul_(2)  # the queries of head 4
    errors = compare(module, changed, list(range(6)), x)
    assert not any(errors.values)
    for by_head in (errors.heads, errors.weights, errors.scores, errors.kl):
        assert [head for head, error in enumerate(by_head) if error > 0] == [4]
    assert errors.worst_head == 4
    assert errors.scores[4] == pytest.approx(1, rel=1e-6)  # twice the scores
    out, new = module(x), changed(x)
    assert errors.output == pytest.approx(rel_l2(new, out), rel=1e-6)
    assert errors.token == divmod(int((new - out).norm(dim=-1).argmax()), x.shape[1])


def test_values_are_compared_after_the_output_projection() -> None:
    """Values that the output projection rotates back are no error. Scaled values are an error."""
    module, x = attention(3), tokens()
    rotated, scaled = copy.deepcopy(module), copy.deepcopy(module)
    G, _ = torch.linalg.qr(torch.randn(10, 10))
    first = 6 * 8 + 3 * 8  # the values of key head 0, which heads 0 and 1 read
    with torch.no_grad():
        for parameter in (rotated.qkv.weight, rotated.qkv.bias):
            parameter[first : first + 10] = G @ parameter[first : first + 10]
        rotated.out.weight[:, :20] = (rotated.out.weight[:, :20].unflatten(1, (2, 10)) @ G.T).flatten(1)
        scaled.qkv.weight[first : first + 10] *= 1.5
        scaled.qkv.bias[first : first + 10] *= 1.5
    assert max(compare(module, rotated, list(range(6)), x).values) < 1e-6
    errors = compare(module, scaled, list(range(6)), x)
    assert errors.values[:2] == pytest.approx((0.5, 0.5), rel=1e-5)
    assert not any(errors.values[2:] + errors.scores + errors.kl)


def test_scores_are_compared_up_to_a_constant_per_row() -> None:
    """A bias of the keys adds one constant to all scores of a query."""
    module, x = attention(6), tokens(2)
    shifted = copy.deepcopy(module)
    with torch.no_grad():
        shifted.qkv.bias[48:96] += 3  # the bias of all keys
    errors = compare(module, shifted, list(range(6)), x)
    assert max(errors.scores) < 1e-5
    assert max(errors.kl) < 1e-9


def test_kl_and_score_errors_match_their_formulas() -> None:
    module, x = attention(6), tokens(1)
    after, report = convert.to_grouped(module, 2, calibration=tokens(4), held_out=x)
    p, new = (
        regard.weights(*(y.double() for y in m.arguments(x)[0]), mask=M.Causal())[0] for m in (module, after)
    )
    kl = (p * (p / new).where(p > 0, 1).log()).sum(-1).mean(-1)
    assert report.held_out is not None
    assert report.held_out.kl == pytest.approx(kl.tolist(), rel=1e-9)
    q, k, _ = (y[0].double() for y in after.arguments(x)[0])
    s = q @ k.repeat_interleave(3, 0).mT
    q, k, _ = (y[0].double() for y in module.arguments(x)[0])
    exact = q @ k.mT
    causal = torch.ones(33, 33).tril()

    def centred(s: Tensor) -> Tensor:
        return (s - (s * causal).sum(-1, keepdim=True) / causal.sum(-1, keepdim=True)) * causal

    error = (centred(s) - centred(exact)).flatten(1).norm(dim=1) / centred(exact).flatten(1).norm(dim=1)
    assert report.held_out.scores == pytest.approx(error.tolist(), rel=1e-6)


def test_spectrum() -> None:
    low_rank = torch.randn(8, 33, 6) @ torch.randn(6, 48)  # rank 6, with the bias 7
    _, report = convert.to_latent(attention(3), 8, calibration=low_rank)
    spectrum = report.spectrum
    assert spectrum is not None
    assert len(spectrum.heads) == 3
    assert sum(spectrum.shares) == pytest.approx(1)
    assert all(a >= b for a, b in pairwise(spectrum.shares))
    assert all(sum(shares) == pytest.approx(1) for shares in spectrum.heads)
    assert spectrum.kept() == pytest.approx(1, abs=1e-6)
    assert spectrum.kept(3) < 0.99 < spectrum.kept(7)
    assert spectrum.needed(1 - 1e-6) == 7
    assert spectrum.needed(2.0) == len(spectrum.shares)
    _, report = convert.to_latent(attention(3), 8, calibration=tokens())
    assert report.spectrum is not None
    assert 0.1 < report.spectrum.kept() < 0.95
    assert min(report.spectrum.kept_by_head) < report.spectrum.kept() < max(report.spectrum.kept_by_head)


def test_needles_are_lost_without_rotation() -> None:
    module, x = attention(3, "halves"), tokens(8, 16)
    full = convert.to_latent(module, calibration=x)[1].needles
    assert [needle.length for needle in full] == [16, 64]
    assert all(needle.before == needle.after > 0.9 for needle in full)
    unrotated = convert.to_latent(module, rope_dims=0, calibration=x)[1].needles
    assert [needle.before for needle in unrotated] == [needle.before for needle in full]
    assert unrotated[1].after < unrotated[1].before
    assert convert.to_grouped(module, 1)[1].needles == ()


def test_needles_follow_reordered_heads() -> None:
    module, x = attention(6, "none"), tokens(4, 16)
    _, report = convert.to_grouped(module, 6, "aligned", calibration=x)
    assert all(needle.before == needle.after > 0.9 for needle in report.needles)


def test_decode_cost_and_the_length_where_absorbing_pays_off() -> None:
    module = attention(6)
    after, report = convert.to_latent(module, 16, calibration=tokens())
    old, new = report.decode
    projections = 2 * 48 * 6 * (8 + 8 + 10) + 2 * 48 * 60  # of queries, keys, values and the result
    assert old.flops == projections + 2 * 6 * 34 * (8 + 10)
    assert new.read_bytes < old.read_bytes
    n = report.absorbed_from
    assert n is not None
    absorbed, expanded = after.operations(1, n)
    assert absorbed < expanded
    absorbed, expanded = after.operations(1, n - 1)
    assert absorbed >= expanded


def test_origin_names_source_tokens_and_tensors(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    module, x = attention(3, "halves"), tokens()
    after, report = convert.to_latent(module, 12, 8, calibration=x)
    assert report.origin.source == convert.digest(module.state_dict())
    assert report.origin.calibration == convert.digest({"tokens": x[:6]})
    assert report.origin.held_out == convert.digest({"tokens": x[6:]})
    assert report.origin.tensors["q.weight"] == ("qkv.weight", "qkv.bias")
    assert report.origin.tensors["out.weight"] == ("out.weight", "out.bias")
    assert set(report.origin.tensors) == set(after.state_dict())
    path = tmp_path / "attention.safetensors"
    convert.save(after, path, report)
    assert convert.origin(path) == report.origin
    convert.save(after, path)
    with pytest.raises(ValueError, match=r"path: expected a file of `save\(module, path, report\)`"):
        convert.origin(path)
    grouped = convert.to_grouped(nn.MultiheadAttention(48, 6), 2)[1].origin
    assert (grouped.calibration, grouped.held_out) == (None, None)
    assert grouped.tensors["qkv.weight"] == ("qkv.weight", "qkv.bias")


def test_digest_depends_on_names_dtypes_shapes_and_values() -> None:
    x = torch.arange(6.0)
    states = [
        {"a": x}, {"b": x}, {"a": x.view(2, 3)}, {"a": x.double()}, {"a": x + 1}, {"a": x.bfloat16()},
        {"a": x, "b": x},
    ]  # fmt: skip
    assert len({convert.digest(state) for state in states}) == len(states)
    assert convert.digest({"b": x, "a": x}) == convert.digest({"a": x, "b": x})
    assert convert.digest({"a": x.view(2, 3).T.contiguous().T}) == convert.digest({"a": x.view(2, 3)})


def test_report_as_text_and_table() -> None:
    rich = pytest.importorskip("rich.console")
    module = attention(3, "halves")
    _, report = convert.to_latent(module, 8, 4, calibration=tokens())
    text = str(report)
    for phrase in (
        "3 key heads -> a latent of 8 + 4",
        "at full size: differs by",
        "bytes",
        "held-out",
        "by head",
        "weights, KL in nats",
        "energy kept by rank 8: ",
        "needle in 132 tokens",
        "decode step: ",
        f"sha256 {convert.digest(module.state_dict())}",
        "verdict",
    ):
        assert phrase in text
    console = rich.Console(width=100, record=True, file=io.StringIO())
    console.print(report)
    printed = " ".join(console.export_text().split())
    for phrase in (
        "do not deploy",
        "weights moved",
        "of scores",
        "needle in 33 tokens",
        f"{report.bytes_after:,}",
        f"{report.exact:.1e}",
    ):
        assert phrase in printed


def test_smallest_size_within_a_tolerance() -> None:
    _, report = convert.to_latent(attention(3, "none"), 8, calibration=tokens(16), tolerance=0.3)
    smallest = report.smallest()
    assert smallest is not None
    assert smallest.error <= 0.3
    assert all(p.error > 0.3 for p in report.curve if p.nbytes < smallest.nbytes)
    assert report.smallest(0.0) is None
    after, second_report = convert.to_latent(
        attention(3, "none"), smallest.size, calibration=tokens(16), tolerance=1.0
    )
    assert second_report.verdict == "usable without training at tolerance 1"
    assert after.rank == smallest.size


def test_a_broken_conversion_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.convert import _latent

    original = _latent._rotary_split
    monkeypatch.setattr(
        _latent, "_rotary_split", lambda *a: original(*a)._replace(key=original(*a).key * 1.01)
    )
    _, report = convert.to_latent(attention(3, "halves"), calibration=tokens())
    assert report.verdict.startswith("broken: even at full size, results differ by")


# Models


def model(d: int = 48) -> Stack:
    shared = attention(3, "halves")
    return Stack(
        [Block(shared, FeedForward(d)), Block(attention(6), FeedForward(d)), Block(shared, FeedForward(d))]
    )


def test_all_layers_of_a_model() -> None:
    before, x = model().eval(), tokens()
    after, report = convert.convert_layers(
        before,
        lambda m, calibration, held_out: convert.to_latent(m, calibration=calibration, held_out=held_out),
        x[:6],
        x[6:],
    )
    assert report.output < 1e-5
    assert list(report.layers) == ["blocks.0.attention.sublayer", "blocks.1.attention.sublayer"]
    kinds = [type(block.attention.sublayer) for block in after.blocks]
    assert kinds == [LatentAttention] * 3
    assert after.blocks[0].attention.sublayer is after.blocks[2].attention.sublayer
    assert type(before.blocks[0].attention.sublayer) is Attention
    assert "whole model: error" in str(report)
    assert report.verdict == "equivalent"
    assert report.skipped == ()
    # The verdict uses the error of the whole model, because small errors of layers add up.
    assert "needs training; do not deploy" in dataclasses.replace(report, output=0.2).verdict
    assert "needs training; do not deploy" in str(dataclasses.replace(report, output=0.2))
    name, layer = next(iter(report.layers.items()))
    broken = report.layers | {name: dataclasses.replace(layer, exact=0.1)}
    assert "broken" in dataclasses.replace(report, layers=broken).verdict
    with pytest.raises(ValueError, match=r"at least one regard.nn.Attention"):
        convert.convert_layers(nn.Linear(3, 3), lambda *_: None, x, x)


def test_skipped_layers_are_reported() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own, self.torchs = attention(3), nn.MultiheadAttention(48, 6, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            x = self.own(x)
            out: Tensor = self.torchs(x, x, x)[0]
            return out

    x = tokens()
    _, report = convert.convert_layers(
        Both().eval(),
        lambda m, calibration, held_out: convert.to_grouped(m, 1, calibration=calibration),
        x,
        x,
    )
    assert list(report.layers) == ["own"]
    assert report.skipped == ("torchs",)
    assert "not converted: torchs" in str(report)


# Files


MODULES: dict[str, Any] = {
    "grouped": lambda: convert.to_grouped(attention(6, "YaRN", bias=False, out_bias=True), 2)[0],
    "linear scaling": lambda: Attention(
        16, 2, position=Rotary(8, scaling=LinearScaling(2.0)), gate=True, sink=True
    ).eval(),
    "cross": lambda: Attention(48, 6, kv_model=48, softcap=3.0).eval(),
    "values": lambda: Attention(48, 6, value_model=48, bias=False).eval(),
    "no output": lambda: Attention(48, 6, value_dim=5, out=False).eval(),
    "latent": lambda: convert.to_latent(attention(3, "halves"), 12, 8, calibration=tokens())[0],
    "DeepSeek": lambda: LatentAttention(
        48, 3, rank=8, nope_dim=4, rope_dim=4, q_rank=12, dtype=torch.bfloat16
    ).eval(),
}


@pytest.mark.parametrize("kind", MODULES)
def test_saved_modules_load_unchanged(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    module = MODULES[kind]()
    convert.save(module, tmp_path / "attention.safetensors")
    loaded = convert.load(tmp_path / "attention.safetensors")
    x = torch.randn(2, 7, module.d_model, dtype=next(module.parameters()).dtype)
    assert torch.equal(loaded(x), module(x))
    assert repr(loaded) == repr(module)


def test_a_kill_while_a_module_is_saved(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    path, module = tmp_path / "attention.safetensors", MODULES["grouped"]()
    convert.save(module, path)
    before = path.read_bytes()
    killed_while_writing(f"""
        from regard import convert
        module = convert.load({str(path)!r})
        LIMIT
        convert.save(module, {str(path)!r})
    """)
    assert path.read_bytes() == before
    convert.save(module, path)
    assert os.listdir(tmp_path) == [path.name]


def test_files_with_unknown_tensors(tmp_path: Path) -> None:
    torch_files = pytest.importorskip("safetensors.torch")
    path = tmp_path / "attention.safetensors"
    module = MODULES["grouped"]()
    convert.save(module, path)
    state = torch_files.load_file(path)
    with pytest.importorskip("safetensors").safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert json.loads(metadata["regard"])["kv_heads"] == 2
    state["other"] = state.pop("out.bias")
    torch_files.save_file(state, path, metadata)
    with pytest.raises(ValueError, match=r"nothing was loaded; expected also out.bias; got also other"):
        convert.load(path)
    torch_files.save_file(state, path)
    with pytest.raises(ValueError, match=r"expected a file of regard.convert.save"):
        convert.load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask": "window"}, "mask: expected None or 'causal', got 'window'"),
        ({"kind": "Other"}, "Other"),
        ({"other": 1}, "unexpected keyword argument 'other'"),
        ({"heads": 7}, "expected a multiple of heads = 7|expected a divisor of heads = 7"),
        ({"d_model": 2**40}, r"nothing was loaded; .*expected shape"),
        ({"d_model": "48"}, "d_model: expected a number, got str '48'"),
        ({"heads": 6.0}, "heads: expected an int, got float 6.0"),
        ({"softcap": -1}, "softcap: expected a finite number above 0, got -1"),
        ({"softcap": float("nan")}, "softcap: expected a finite number above 0, got nan"),
        ({"scale": float("inf")}, "scale: expected a finite number, got inf"),
        ({"scale": "1"}, "scale: expected a number, got str '1'"),
        ({"dropout": 2}, "dropout: expected a probability from 0 to 1, got 2"),
        ({"bias": "no"}, "bias: expected true or false, got str 'no'"),
        ({"position": {"dims": 8, "base": 10**400, "layout": "half", "scaling": None}}, "too large"),
        (
            {
                "position": {
                    "dims": 8,
                    "base": 1e4,
                    "layout": "half",
                    "scaling": {"kind": "NTK", "factor": 1e999},
                }
            },
            "factor: expected a finite number above 0, got inf",
        ),
        ({"scale": {}}, "scale: expected a number, got dict {}"),
        (
            {
                "position": {
                    "dims": 4,
                    "base": 1e4,
                    "layout": "half",
                    "scaling": {"kind": "Frequencies", "values": [1, 2], "attention_factor": None},
                }
            },
            "attention_factor: expected a number, got NoneType None",
        ),
        ([], "list"),
    ],
)
def test_files_with_wrong_metadata(change: Any, message: str, tmp_path: Path) -> None:
    torch_files = pytest.importorskip("safetensors.torch")
    path = tmp_path / "attention.safetensors"
    convert.save(MODULES["grouped"](), path)
    with pytest.importorskip("safetensors").safe_open(path, "pt") as file:
        metadata = json.loads(file.metadata()["regard"])
    torch_files.save_file(
        torch_files.load_file(path),
        path,
        {"regard": json.dumps(metadata | change if isinstance(change, dict) else change)},
    )
    with pytest.raises(ValueError, match=rf"path: expected a file of regard.convert.save, got .*({message})"):
        convert.load(path)


def test_damaged_files(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    path = tmp_path / "attention.safetensors"
    convert.save(MODULES["grouped"](), path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"path: expected a file of regard.convert.save, got"):
        convert.load(path)


def test_loaded_modules_are_in_evaluation_mode(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    module, x = Attention(16, 2, dropout=0.5), torch.randn(2, 7, 16)
    convert.save(module, tmp_path / "attention.safetensors")
    loaded = convert.load(tmp_path / "attention.safetensors")
    assert not any(m.training for m in loaded.modules())
    assert torch.equal(loaded(x), module.eval()(x))


# Messages


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda m, x: convert.to_grouped(m, 4),
            ValueError,
            "kv_heads: expected a divisor of the 6 key heads, got 4",
        ),
        (lambda m, x: convert.to_grouped(m, 2, "best"), ValueError, "method: expected one of"),
        (lambda m, x: convert.to_grouped(m, 2, "aligned"), ValueError, "calibration: expected tokens"),
        (lambda m, x: convert.to_grouped(m, 2, calibration=x[0]), ValueError, "calibration: expected tokens"),
        (lambda m, x: convert.to_grouped(m, 2, calibration=x[:1]), ValueError, "expected 2 samples or more"),
        (lambda m, x: convert.to_grouped(nn.Linear(2, 2), 2), TypeError, "got Linear"),
        (
            lambda m, x: convert.to_grouped(Attention(8, 2, kv_model=4), 1),
            ValueError,
            "expected self-attention",
        ),
        (
            lambda m, x: convert.to_grouped(Attention(8, 2, out=False), 1),
            ValueError,
            "with the projections qkv and out",
        ),
        (lambda m, x: convert.to_grouped(nn.MultiheadAttention(8, 2, kdim=4), 1), ValueError, "got kdim = 4"),
        (
            lambda m, x: convert.to_grouped(nn.MultiheadAttention(8, 2, add_zero_attn=True), 1),
            ValueError,
            "no extra keys",
        ),
        (
            lambda m, x: convert.to_grouped(attention(sink=True), 2, "aligned", calibration=x),
            ValueError,
            "expected no sink",
        ),
        (lambda m, x: convert.to_latent(m, 50, calibration=x), ValueError, "rank: expected at most 49"),
        (
            lambda m, x: convert.to_latent(m, 9, 2, calibration=x),
            ValueError,
            "rope_dims: expected an even number up to 0",
        ),
        (
            lambda m, x: convert.to_latent(attention(3, "halves"), 9, 3, calibration=x),
            ValueError,
            r"up to 24 = kv_heads x 8 rotary channels, got 3",
        ),
        (
            lambda m, x: convert.to_latent(Attention(48, 6, position=AlibiBias(6)), calibration=x),
            ValueError,
            "no position other than Rotary",
        ),
        (
            lambda m, x: convert.to_latent(attention(softcap=3.0), calibration=x),
            ValueError,
            "expected no softcap",
        ),
        (lambda m, x: convert.save(nn.Linear(2, 2), "x"), TypeError, "got Linear"),
        (
            lambda m, x: convert.load("no/such.safetensors"),
            FileNotFoundError,
            r"^path: expected a file, got no/such\.safetensors, which does not exist$",
        ),
        (
            lambda m, x: convert.save(Attention(8, 2, mask=M.Window(3, 0)), "x"),
            ValueError,
            r"expected mask None or Causal",
        ),
        (
            lambda m, x: convert.save(Attention(8, 2, position=AlibiBias(2)), "x"),
            ValueError,
            "position None or Rotary",
        ),
        (lambda m, x: convert.verify(nn.Identity(), torch.ones(2, dtype=torch.int64)), TypeError, "got none"),
    ],
)
def test_messages(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(attention(), tokens())
