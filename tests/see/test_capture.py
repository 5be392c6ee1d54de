"""Capture: recorded calls of each kind of model, the restored model, and roles of known heads."""

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


def count_hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def check_facts(layer: see.Layer, expected: Tensor) -> None:
    """Checks that the facts of a layer equal those of the dense weights (B, H, Lq, Lk)."""
    assert layer.shape == tuple(expected.shape)
    assert_close(layer.fact(regard.ColumnMass()), expected.sum(-2), atol=1e-5)
    assert_close(layer.fact(regard.RowMax()).weights, expected.amax(-1), atol=1e-5)
    top = expected.topk(min(8, expected.shape[-1]), -1).values
    assert_close(layer.fact(regard.TopK(8)).weights[..., : top.shape[-1]], top, atol=1e-5)


# Models whose calls are recorded


@torch.no_grad()
def test_modules_of_regard() -> None:
    attend = regard.nn.Attention(32, 4, kv_heads=2, mask=M.Causal()).eval()
    model = nn.Sequential(nn.Linear(32, 32), attend)
    x = torch.randn(2, N, 32)
    output = model(x)
    with see.capture(model, keep="qk") as capture:
        assert_close(model(x), output, rtol=0, atol=0)
    (layer,) = capture
    assert layer.name == "1"
    qkv, options = attend.arguments(model[0](x))
    check_facts(layer, regard.weights(*qkv, **options))
    assert_close(layer.rows([0, 7]), regard.weights(*qkv, **options)[:, :, [0, 7]])


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_multihead_attention_of_pytorch(need_weights: bool, grad: bool) -> None:
    model = nn.MultiheadAttention(32, 4, batch_first=True).eval()
    x = torch.randn(2, N, 32)
    hidden = torch.ones(N, N).triu(1).bool()
    with torch.set_grad_enabled(grad):
        _, expected = model(x, x, x, attn_mask=hidden, average_attn_weights=False)
        with see.capture(model) as capture:
            model(x, x, x, attn_mask=hidden, need_weights=need_weights)
    assert type(model) is nn.MultiheadAttention
    assert count_hooks(model) == 0
    check_facts(capture[0], expected.detach())


def test_encoder_layers_of_pytorch_leave_their_fast_path() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(1, N, 32)
    with torch.no_grad():
        output = model(x)
        with see.capture(model, tokens=list(map(str, range(N)))) as capture:
            assert_close(model(x), output, atol=1e-5)
    assert [layer.name for layer in capture] == ["layers.0.self_attn", "layers.1.self_attn"]
    assert_close(capture[1].fact(regard.ColumnMass()).sum(-1), torch.full((1, 4), float(N)))


class Free(nn.Module):
    """A user's module that calls `regard.attention` directly."""

    def forward(self, x: Tensor) -> Tensor:
        return regard.attention(x, x, x, mask=M.Causal())


@pytest.mark.parametrize("shape", [(N, 8), (3, N, 8), (2, 3, N, 8)])
def test_any_module_that_calls_attention(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    with see.capture(Free()) as capture:
        capture._model(x)
    expected = regard.weights(x, x, x, mask=M.Causal())
    check_facts(capture[0], expected[(None,) * (4 - expected.ndim)])


def test_calls_with_a_cache_are_recorded() -> None:
    model = regard.nn.Attention(32, 4, mask=M.Causal()).eval()
    x = torch.randn(1, N, 32)
    with torch.no_grad():
        weights = regard.weights(*model.arguments(x)[0], mask=M.Causal())
        cache = model.new_cache(1)
        output = model(x)
        with see.capture(model) as capture:
            outputs = [model(chunk, cache=cache) for chunk in x.split((9, 1, N - 10), 1)]
    assert_close(torch.cat(outputs, 1), output)
    assert [layer.shape[2:] for layer in capture] == [(9, 9), (1, 10), (N - 10, N)]
    check_facts(capture[1], weights[:, :, 9:10, :10])
    check_facts(capture[2], weights[:, :, 10:])
    assert capture[2].texts()[0] == "10"


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "regard"])
@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_models_of_transformers(kind: str, implementation: str) -> None:
    model = small_model(kind, implementation)
    ids = torch.randint(1, 97, (2, N))
    real = torch.ones(2, N, dtype=torch.long)
    real[1, N - 5 :] = 0
    with torch.no_grad():
        model.set_attn_implementation("eager")
        expected = model(ids, attention_mask=real, output_attentions=True).attentions
        model.set_attn_implementation(implementation)
        hooks_before = count_hooks(model)
        with see.capture(model, tokenizer=IdTokenizer(), keep="qk") as capture:
            model(input_ids=ids, attention_mask=real)
    assert model.config._attn_implementation == implementation
    assert count_hooks(model) == hooks_before, "the hooks of Transformers stay"
    assert len(capture) == len(expected)
    for layer, weights in zip(capture, expected, strict=True):
        assert layer.tokens is not None
        assert list(map(len, layer.tokens)) == [N, N - 5]
        check_facts(layer, weights * real[:, None, :, None])
        assert_close(layer.head(1, sample=1).weights(), weights[1, 1, : N - 5, : N - 5], atol=1e-5)


