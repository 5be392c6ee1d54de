"""Runs docs/from-notes.md row by row and compares the results with samples in plain PyTorch."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from regard import convert
from regard.nn import PostNorm
from support import HAVE_CORE, ROOT, assert_close, rel_l2
from support.textbook import TextbookAttention

pytest.importorskip("matplotlib")
pytest.importorskip("transformers")

from matplotlib.figure import Figure

pytestmark = [
    pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning"),
]
LIMIT = 1e-6
PAGE = (ROOT / "docs" / "from-notes.md").read_text(encoding="utf-8")
ROW = re.compile(r"<tr><td>\n\n(?:\*\*(\w+)\.\*\* )?.*?```python\n(.*?)```", re.S)
Names = dict[str, Any]


def formula(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float | None = None) -> Any:
    """Returns softmax(scale * q.k) v and the weights, in float64. In the mask, 0 hides a key."""
    q, k, v = q.double(), k.double(), v.double()
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    weights = (scores if mask is None else scores.masked_fill(mask == 0, -1e9)).softmax(-1)
    return weights @ v, weights


def agree(result: Tensor, expected: Tensor) -> None:
    assert result.shape == expected.shape
    assert rel_l2(result, expected) < LIMIT


def compare(
    attend: Any, theirs: TextbookAttention, *inputs: Tensor, mask: Tensor | None = None, residual: Any = None,
    **options: Any,
) -> None:  # fmt: skip
    """Gives `attend` the weights of `theirs` and compares outputs and attention weights.

    `mask` is for `theirs`, `options` are for `attend`.
    """
    state = convert.from_textbook(theirs.state_dict(), theirs.heads, residual=residual).state_dict()
    if "kv.weight" in attend.state_dict() or "sublayer.kv.weight" in attend.state_dict():
        state = with_separate_queries(state, theirs.heads * theirs.d_k)
    attend.load_state_dict(state)
    out, weights = attend.eval()(*inputs, return_weights=True, **options)  # without dropout
    expected, expected_weights = theirs.double()(*(x.double() for x in inputs), mask=mask)
    agree(out, expected)
    agree(weights, expected_weights)


def with_separate_queries(state: dict[str, Tensor], queries: int) -> dict[str, Tensor]:
    """Splits the projection qkv into q and kv."""
    packed = {name: x for name, x in state.items() if "qkv." in name}
    parts = {name: x.split((queries, len(x) - queries)) for name, x in packed.items()}
    split = {name.replace("qkv", new): x[i] for name, x in parts.items() for i, new in enumerate(("q", "kv"))}
    return {name: x for name, x in state.items() if name not in packed} | split


def plain(module: Any) -> TextbookAttention:
    """Returns the sample in plain PyTorch with the weights of a `MultiheadAttention`."""
    theirs = TextbookAttention(module.embed_dim, module.num_heads)
    rows = zip("QKV", module.in_proj_weight.chunk(3), module.in_proj_bias.chunk(3), strict=True)
    state = {f"W_{x}.{end}": t for x, *pair in rows for end, t in zip(("weight", "bias"), pair, strict=True)}
    theirs.load_state_dict(state | {f"W_O.{end}": t for end, t in module.out_proj.state_dict().items()})
    return theirs.double()


def lower(n: int) -> Tensor:
    return torch.ones(n, n).tril()


def multihead_first(n: Names) -> None:
    real = ~n["padding"][:, None, None]
    expected, _ = plain(n["attend"])(n["s"].transpose(0, 1).double(), mask=lower(10) * real)
    agree(n["out"].transpose(0, 1), expected)


def hidden_by_zeros(n: Names) -> None:
    expected, _ = plain(n["attend"])(n["s"].transpose(0, 1).double(), mask=n["mask"])
    agree(n["hidden"].transpose(0, 1), expected)
    with pytest.raises(ValueError, match="all zeros and ones"):
        n["attend"](n["s"], n["s"], n["s"], attn_mask=n["mask"])


def padded(n: Names, **sizes: int) -> None:
    theirs, real = TextbookAttention(512, 8, **sizes), torch.arange(10) < torch.tensor([[10], [6]])
    n["attend"].load_state_dict(convert.from_textbook(theirs.state_dict(), 8).state_dict())
    out = n["attend"](n["x"], lengths=torch.tensor([10, 6]))
    expected, _ = theirs.double()(n["x"].double(), mask=real[:, None, None])
    agree(out[0], expected[0])
    agree(out[1, :6], expected[1, :6])


def nested(n: Names) -> None:
    compare(n["attend"], TextbookAttention(512, 8), n["x"], mask=lower(10))
    values = n["attend"](n["jagged"]).values()
    agree(values, torch.cat((n["attend"](n["x"])[0], n["attend"](n["x"])[1, :6])))


def grouped(n: Names) -> None:
    for layer, groups in ((n["grouped"], 4), (n["multi_query"], 1)):
        theirs, kv = TextbookAttention(512, 16), groups * 32
        weights, biases = (x.split((512, kv, kv)) for x in (layer.qkv.weight, layer.qkv.bias))

        def repeated(x: Tensor, groups: int = groups) -> Tensor:
            return x.unflatten(0, (groups, 32)).repeat_interleave(16 // groups, 0).flatten(0, 1)

        state = {}
        for end, (q, k, v) in (("weight", weights), ("bias", biases)):
            state |= {f"W_Q.{end}": q, f"W_K.{end}": repeated(k), f"W_V.{end}": repeated(v)}
        theirs.load_state_dict(state | {f"W_O.{end}": x for end, x in layer.out.state_dict().items()})
        agree(layer(n["x"]), theirs.double()(n["x"].double())[0])


def latent(n: Names) -> None:
    q, k, v = n["latent"].arguments(n["x"])[0]
    expected = formula(q, k, v, lower(10))[0].transpose(1, 2).flatten(2) @ n["latent"].out.weight.double().T
    agree(torch.cat(n["steps"], 1), expected)


def kinds(n: Names) -> None:
    theirs, x, y = TextbookAttention(512, 8), n["x"], n["y"]
    window = lower(10) - lower(10).tril(-4)  # the token itself and three before it
    compare(n["attend"], theirs, x)
    compare(n["attend"], theirs.float(), x, y)
    compare(n["local"], theirs.float(), x, mask=window)
    agree(n["attend"](x, mask=n["masks"].Causal()), theirs(x.double(), mask=lower(10))[0])


def graph(n: Names) -> None:
    layer, x = n["layer"], torch.randn(4, 16)
    h = (layer.project(x)).double()
    scores = (h @ layer.source[0].double())[None] + (h @ layer.target[0].double())[:, None]  # (i, j)
    edges = torch.eye(4)
    for source, target in ((0, 1), (1, 2), (2, 3), (3, 1)):
        edges[target, source] = 1
    alpha = torch.nn.functional.leaky_relu(scores, 0.2).masked_fill(edges == 0, -torch.inf).softmax(-1)
    agree(layer(x, n["graph"]), alpha @ h + layer.bias.double())


def linear(n: Names) -> None:
    q, k, v = (n[name].double() for name in "qkv")
    phi_q, phi_k = (torch.nn.functional.elu(t) + 1 for t in (q, k))
    agree(n["out"], phi_q @ (phi_k.mT @ v) / (phi_q @ phi_k.sum(-2, keepdim=True).mT))


def clip(n: Names) -> None:
    n["model"].set_attn_implementation("eager")
    agree(n["similarity"], n["model"](n["ids"], n["image"]).logits_per_image.softmax(-1).double())


def recommender(n: Names) -> None:
    """Another user's history changes nothing; the own order does."""
    encoder = n["encoder"].eval()

    def embed(history: Tensor) -> Any:
        return encoder(n["items"](history) + n["places"](torch.arange(20)))

    before, other, own = n["history"].clone(), n["history"].clone(), n["history"].clone()
    other[1], own[0, :2] = 7, torch.tensor([3, 4])
    assert torch.equal(embed(before)[0], embed(other)[0])
    assert not torch.allclose(embed(before)[0, -1], embed(own)[0, -1])


