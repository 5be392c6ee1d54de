"""Pictures of given weights: tensors, arrays and tuples with one tensor per layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import masks as M, see
from support import assert_close

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure

WORDS = ["the", "cat", "saw", "the", "dog"]


def causal(*shape: int) -> Tensor:
    scores = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    allowed = M.Causal().to_dense(*shape[-2:])
    return scores.masked_fill(~allowed, -torch.inf).softmax(-1)


def drawn(figure: Figure) -> Tensor:
    return torch.tensor(figure.axes[0].images[0].get_array().filled())


def names(figure: Figure) -> list[str]:
    return [label.get_text() for label in figure.axes[0].get_yticklabels()]


LAYERS = tuple(causal(2, 3, 5, 5).roll(layer, 1) for layer in range(4))
GIVEN: dict[str, tuple[Any, dict[str, Any], Tensor]] = {
    "L x L": (LAYERS[0][0, 0], {}, LAYERS[0][0, 0]),
    "H x L x L": (LAYERS[0][1], {"head": 2}, LAYERS[0][1, 2]),
    "B x H x L x L": (LAYERS[0], {"head": -1, "sample": 1}, LAYERS[0][1, 2]),
    "tuple": (LAYERS, {"layer": 3, "head": 1}, LAYERS[3][0, 1]),
    "array": (LAYERS[0][0].numpy(), {"head": 1}, LAYERS[0][0, 1]),
    "arrays": ([x.double().numpy() for x in LAYERS], {"layer": -2, "head": 0}, LAYERS[2][0, 0]),
    "needs grad": (LAYERS[0][0].clone().requires_grad_(), {"head": 0}, LAYERS[0][0, 0]),
    "one layer, one head": ((LAYERS[0][:, :1],), {}, LAYERS[0][0, 0]),
}


@pytest.mark.parametrize("name", GIVEN)
def test_a_heatmap_of_given_weights(name: str) -> None:
    weights, options, expected = GIVEN[name]
    figure = see.heatmap(weights, WORDS, **options)
    assert_close(drawn(figure), expected)
    assert names(figure) == WORDS
    layer, head = options.get("layer", 0) % 4, options.get("head", 0) % 3
    assert f"layer {layer}, head {head}" in figure.get_suptitle()


def test_16_bit_weights_and_rows_that_sum_to_less_than_one() -> None:
    """Rows sum to less than 1 in models with a sink, and to 0 for padded queries."""
    assert_close(drawn(see.heatmap(LAYERS[0][0, 0].bfloat16())), LAYERS[0][0, 0], atol=1e-2)
    less = LAYERS[0][0] * torch.tensor([1.0, 0.5, 0.01, 0.9999, 0.0])[:, None]
    for head in range(3):
        assert_close(drawn(see.heatmap(less, head=head)), less[head], atol=1e-6)


def test_given_weights_have_the_facts_of_a_recorded_call() -> None:
    q, k = torch.randn(2, 1, 4, 5, 8)
    options = {"mask": M.Causal()}
    recorded = see.record(q, k, WORDS, **options)
    given = see.from_weights((regard.weights(q, k, k, **options),), WORDS)[0]
    assert given.texts() == tuple(WORDS)
    for fact in (regard.Entropy(), regard.RowMax(), regard.DistanceHistogram(), regard.BlockMass(2)):
        for ours, theirs in zip(flat(given.fact(fact)), flat(recorded.fact(fact)), strict=True):
            assert_close(ours, theirs, atol=1e-5)
    for ours, theirs in zip(given, recorded, strict=True):
        assert [role.score for role in ours.roles.values()] == pytest.approx(
            [role.score for role in theirs.roles.values()], abs=1e-5
        )


def flat(result: Any) -> list[Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, Tensor)]


PICTURES: dict[str, Callable[..., Figure]] = {
    "heatmap": lambda seen, **options: see.heatmap(seen, layer=1, head=2, **options),
    "token": lambda seen, **options: see.token(seen, 4, layer=1, head=2, **options),
    "grid": see.grid,
    "rollout": lambda seen, **options: see.rollout(seen, 4, **options),
    "entropy": see.entropy,
    "entropy_map": see.entropy_map,
    "distances": see.distances,
}


@pytest.mark.parametrize("name", PICTURES)
def test_every_picture_takes_weights_a_title_and_axes(name: str) -> None:
    draw = PICTURES[name]
    figure = draw(LAYERS, tokens=WORDS, title="My title", sample=1)
    assert figure.get_suptitle() == "My title"
    recorded = draw(see.from_weights([x[1] for x in LAYERS], WORDS))
    for ours, theirs in zip(figure.axes[0].images, recorded.axes[0].images, strict=True):
        assert_close(torch.tensor(ours.get_array()), torch.tensor(theirs.get_array()), atol=0)
    mine = Figure()
    left, right = mine.subplots(1, 2)
    assert draw(LAYERS, tokens=WORDS, title="My title", ax=right) is mine
    assert right.get_title(loc="left") == "My title"
    assert right.has_data()
    assert not left.has_data()


def test_vmax_is_the_end_of_the_colour_scale() -> None:
    for figure in (see.heatmap(LAYERS, layer=0, head=0, vmax=0.2), see.grid(LAYERS, vmax=0.2)):
        assert figure.axes[0].images[0].get_clim() == (0, 0.2)
    assert figure.axes[0].images[0].get_array().max() > 0.2, "values are not changed"
    with pytest.raises(ValueError, match="vmax: expected more than 0, got 0"):
        see.heatmap(LAYERS, layer=0, head=0, vmax=0)


def test_what_see_records_needs_no_tokens() -> None:
    seen = see.from_weights(LAYERS)
    expected = drawn(see.heatmap(seen[2, 1]))
    assert_close(drawn(see.heatmap(seen, layer=2, head=1)), expected)
    assert_close(drawn(see.heatmap(seen[2], head=1)), expected)
    with pytest.raises(ValueError, match="head: expected None for a Head, got int 3"):
        see.heatmap(seen[2, 1], head=3)
    with pytest.raises(ValueError, match="tokens: expected None for a Capture"):
        see.grid(seen, WORDS)


def test_a_wrong_input_is_told_what_is_taken() -> None:
    taken = r"weights: expected .* \(L, L\), \(H, L, L\) or \(B, H, L, L\).*outputs.attentions.*, got "
    wrong_types = (3, "weights", None, [], object(), [LAYERS, LAYERS], (None, None), torch.ones(3), [0.5])
    for wrong in wrong_types:
        for draw in (lambda x: see.heatmap(x, layer=0, head=0), see.grid, see.entropy, see.distances):
            with pytest.raises(TypeError, match=taken):
                draw(wrong)
    with pytest.raises(TypeError, match='attn_implementation="eager"'):
        see.heatmap(None)
    with pytest.raises(ValueError, match=r"head: expected an index below 3, got None; see.grid draws all"):
        see.heatmap(LAYERS[0])
    with pytest.raises(ValueError, match="layer: expected an index below 4, got None"):
        see.heatmap(LAYERS, head=0)
    with pytest.raises(IndexError, match="layer: expected an index below 4, got 4"):
        see.heatmap(LAYERS, layer=4, head=0)
    with pytest.raises(IndexError, match="sample: expected an index below 2, got 2"):
        see.grid(LAYERS, sample=2)
    with pytest.raises(ValueError, match=r"tokens: expected one string for each .* got lengths \[2, 2\]"):
        see.heatmap(LAYERS, WORDS[:2], layer=0, head=0)

    with pytest.raises(TypeError, match=r"tokens: .* tensor .*; write tokenizer\.convert_ids_to_tokens"):
        see.heatmap(LAYERS, torch.arange(5), layer=0, head=0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="ax: expected matplotlib axes, got ndarray"):
        see.grid(LAYERS, ax=Figure().subplots(2))


def test_numbers_that_are_not_weights_are_refused() -> None:
    rows = r"weights: expected rows of at least 0 that sum to at most 1, got "
    for wrong in (torch.randn(5, 5), LAYERS[0] * 1.1, torch.full((5, 5), torch.nan), torch.ones(5, 5).bool()):
        with pytest.raises(ValueError, match=rows):
            see.grid(wrong)


def test_tokens_of_each_sample() -> None:
    batch = [WORDS, ["a", "dog"]]
    figure = see.heatmap(LAYERS, batch, layer=0, head=0, sample=1)
    assert names(figure) == ["a", "dog"]
    assert_close(drawn(figure), LAYERS[0][1, 0, :2, :2])


QUERIES, KEYS = ["the", "cat", "saw"], ["die", "Katze", "sah", "ihn", "."]
CROSS = tuple(torch.randn(2, 3, 3, 5, generator=torch.Generator().manual_seed(1)).softmax(-1) for _ in "ab")


def key_names(figure: Figure) -> list[str]:
    return [label.get_text() for label in figure.axes[0].get_xticklabels()]


def test_keys_of_cross_attention_have_their_own_tokens() -> None:
    options = {"layer": 1, "head": 2, "sample": 1}
    figure = see.heatmap(CROSS, QUERIES, key_tokens=KEYS, **options)
    assert_close(drawn(figure), CROSS[1][1, 2])
    assert (names(figure), key_names(figure)) == (QUERIES, KEYS)
    bars = see.token(CROSS, "cat", QUERIES, key_tokens=KEYS, **options).axes[0]
    assert [label.get_text() for label in bars.get_yticklabels()] == KEYS
    assert [bar.get_width() for bar in bars.patches] == pytest.approx(CROSS[1][1, 2, 1].tolist())
    assert len({bar.get_facecolor() for bar in bars.patches}) == 1, "no key is the query itself"
    assert len(see.grid(CROSS, QUERIES, key_tokens=KEYS).axes[0].images) == 6
    only_keys = see.heatmap(CROSS, key_tokens=KEYS, **options)
    assert key_names(only_keys) == KEYS
    seen = see.from_weights(CROSS, QUERIES, key_tokens=KEYS)
    assert seen.links("saw", "sah")[0].weight == pytest.approx(max(float(x[0, :, 2, 2].max()) for x in CROSS))
    assert [key.token for key in seen[0, 1].top("cat", 5)] == [
        KEYS[j] for j in CROSS[0][0, 1, 1].argsort().flip(0)
    ]


def test_as_many_keys_as_queries_may_have_other_tokens() -> None:
    """Equal tokens of two texts are not repetitions, and a query is none of the keys."""
    words = ["a", "b", "a", "b", "."]
    seen = see.from_weights(LAYERS[0], words, key_tokens=KEYS)
    assert (seen[0].texts(), seen[0].key_texts()) == (tuple(words), tuple(KEYS))
    assert (names(see.heatmap(seen[0, 1])), key_names(see.heatmap(seen[0, 1]))) == (words, KEYS)
    assert seen[0, 1].roles["duplicate"].detail == "no repeated token"
    own = see.from_weights(LAYERS[0], words)[0]
    sinks = seen[0, 1].roles["delimiter or sink"].score
    mass = LAYERS[0][0, 1].sum(0)
    assert sinks == pytest.approx(float((mass[0] + mass[4]) / 5), abs=1e-5)
    assert own[1].roles["duplicate"].detail != "no repeated token"
    with pytest.raises(ValueError, match="rollout: expected self-attention in every layer"):
        seen.rollout("a")


def test_key_tokens_of_each_sample() -> None:
    figure = see.heatmap(
        CROSS, [QUERIES, ["a", "dog"]], key_tokens=[KEYS, KEYS[:4]], layer=0, head=0, sample=1
    )
    assert (names(figure), key_names(figure)) == (["a", "dog"], KEYS[:4])
    assert_close(drawn(figure), CROSS[0][1, 0, :2, :4])
    q, k = torch.randn(2, 3, 3, 4), torch.randn(2, 3, 5, 4)
    layer = see.record(q, k, [QUERIES, ["a", "dog"]], key_tokens=[KEYS, KEYS])
    assert layer.fact(regard.ColumnMass())[1].sum() == pytest.approx(2 * 3), "two real queries, three heads"


def test_wrong_tokens_of_keys_are_told() -> None:
    with pytest.raises(
        ValueError, match=r"key_tokens: expected one string for each key of .* got lengths \[4, 4\]"
    ):
        see.heatmap(CROSS, QUERIES, key_tokens=KEYS[:4], layer=0, head=0)
    for tokens in (QUERIES, KEYS, (QUERIES, KEYS)):  # without key_tokens
        with pytest.raises(
            ValueError, match=r"tokens: expected one string .* other tokens of keys go to key_tokens"
        ):
            see.heatmap(CROSS, tokens, layer=0, head=0)
    with pytest.raises(ValueError, match="tokens: expected one string for each token"):
        see.grid(CROSS, KEYS, key_tokens=KEYS)
    with pytest.raises(TypeError, match="key_tokens: expected a list of strings"):
        see.grid(CROSS, QUERIES, key_tokens="die Katze")
    with pytest.raises(ValueError, match="key_tokens: expected None for a Capture, got list"):
        see.grid(see.from_weights(CROSS), key_tokens=KEYS)


def test_cross_attention_of_a_module() -> None:
    layer, x, context = (
        regard.nn.CrossAttention(16, heads=2, kv_model=8),
        torch.randn(1, 3, 16),
        torch.randn(1, 5, 8),
    )
    _, weights = layer(x, context, return_weights=True)
    figure = see.heatmap(weights, QUERIES, key_tokens=KEYS, head=1)
    assert_close(drawn(figure), weights[0, 1].detach())


def test_attentions_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=50, attn_implementation="eager", **sizes)
    model = transformers.BertModel(config).eval()
    with torch.no_grad():
        outputs = model(torch.arange(5)[None], output_attentions=True)
    without = model(torch.arange(5)[None])
    with pytest.raises(TypeError, match="output_attentions=True"):
        see.heatmap(without, WORDS, layer=1, head=3)
    whole = see.heatmap(outputs, WORDS, layer=1, head=3)
    assert_close(drawn(whole), outputs.attentions[1][0, 3], atol=1e-6)
    figure = see.heatmap(outputs.attentions, WORDS, layer=1, head=3)
    assert_close(drawn(figure), outputs.attentions[1][0, 3], atol=1e-6)