def test_tokens_belong_to_their_call() -> None:
    model = small_model("llama", "sdpa")
    ids = torch.randint(1, 97, (1, 7))
    with torch.no_grad(), see.capture(model, tokenizer=IdTokenizer()) as capture:
        past = model(input_ids=ids, use_cache=True).past_key_values
        model(inputs_embeds=torch.randn(1, 7, 48))
        model(input_ids=ids[:, :2], past_key_values=past)
    assert [layer.shape[2:] for layer in capture] == [(7, 7)] * 4 + [(2, 9)] * 2
    assert capture[0].texts() == tuple(str(i) for i in ids[0].tolist())
    assert [layer.tokens is None for layer in capture] == [False] * 2 + [True] * 4
    assert capture[4].texts() == ("7", "8"), "positions"


class IdTokenizer:
    """A tokenizer whose tokens are the ids as text."""

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return list(map(str, ids))


def small_model(kind: str, attention: str) -> Any:
    hf = pytest.importorskip("transformers")
    pytest.importorskip("regard.hf").register()
    sizes = {"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6,
             "intermediate_size": 40, "max_position_embeddings": 64, "pad_token_id": 0}  # fmt: skip
    if kind == "bert":
        config: Any = hf.BertConfig(**sizes, attn_implementation=attention)
        return hf.BertModel(config).eval()
    return hf.LlamaModel(hf.LlamaConfig(**sizes, num_key_value_heads=2, attn_implementation=attention)).eval()


def test_weights_are_recorded_without_dropout_and_gradients() -> None:
    model = regard.nn.Attention(32, 4, dropout=0.5).train()
    x = torch.randn(1, N, 32, requires_grad=True)
    with see.capture(model) as capture:
        model(x).sum().backward()
    assert x.grad is not None
    check_facts(capture[0], regard.weights(*model.arguments(x)[0]).detach())


# The model after a capture


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        self.inner(x, x, x)
        raise ArithmeticError("broken")


def test_exceptions_restore_the_model() -> None:
    model = Broken()
    capture = see.capture(model)
    with pytest.raises(ArithmeticError), capture:
        model(torch.randn(1, 5, 8))
    assert type(model.inner) is nn.MultiheadAttention
    assert count_hooks(model) == 0
    assert not listeners
    assert len(capture) == 1, "calls before the exception stay recorded"
    with see.capture(model) as capture:
        for _ in range(2):
            with pytest.raises(ArithmeticError):
                model(torch.randn(1, 5, 8))
    assert [layer.name for layer in capture] == ["inner", "inner"]
    model.inner.forward = None  # type: ignore[assignment, method-assign]
    with pytest.raises(TypeError), see.capture(model):
        model(torch.randn(1, 5, 8))
    assert not listeners


def test_a_model_of_transformers_is_restored_after_an_exception() -> None:
    model = small_model("bert", "sdpa")
    with pytest.raises(ArithmeticError), see.capture(model):
        raise ArithmeticError
    assert model.config._attn_implementation == "sdpa"


def test_an_unsupported_model_stays_unchanged() -> None:
    class Own(nn.MultiheadAttention):
        pass

    model = nn.Sequential(nn.MultiheadAttention(8, 2), Own(8, 2))
    with pytest.raises(TypeError, match="subclass Own"), see.capture(model):
        pass
    assert [type(m) for m in model] == [nn.MultiheadAttention, Own]
    assert count_hooks(model) == 0
    assert not listeners


def test_nested_captures_record_only_their_model() -> None:
    one, two, x = Free(), Free(), torch.randn(N, 8)
    with see.capture(one) as a, see.capture(two) as b:
        one(x)
        two(x)
        two(x)
        regard.attention(x, x, x)
    assert (len(a), len(b)) == (1, 2)


