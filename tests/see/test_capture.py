"""Capture: what is recorded of which model, that nothing stays behind, and what roles say of known heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as tree

import regard
from regard import masks as M, see
from regard._tools.listeners import listeners
from support import assert_close

N = 23
TEXT = "the cat sat on the mat and the dog sat on the rug while the bird sang of the sea ."
WORDS = tuple(TEXT.split())


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def check(layer: see.Layer, wanted: Tensor) -> None:
    """The facts of a layer are those of the dense weights (B, H, Lq, Lk)."""
    assert layer.shape == tuple(wanted.shape)
    assert_close(layer.fact(regard.ColumnMass()), wanted.sum(-2), atol=1e-5)
    assert_close(layer.fact(regard.RowMax()).weights, wanted.amax(-1), atol=1e-5)
    top = wanted.topk(min(8, wanted.shape[-1]), -1).values
    assert_close(layer.fact(regard.TopK(8)).weights[..., : top.shape[-1]], top, atol=1e-5)


# Which models are heard


@torch.no_grad()
def test_modules_of_regard() -> None:
    attend = regard.nn.Attention(32, 4, kv_heads=2, mask=M.Causal()).eval()
    model = nn.Sequential(nn.Linear(32, 32), attend)
    x = torch.randn(2, N, 32)
    alone = model(x)
    with see.capture(model, keep="qk") as seen:
        assert_close(model(x), alone, rtol=0, atol=0)
    (layer,) = seen
    assert layer.name == "1"
    qkv, options = attend.arguments(model[0](x))
    check(layer, regard.weights(*qkv, **options))
    assert_close(layer.rows([0, 7]), regard.weights(*qkv, **options)[:, :, [0, 7]])


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_multihead_attention_of_pytorch(need_weights: bool, grad: bool) -> None:
    model = nn.MultiheadAttention(32, 4, batch_first=True).eval()
    x = torch.randn(2, N, 32)
    hidden = torch.ones(N, N).triu(1).bool()
    with torch.set_grad_enabled(grad):
        _, wanted = model(x, x, x, attn_mask=hidden, average_attn_weights=False)
        with see.capture(model) as seen:
            model(x, x, x, attn_mask=hidden, need_weights=need_weights)
    assert type(model) is nn.MultiheadAttention
    assert hooks(model) == 0
    check(seen[0], wanted.detach())


def test_encoder_layers_of_pytorch_leave_their_own_kernel() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(1, N, 32)
    with torch.no_grad():
        alone = model(x)
        with see.capture(model, tokens=list(map(str, range(N)))) as seen:
            assert_close(model(x), alone, atol=1e-5)
    assert [layer.name for layer in seen] == ["layers.0.self_attn", "layers.1.self_attn"]
    assert_close(seen[1].fact(regard.ColumnMass()).sum(-1), torch.full((1, 4), float(N)))


class Free(nn.Module):
    """A module of a user, which calls `regard.attention` itself."""

    def forward(self, x: Tensor) -> Tensor:
        return regard.attention(x, x, x, mask=M.Causal())


@pytest.mark.parametrize("shape", [(N, 8), (3, N, 8), (2, 3, N, 8)])
def test_any_module_that_calls_attention(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    with see.capture(Free()) as seen:
        seen._model(x)
    wanted = regard.weights(x, x, x, mask=M.Causal())
    check(seen[0], wanted[(None,) * (4 - wanted.ndim)])


def test_a_cache_is_heard_as_well() -> None:
    model = regard.nn.Attention(32, 4, mask=M.Causal()).eval()
    x = torch.randn(1, N, 32)
    with torch.no_grad():
        whole = regard.weights(*model.arguments(x)[0], mask=M.Causal())
        cache = model.new_cache(1)
        alone = model(x)
        with see.capture(model) as seen:
            parts = [model(part, cache=cache) for part in x.split((9, 1, N - 10), 1)]
    assert_close(torch.cat(parts, 1), alone)
    assert [layer.shape[2:] for layer in seen] == [(9, 9), (1, 10), (N - 10, N)]
    check(seen[1], whole[:, :, 9:10, :10])
    check(seen[2], whole[:, :, 10:])
    assert seen[2].texts()[0] == "10"


@pytest.mark.parametrize("before", ["eager", "sdpa", "regard"])
@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_models_of_transformers(kind: str, before: str) -> None:
    model = small(kind, before)
    ids = torch.randint(1, 97, (2, N))
    real = torch.ones(2, N, dtype=torch.long)
    real[1, N - 5 :] = 0
    with torch.no_grad():
        model.set_attn_implementation("eager")
        wanted = model(ids, attention_mask=real, output_attentions=True).attentions
        model.set_attn_implementation(before)
        own = hooks(model)
        with see.capture(model, tokenizer=Numbers(), keep="qk") as seen:
            model(input_ids=ids, attention_mask=real)
    assert model.config._attn_implementation == before
    assert hooks(model) == own, "those of Transformers"
    assert len(seen) == len(wanted)
    for layer, weights in zip(seen, wanted, strict=True):
        assert layer.tokens is not None
        assert list(map(len, layer.tokens)) == [N, N - 5]
        check(layer, weights * real[:, None, :, None])
        assert_close(layer.head(1, sample=1).weights(), weights[1, 1, : N - 5, : N - 5], atol=1e-5)


def test_tokens_are_those_of_their_own_call() -> None:
    model = small("llama", "sdpa")
    ids = torch.randint(1, 97, (1, 7))
    with torch.no_grad(), see.capture(model, tokenizer=Numbers()) as seen:
        past = model(input_ids=ids, use_cache=True).past_key_values
        model(inputs_embeds=torch.randn(1, 7, 48))
        model(input_ids=ids[:, :2], past_key_values=past)
    assert [layer.shape[2:] for layer in seen] == [(7, 7)] * 4 + [(2, 9)] * 2
    assert seen[0].texts() == tuple(str(i) for i in ids[0].tolist())
    assert [layer.tokens is None for layer in seen] == [False] * 2 + [True] * 4
    assert seen[4].texts() == ("7", "8"), "positions"


class Numbers:
    """The tokens of ids are their numbers."""

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return list(map(str, ids))


def small(kind: str, attention: str) -> Any:
    hf = pytest.importorskip("transformers")
    pytest.importorskip("regard.hf").register()
    sizes = {"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6,
             "intermediate_size": 40, "max_position_embeddings": 64, "pad_token_id": 0}  # fmt: skip
    if kind == "bert":
        config: Any = hf.BertConfig(**sizes, attn_implementation=attention)
        return hf.BertModel(config).eval()
    return hf.LlamaModel(hf.LlamaConfig(**sizes, num_key_value_heads=2, attn_implementation=attention)).eval()


def test_dropout_and_gradients_do_not_matter() -> None:
    model = regard.nn.Attention(32, 4, dropout=0.5).train()
    x = torch.randn(1, N, 32, requires_grad=True)
    with see.capture(model) as seen:
        model(x).sum().backward()
    assert x.grad is not None
    check(seen[0], regard.weights(*model.arguments(x)[0]).detach())


# What stays behind


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        self.inner(x, x, x)
        raise ArithmeticError("broken")


def test_exceptions_leave_the_model_as_it_was() -> None:
    model = Broken()
    seen = see.capture(model)
    with pytest.raises(ArithmeticError), seen:
        model(torch.randn(1, 5, 8))
    assert type(model.inner) is nn.MultiheadAttention
    assert hooks(model) == 0
    assert not listeners
    assert len(seen) == 1, "what was heard before is kept"
    with see.capture(model) as seen:
        for _ in range(2):
            with pytest.raises(ArithmeticError):
                model(torch.randn(1, 5, 8))
    assert [layer.name for layer in seen] == ["inner", "inner"]
    model.inner.forward = None  # type: ignore[assignment, method-assign]
    with pytest.raises(TypeError), see.capture(model):
        model(torch.randn(1, 5, 8))
    assert not listeners


def test_a_model_of_transformers_is_restored_after_an_exception() -> None:
    model = small("bert", "sdpa")
    with pytest.raises(ArithmeticError), see.capture(model):
        raise ArithmeticError
    assert model.config._attn_implementation == "sdpa"


def test_a_model_that_cannot_be_switched_is_left_alone() -> None:
    class Own(nn.MultiheadAttention):
        pass

    model = nn.Sequential(nn.MultiheadAttention(8, 2), Own(8, 2))
    with pytest.raises(TypeError, match="subclass Own"), see.capture(model):
        pass
    assert [type(m) for m in model] == [nn.MultiheadAttention, Own]
    assert hooks(model) == 0
    assert not listeners


def test_captures_may_be_nested_and_hear_only_their_model() -> None:
    one, two, x = Free(), Free(), torch.randn(N, 8)
    with see.capture(one) as a, see.capture(two) as b:
        one(x)
        two(x)
        two(x)
        regard.attention(x, x, x)
    assert (len(a), len(b)) == (1, 2)


def test_what_is_kept_is_small() -> None:
    L = 2048
    x = torch.randn(1, L, 8)
    with see.capture(Free()) as seen:
        seen._model(x)
    numbers = sum(t.numel() for t in tree.tree_leaves(seen[0].found) if isinstance(t, Tensor))
    assert numbers < 40 * L
    assert seen[0].q is None


# Wrong arguments


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: see.capture(3), TypeError, "model: expected an nn.Module, got int 3"),
        (lambda: see.capture(Free(), keep="all"), ValueError, "keep: expected None or \"qk\", got 'all'"),
        (lambda: see.capture(Free(), tokens="text"), TypeError, "tokens: expected a list of strings"),
        (lambda: see.capture(Free(), tokens=["a", 3]), TypeError, "tokens: expected strings"),
        (lambda: see.capture(Free(), tokens=["a"], tokenizer=1), ValueError, "one of them, got both"),
        (lambda: see.capture(Free(), want=[3]), TypeError, "want: expected facts such as"),
        (lambda: record(["a"] * 5).head(9), IndexError, "head: expected an index below 1, got 9"),
        (lambda: record(["a"] * 5).head(0, 4), IndexError, "sample: expected an index below 1, got 4"),
        (lambda: record(["a", "b", "a", "c", "d"])[0].row("a"), ValueError, r"got 'a', at \[0, 2\]"),
        (lambda: record(["a", "b", "a", "c", "d"])[0].row("z"), ValueError, "got 'z', not among"),
        (lambda: record(["a", "b", "a", "c", "d"])[0].row(5), IndexError, "a position below 5, got 5"),
    ],
)
def test_wrong_arguments(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def record(tokens: Any = None, L: int = 5, **options: Any) -> see.Layer:
    return see.record(torch.randn(L, 8), torch.randn(L, 8), tokens, **options)


def test_what_was_not_kept_cannot_be_asked() -> None:
    with see.capture(Free()) as seen:
        seen._model(torch.randn(N, 8))
    with pytest.raises(ValueError, match=r'Rows\(.*3.*was not recorded for .Free.;.*keep="qk"'):
        seen[0, 0].row(3)
    with pytest.raises(ValueError, match="rollout: expected capture"):
        seen.rollout(0)


def test_a_model_without_attention_raises() -> None:
    with (
        pytest.raises(RuntimeError, match=r"expected calls of regard.attention, .*, got none from Linear"),
        see.capture(nn.Linear(3, 3)) as seen,
    ):
        seen._model(torch.ones(3))


def test_tokens_that_do_not_fit_raise() -> None:
    with (
        pytest.raises(ValueError, match=r"got lengths \[2\]; special tokens count"),
        see.capture(Free(), tokens=["a", "b"]) as seen,
    ):
        seen._model(torch.randn(3, 8))


def test_a_capture_records_once_at_a_time() -> None:
    seen = see.capture(Free())
    with seen, pytest.raises(RuntimeError, match="expected a capture that is not recording"):
        seen.__enter__()
    assert "nothing recorded" in repr(seen)
    with pytest.raises(IndexError, match="layer: expected an index below 0, got 0"):
        seen[0]


def test_keys_of_padding_that_a_model_does_not_mask() -> None:
    """The largest weights are on padding, which has no token."""
    q, k = torch.ones(2, 1, 4, 8), torch.zeros(2, 1, 4, 8)
    k[1, :, 3] = 9
    head = see.record(q, k, [["a", "b", "c", "d"], ["a", "b", "c"]]).head(0, sample=1)
    assert head.roles["delimiter or sink"].score < 0.01
    assert {key.token for key in head.top("b")} == {"a", "b", "c"}
    assert "3 more" not in head._repr_html_()


# Heads whose role is known


def head_with(scores: Tensor, tokens: Any = None, **options: Any) -> see.Head:
    """A head with these scores (L, L)."""
    layer = see.record(scores, torch.eye(len(scores)), tokens, scale=1.0, **options)
    return layer[0]


def at_distance(d: int) -> Tensor:
    i = torch.arange(N)
    return 12.0 * (i[:, None] - i == d)


def same_tokens(tokens: tuple[str, ...], shift: int) -> Tensor:
    """12 where key j - shift is the token of query i, and is another place."""
    n = len(tokens)
    pairs = [
        [0 <= j - shift < n and i != j - shift and tokens[j - shift] == tokens[i] for j in range(n)]
        for i in range(n)
    ]
    return 12.0 * torch.tensor(pairs)


def test_previous_token() -> None:
    head = head_with(at_distance(1))
    assert head.roles["previous token"].score > 0.99
    assert head.role is not None
    assert head.role.name == "previous token"
    assert head.roles["fixed offset"].detail == "one back"


@pytest.mark.parametrize(("d", "told"), [(-1, "one ahead"), (0, "itself"), (2, "2 back"), (-3, "3 ahead")])
def test_fixed_offset(d: int, told: str) -> None:
    roles = head_with(at_distance(d)).roles
    assert roles["fixed offset"].detail == told
    assert roles["fixed offset"].score == pytest.approx((N - abs(d)) / N, abs=0.05)
    assert roles["previous token"].score < 0.01


def test_sink() -> None:
    scores = torch.zeros(N, N)
    scores[:, 0] = 12
    role = head_with(scores, mask=M.Causal()).role
    assert role is not None
    assert (role.name, role.detail) == ("delimiter or sink", "most on '0'")
    assert role.score > 0.99


def test_delimiter() -> None:
    tokens = ("[CLS]", "a", "man", ",", "b", "<s>", "c", ".", "d", "[SEP]")
    scores = torch.zeros(10, 10)
    scores[:, [3, 5, 7]] = 12
    role = head_with(scores, tokens).role
    assert role is not None
    assert role.name == "delimiter or sink"
    assert head_with(scores).roles["delimiter or sink"].score < 0.1, "positions say nothing of commas"


def test_broad_and_sharp() -> None:
    broad, sharp = head_with(torch.zeros(N, N)), head_with(at_distance(0).roll(7, 1))
    assert broad.roles["broad"].score == pytest.approx(1)
    assert broad.roles["sharp"].score == pytest.approx(1 / N)
    assert broad.role is not None
    assert broad.role.name == "broad"
    assert sharp.roles["sharp"].score > 0.99
    assert sharp.roles["broad"].score < 0.01
    assert_close(broad.confidence, torch.full((N,), 1 / N))


def test_entropy_of_causal_rows_compares() -> None:
    head = head_with(torch.zeros(N, N), mask=M.Causal())
    assert_close(head.entropy[1:], torch.ones(N - 1))


def test_duplicate() -> None:
    head = head_with(same_tokens(WORDS, 0), WORDS)
    assert head.role is not None
    assert (head.role.name, head.role.detail) == ("duplicate", "10 queries")
    assert head.role.score > 0.99
    assert head.roles["induction"].score < 0.1
    assert head_with(at_distance(0).new_zeros(len(WORDS), len(WORDS)), WORDS).roles["duplicate"].score < 0.3


def test_induction() -> None:
    head = head_with(same_tokens(WORDS, 1), WORDS, mask=M.Causal())
    assert head.role is not None
    assert head.role.name == "induction"
    assert head.role.score > 0.99
    assert head.roles["duplicate"].score < 0.1


@pytest.mark.parametrize("options", [{}, {"mask": M.Causal()}, {"softcap": 2.0, "sink": torch.ones(1)}])
def test_pairs_are_those_of_the_dense_weights(options: dict[str, Any]) -> None:
    n = len(WORDS)
    q, k = torch.randn(2, 1, n, 8)
    roles = see.record(q, k, WORDS, **options)[0].roles
    w = regard.weights(q, k, k, **options)[0]
    for name, shift in (("duplicate", 0), ("induction", 1)):
        pairs = same_tokens(WORDS, shift) > 0
        if shift or "mask" in options:
            pairs &= M.Causal().to_dense(n, n)
        if not shift:
            pairs.fill_diagonal_(False)
        able = pairs.any(-1)
        wanted = (w * pairs).sum(-1)[able].mean().item()
        assert roles[name].score == pytest.approx(wanted, abs=1e-5)
        assert roles[name].detail == f"{int(able.sum())} queries"


def test_few_pairs_do_not_name_a_head() -> None:
    tokens = ("a", "b", "c", "a", "d", "e")
    scores = same_tokens(tokens, 0)
    scores[:, 2] = 6
    head = head_with(scores, tokens)
    assert head.roles["duplicate"].score > 0.9
    assert not head.roles["duplicate"].certain
    assert head.role is None or head.role.name != "duplicate"


def test_every_role_has_a_definition_and_a_source() -> None:
    roles = record(["a", "b", "a", "c", "."])[0].roles
    assert list(roles) == list(see.ROLES)
    for name, role in see.ROLES.items():
        assert role.meaning
        assert role.source
        assert 0 <= roles[name].score <= 1


# Rows, links, rollout


def test_rows_links_and_rollout() -> None:
    model = nn.Sequential(*(regard.nn.Attention(16, 2, mask=M.Causal()) for _ in range(3))).eval()
    n = len(WORDS)
    x = torch.randn(1, n, 16)
    with torch.no_grad(), see.capture(model, tokens=WORDS, keep="qk") as seen:
        model(x)
    dense = [regard.weights(layer.q, layer.k, layer.k, mask=M.Causal())[0] for layer in seen]
    head = seen[1, 1]
    assert_close(head.weights(), dense[1][1])
    assert_close(head.row("cat"), dense[1][1, 1])
    top = head.top("bird", 3)
    at = WORDS.index("bird")
    assert [key.position for key in top] == dense[1][1, at].topk(3).indices.tolist()
    assert top[0].token == WORDS[top[0].position]
    best = seen.links("bird", "cat")
    assert len(best) == 6
    assert best[0].weight == pytest.approx(max(float(w[h, at, 1]) for w in dense for h in range(2)), abs=1e-6)
    row = torch.zeros(n)
    row[at] = 1
    for w in reversed(dense):
        row = row @ (0.5 * (w.mean(0) + torch.eye(n)))
    assert_close(seen.rollout("bird"), row)
    with pytest.raises(KeyError, match="expected a name that occurs once in 0, 1, 2, got 'x'"):
        seen["x"]
    assert seen["1"] is seen[1]


def test_rollout_needs_self_attention() -> None:
    model = regard.nn.Attention(16, 2).eval()
    with torch.no_grad(), see.capture(model, keep="qk") as seen:
        model(torch.randn(1, 3, 16), torch.randn(1, 5, 16))
    with pytest.raises(ValueError, match="rollout: expected self-attention in every layer"):
        seen.rollout(0)


# Notebooks


EVIL = (
    "<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "</td></table>", "&lt;", "a'b",
    "\x00\x1b[31m",
)  # fmt: skip


def test_html_is_escaped() -> None:
    layer = see.record(torch.randn(2, len(EVIL), 8), torch.randn(2, len(EVIL), 8), EVIL, name="<b>evil</b>")
    with see.capture(Free(), tokens=EVIL) as seen:
        seen._model(torch.randn(len(EVIL), 8))
    for page in (layer._repr_html_(), layer[0]._repr_html_(), seen._repr_html_()):
        assert "<script" not in page
        assert "<img" not in page
        assert "<b>" not in page
        assert "\x1b" not in page
        assert "\x00" not in page
        assert page.count("<table") == page.count("</table>") == 1
        assert page.count("<td") == page.count("</td>")
    assert see.capture(Free())._repr_html_().count("nothing recorded") == 1