def forecaster(n: Names) -> None:
    assert n["predicted"].shape == n["series"].shape

    def run(series: Tensor) -> Any:
        return n["down"](n["forecast"].eval()(n["up"](series), mask=n["masks"].Causal()))

    swapped = n["series"][:, [1, 0, *range(2, 24)]]
    assert not torch.allclose(run(n["series"])[:, -1], run(swapped)[:, -1], atol=1e-4)


def scaled_dot_product(n: Names) -> None:
    out, weights = formula(n["q"], n["k"], n["v"], n["mask"])
    agree(n["output"], out)
    agree(n["weights"], weights)


def pytorchs_function(n: Names) -> None:
    k, v = (t.repeat_interleave(4, 1) for t in n["groups"])
    agree(n["same"], formula(n["q"], k, v, torch.ones(10, 7).tril(), 0.2)[0])


def from_state_dict(n: Names) -> None:
    theirs = TextbookAttention(512, 8, norm="layer_norm")
    theirs.load_state_dict(n["theirs"].state_dict())
    agree(n["attend"](n["x"]), theirs.double()(n["x"].double())[0])


def mask_of_samples(n: Names) -> None:
    theirs = TextbookAttention(512, 8, norm="layer_norm")
    theirs.load_state_dict(n["theirs"].state_dict())
    expected, weights = theirs.double()(n["x"].double(), mask=n["mask"][:, None])
    agree(n["output"], expected)
    agree(n["weights"], weights)