def test_recorded_facts_are_small() -> None:
    L = 2048
    x = torch.randn(1, L, 8)
    with see.capture(Free()) as capture:
        capture._model(x)
    elements = sum(t.numel() for t in tree.tree_leaves(capture[0].found) if isinstance(t, Tensor))
    assert elements < 40 * L
    assert capture[0].q is None


# Wrong arguments


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: see.capture(3), TypeError, "model: expected an nn.Module, got int 3"),
        (
            lambda: see.capture(Free(), keep="all"),
            ValueError,
            "keep: expected None or \"qk\", got 'all'",
        ),
        (
            lambda: see.capture(Free(), tokens="text"),
            TypeError,
            "tokens: expected a list of strings",
        ),
        (lambda: see.capture(Free(), tokens=["a", 3]), TypeError, "tokens: expected strings"),
        (
            lambda: see.capture(Free(), tokens=["a"], tokenizer=1),
            ValueError,
            "one of them, got both",
        ),
        (lambda: see.capture(Free(), want=[3]), TypeError, "want: expected facts such as"),
        (lambda: record(["a"] * 5).head(9), IndexError, "head: expected an index below 1, got 9"),
        (lambda: record(["a"] * 5).head(0, 4), IndexError, "sample: expected an index below 1, got 4"),
        (lambda: record(["a", "b", "a", "c", "d"])[0].row("a"), ValueError, r"got 'a', at \[0, 2\]"),
        (lambda: record(["a", "b", "a", "c", "d"])[0].row("z"), ValueError, "got 'z', not among"),
        (lambda: record(["a", "b", "a", "c", "d"])[0].row(5), IndexError, "a position below 5, got 5"),
    ],
)
def test_wrong_arguments_raise(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def record(tokens: Any = None, L: int = 5, **options: Any) -> see.Layer:
    return see.record(torch.randn(L, 8), torch.randn(L, 8), tokens, **options)


def test_facts_that_were_not_recorded_raise() -> None:
    with see.capture(Free()) as capture:
        capture._model(torch.randn(N, 8))
    with pytest.raises(ValueError, match=r'Rows\(.*3.*was not recorded for .Free.;.*keep="qk"'):
        capture[0, 0].row(3)
    with pytest.raises(ValueError, match="rollout: expected capture"):
        capture.rollout(0)


def test_a_model_without_attention_raises() -> None:
    with (
        pytest.raises(RuntimeError, match=r"expected calls of regard.attention, .*, got none from Linear"),
        see.capture(nn.Linear(3, 3)) as capture,
    ):
        capture._model(torch.ones(3))


def test_tokens_that_do_not_fit_raise() -> None:
    with (
        pytest.raises(ValueError, match=r"got lengths \[2\]; special tokens count"),
        see.capture(Free(), tokens=["a", "b"]) as capture,
    ):
        capture._model(torch.randn(3, 8))


def test_a_capture_records_once_at_a_time() -> None:
    capture = see.capture(Free())
    with capture, pytest.raises(RuntimeError, match="expected a capture that is not recording"):
        capture.__enter__()
    assert "nothing recorded" in repr(capture)
    with pytest.raises(IndexError, match="layer: expected an index below 0, got 0"):
        capture[0]


def test_unmasked_padding_keys_are_left_out() -> None:
    """Keys of padding have no token and are left out, even if they have the largest weights."""
    q, k = torch.ones(2, 1, 4, 8), torch.zeros(2, 1, 4, 8)
    k[1, :, 3] = 9
    head = see.record(q, k, [["a", "b", "c", "d"], ["a", "b", "c"]]).head(0, sample=1)
    assert head.roles["delimiter or sink"].score < 0.01
    assert {key.token for key in head.top("b")} == {"a", "b", "c"}
    assert "3 more" not in head._repr_html_()


# Heads whose role is known


def head_with(scores: Tensor, tokens: Any = None, **options: Any) -> see.Head:
    """Returns a head with these scores (L, L)."""
    layer = see.record(scores, torch.eye(len(scores)), tokens, scale=1.0, **options)
    return layer[0]


def at_distance(d: int) -> Tensor:
    i = torch.arange(N)
    return 12.0 * (i[:, None] - i == d)


def same_tokens(tokens: tuple[str, ...], shift: int) -> Tensor:
    """Returns scores (n, n): 12 if position j - shift is not i but has the same token, else 0."""
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


@pytest.mark.parametrize(("d", "detail"), [(-1, "one ahead"), (0, "itself"), (2, "2 back"), (-3, "3 ahead")])
def test_fixed_offset(d: int, detail: str) -> None:
    roles = head_with(at_distance(d)).roles
    assert roles["fixed offset"].detail == detail
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


def test_entropy_of_uniform_causal_rows_is_one() -> None:
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
def test_duplicate_and_induction_scores_equal_the_dense_weights(options: dict[str, Any]) -> None:
    n = len(WORDS)
    q, k = torch.randn(2, 1, n, 8)
    roles = see.record(q, k, WORDS, **options)[0].roles
    weights = regard.weights(q, k, k, **options)[0]
    for name, shift in (("duplicate", 0), ("induction", 1)):
        pairs = same_tokens(WORDS, shift) > 0
        if shift or "mask" in options:
            pairs &= M.Causal().to_dense(n, n)
        if not shift:
            pairs.fill_diagonal_(False)
        has_pair = pairs.any(-1)
        expected = (weights * pairs).sum(-1)[has_pair].mean().item()
        assert roles[name].score == pytest.approx(expected, abs=1e-5)
        assert roles[name].detail == f"{int(has_pair.sum())} queries"


def test_masks_and_biases_of_an_unbatched_call() -> None:
    q, k = torch.randn(2, 3, 7, 8)
    keep = torch.rand(3, 7, 7) > 0.3
    for options in (
        {"mask": keep},
        {"mask": M.Dense(keep) & M.Causal(), "bias": torch.randn(3, 1, 7)},
        {"mask": ~M.Dense(keep[0]) | M.Lengths(4)},
        {"bias": torch.randn(7, 7), "mask": M.Documents([0, 0, 0, 1, 1, 1, 1])},
    ):
        layer = see.record(q, k, **options)
        assert_close(layer.rows([*range(7)])[0], regard.weights(q, k, k, **options))


def test_roles_from_few_pairs_are_uncertain() -> None:
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
    with torch.no_grad(), see.capture(model, tokens=WORDS, keep="qk") as capture:
        model(x)
    dense = [regard.weights(layer.q, layer.k, layer.k, mask=M.Causal())[0] for layer in capture]
    head = capture[1, 1]
    assert_close(head.weights(), dense[1][1])
    assert_close(head.row("cat"), dense[1][1, 1])
    top = head.top("bird", 3)
    query = WORDS.index("bird")
    assert [key.position for key in top] == dense[1][1, query].topk(3).indices.tolist()
    assert top[0].token == WORDS[top[0].position]
    links = capture.links("bird", "cat")
    assert len(links) == 6
    assert links[0].weight == pytest.approx(
        max(float(w[h, query, 1]) for w in dense for h in range(2)), abs=1e-6
    )
    row = torch.zeros(n)
    row[query] = 1
    for w in reversed(dense):
        row = row @ (0.5 * (w.mean(0) + torch.eye(n)))
    assert_close(capture.rollout("bird"), row)
    with pytest.raises(KeyError, match="expected a name that occurs once in 0, 1, 2, got 'x'"):
        capture["x"]
    assert capture["1"] is capture[1]


def test_rollout_needs_self_attention() -> None:
    model = regard.nn.Attention(16, 2).eval()
    with torch.no_grad(), see.capture(model, keep="qk") as capture:
        model(torch.randn(1, 3, 16), torch.randn(1, 5, 16))
    with pytest.raises(ValueError, match="rollout: expected self-attention in every layer"):
        capture.rollout(0)


# Notebooks


EVIL = (
    "<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "</td></table>", "&lt;", "a'b",
    "\x00\x1b[31m",
)  # fmt: skip


def test_html_is_escaped() -> None:
    layer = see.record(torch.randn(2, len(EVIL), 8), torch.randn(2, len(EVIL), 8), EVIL, name="<b>evil</b>")
    with see.capture(Free(), tokens=EVIL) as capture:
        capture._model(torch.randn(len(EVIL), 8))
    for page in (layer._repr_html_(), layer[0]._repr_html_(), capture._repr_html_()):
        assert "<script" not in page
        assert "<img" not in page
        assert "<b>" not in page
        assert "\x1b" not in page
        assert "\x00" not in page
        assert page.count("<table") == page.count("</table>") == 1
        assert page.count("<td") == page.count("</td>")
    assert see.capture(Free())._repr_html_().count("nothing recorded") == 1