def worked_example(n: Names) -> None:
    assert_close(n["Q"][0], torch.tensor([[0.0, 1.45], [-0.95, -0.45]]))
    agree(n["joined"], torch.cat([formula(q, q, q)[0] for q in n["Q"]], -1))


def drawn(n: Names) -> None:
    assert isinstance(n["figure"], Figure)


LINEAR, SINGULAR = ("q_linear", "k_linear", "v_linear", "out"), ("w_qs", "w_ks", "w_vs", "fc")
NORM = {"residual": PostNorm}
CHECKS: dict[str, Callable[[Names], None]] = {
    "A1": lambda n: agree(n["out"], formula(n["q"], n["k"], n["v"])[0]),
    "A2": lambda n: agree(n["weights"], formula(n["q"], n["k"], n["v"])[1]),
    "A3": lambda n: agree(
        n["out"], formula(*(n["tokens"].double() @ n[name].double() for name in ("W_q", "W_k", "W_v")))[0]
    ),
    "A4": multihead_first,
    "A5": hidden_by_zeros,
    "A6": lambda n: assert_close(n["causal"].to_dense(5, 5).int(), lower(5).int()),
    "A7": lambda n: compare(n["attend"], TextbookAttention(512, 8), n["x"][:, :5], mask=lower(5)),
    "A8": scaled_dot_product,
    "A9": lambda n: compare(n["attend"], TextbookAttention(512, 8, norm="layer_norm"), n["x"], **NORM),
    "": from_state_dict,
    "A10": mask_of_samples,
    "A11": lambda n: compare(n["attend"], TextbookAttention(512, 8, norm="norm"), n["x"], n["y"], **NORM),
    "A12": drawn,
    "A13": lambda n: compare(
        n["attend"], TextbookAttention(512, 1, d_k=64, d_v=48, names=("w_q", "w_k", "w_v")), n["x"]
    ),
    "A14": padded,
    "A15": lambda n: compare(
        n["attend"], TextbookAttention(512, 8, names=LINEAR), n["x"], n["y"], n["values"]
    ),
    "A16": lambda n: agree(n["cooled"], formula(n["q"], n["k"], n["v"], scale=1 / 4)[0]),
    "A17": lambda n: compare(
        n["attend"],
        TextbookAttention(512, 8, d_k=24, d_v=20, names=SINGULAR, norm="layer_norm", bias=False, eps=1e-6),
        n["x"], n["y"], n["values"], residual=PostNorm,
    ),
    "A18": pytorchs_function,
    "A19": lambda n: padded(n, d_k=32),
    "A20": nested,
    "A21": lambda n: compare(
        n["attend"], TextbookAttention(512, 8, E_k=96, E_v=80, d_k=32), n["x"], n["keys"], n["values"]
    ),
    "A22": worked_example,
    "A23": lambda n: compare(n["attend"], TextbookAttention(512, 8, norm="norm"), n["x"], **NORM),
    "A24": grouped,
    "A25": latent,
    "A26": kinds,
    "A27": drawn,
    "A28": clip,
    "A29": recommender,
    "A30": forecaster,
    "A31": lambda n: agree(n["attended"], plain(n["attention"])(n["states"][None].double())[0][0]),
    "A33": graph,
    "A35": linear,
    "A39": drawn,
    "B1": lambda n: assert_close(torch.stack((n["variance"] / 64, n["scaled"])), torch.ones(2), rtol=0.02),
}  # fmt: skip
# These rows have no sample with numbers: their lines contain assertions, or other tests have the numbers.
RUN_ONLY = {"A32", "A34", "A36", "A37", "A38"}


def test_every_sample_agrees_with_plain_pytorch() -> None:
    torch.manual_seed(0)
    names: Names = {"__name__": "__main__"}
    first = re.search(r"```python\n(.*?)```", PAGE, re.S)
    assert first is not None
    exec(first.group(1), names)
    for row in ROW.finditer(PAGE):
        name, code = row.group(1) or "", row.group(2)
        exec(compile(code, f"row {name}", "exec"), names)
        CHECKS.get(name, lambda names: None)(names)


def test_the_page_has_every_sample() -> None:
    rows = [row.group(1) or "" for row in ROW.finditer(PAGE)]
    assert len(rows) == len(set(rows))
    assert {*rows} == CHECKS.keys() | RUN_ONLY
    assert {f"A{i}" for i in range(1, 40)} <= {*rows}
    assert "(A40)" in PAGE
