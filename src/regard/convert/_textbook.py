"""Loads the weights of textbook attention classes into `regard.nn.Attention`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._tools.arguments import count, describe
from ..nn import Attention

Residual = Callable[[int, nn.Module], nn.Module]
State = Mapping[str, Tensor]

LETTERS = {"q": ("q", "query", "queries"), "k": ("k", "key", "keys"), "v": ("v", "value", "values")}
FORMS = ("{}", "w{}", "w{}s", "{}linear", "linear{}", "{}proj", "proj{}", "{}projection", "fc{}", "to{}")
PACKED = ("qkv", "wqkv", "qkvproj", "qkvlinear", "toqkv", "inproj", "packedproj", "cattn")
OUTPUTS = (
    "o", "out", "output", "wo", "wout", "fc", "fco", "fcout", "dense", "olinear", "outlinear", "linearo",
    "linearout", "oproj", "outproj", "cproj", "proj", "projection", "outprojection", "outputprojection",
    "toout", "unifyheads",
)  # fmt: skip
NORMS = ("norm", "layernorm", "ln", "norm1", "layernorm1", "ln1", "attnnorm")
# Module name in lower case without underscores -> its part of the layer.
PARTS = {form.format(name): part for part, names in LETTERS.items() for name in names for form in FORMS}
PARTS |= dict.fromkeys(("kv", "wkv", "kvproj", "kvlinear", "tokv"), "kv") | dict.fromkeys(PACKED, "qkv")
PARTS |= dict.fromkeys(OUTPUTS, "out") | dict.fromkeys(NORMS, "norm")
NUMBERED = "linears"  # a ModuleList of the four projections
ENDS = ("weight", "bias")


def from_textbook(
    state_dict: State, heads: int, *, kv_heads: int | None = None, residual: Residual | None = None,
    prefix: str = "", **options: Any,
) -> nn.Module:  # fmt: skip
    """Returns a `regard.nn.Attention` with the weights of a textbook's attention class.

    The class has linear layers for queries, keys, values and, optionally, the output, under any of
    the usual names: W_Q, w_q, w_qs, query, q_linear, q_proj, to_q, `linears.0`, or packed as qkv,
    in_proj, packed_proj or kv; and W_O, w_o, fc, dense, out, out_proj, `linears.3`. Widths, key
    heads and biases are read from the shapes. Channels of a projection are ordered by head.

    Args:
        state_dict: the `state_dict()` of the textbook's module, or of a model, with `prefix`.
        heads: the number of query heads. A state_dict does not contain it.
        kv_heads: the number of key heads, if one packed projection has fewer keys than queries. Default:
            `heads` for a packed projection, else read from the shapes.
        residual: `PostNorm` or `PreNorm`, if the class has a LayerNorm and a residual connection. The
            result is then `residual(d_model, attention)`, with the weights of the norm. For an eps
            other than PyTorch's, pass
            `partial(PostNorm, norm=partial(nn.LayerNorm, eps=1e-6))`.
        prefix: takes only the entries whose names begin with it, such as "layers.0.attention.".
        options: further arguments of `Attention`, such as `mask` and `dropout`.

    Raises:
        ValueError: two entries have the same meaning, an entry has none or is missing, or shapes do
            not fit. The message names the entries.

    Example:
        >>> theirs = textbook.MultiHeadAttention(d_model=512, n_heads=8)  # with W_Q, W_K, W_V, W_O
        >>> attend = regard.convert.from_textbook(theirs.state_dict(), 8)
    """
    heads = count("heads", heads, 1)
    parts = _parts(state_dict, prefix)
    norm = {end: parts.pop(f"norm.{end}") for end in ENDS if f"norm.{end}" in parts}
    _check_residual(norm, residual)
    sizes, state = _attention_state(parts, heads, kv_heads)
    like = next(iter(state.values()))
    layer = Attention(heads=heads, **sizes | options, device=like.device, dtype=like.dtype)
    layer.load_state_dict(state)
    if residual is None:
        return layer
    wrapped = residual(layer.d_model, layer)
    wrapped.load_state_dict(
        {f"norm.{end}": x for end, x in norm.items()} | layer.state_dict(prefix="sublayer.")
    )
    return wrapped.to(device=like.device, dtype=like.dtype)


# Names


def _parts(state_dict: State, prefix: str) -> dict[str, Tensor]:
    """Returns the tensors by part and kind: q.weight, q.bias, ..., out.weight, norm.bias."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"state_dict: expected a dict of tensors, such as module.state_dict(), got {describe(state_dict)}"
        )
    found: dict[str, str] = {}
    for name in state_dict:
        if not name.startswith(prefix):
            continue
        part = _part(name)
        if part in found:
            raise ValueError(
                f"state_dict: expected one entry for {part}, got {found[part]} and {name}; pass the entries "
                "of one attention module, or its prefix"
            )
        found[part] = name
    return {part: state_dict[name] for part, name in found.items()}


def _part(name: str) -> str:
    """Returns the meaning of an entry of a state_dict, such as "q.weight" for "attn.W_Q.weight"."""
    path = name.split(".")
    for end in ENDS:  # in_proj_weight and q_proj_weight of nn.MultiheadAttention
        if path[-1].endswith(f"proj_{end}"):
            path[-1:] = [path[-1].removesuffix(f"_{end}"), end]
    if path[-1] not in ENDS:
        raise ValueError(_unknown(name))
    *modules, end = path
    if len(modules) > 1 and modules[-2] == NUMBERED and modules[-1] in ("0", "1", "2", "3"):
        return f"{('q', 'k', 'v', 'out')[int(modules[-1])]}.{end}"
    while len(modules) > 1 and (modules[-1].isdigit() or modules[-1] == "linear"):  # to_out.0, query.linear
        modules.pop()
    part = PARTS.get(modules[-1].lower().replace("_", "")) if modules else None
    if part is None:
        raise ValueError(_unknown(name))
    return f"{part}.{end}"


def _unknown(name: str) -> str:
    plain = PARTS.get(name.split(".")[-1].lower().replace("_", ""))
    if plain is None:
        return f"state_dict: expected projections of one attention module and a norm, got also {name}"
    return (
        f"state_dict: expected {name}.weight of a linear layer, (out, in), got {name}, which may be "
        f"(in, out); rename it to {name}.weight if the class computes x @ {name}.T, and transpose it too "
        f"if the class computes x @ {name}"
    )


def _check_residual(norm: dict[str, Tensor], residual: Residual | None) -> None:
    if norm and residual is None:
        raise ValueError(
            "residual: expected PostNorm, norm(x + attention(x)), or PreNorm, x + attention(norm(x)), for a "
            "state_dict with a norm, got None"
        )
    if residual is not None and not norm:
        raise ValueError("residual: expected None for a state_dict without a norm, got a residual connection")


# Shapes


def _attention_state(
    parts: dict[str, Tensor], heads: int, kv_heads: int | None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns the sizes of an `Attention` and its state_dict."""
    weights = _projections(parts, heads, kv_heads)
    biases = _biases(parts, [len(x) for x in weights])
    out = {name: x for name, x in parts.items() if name.startswith("out.")}
    q, k, v = weights
    D = _quotient("queries", len(q), heads)
    Hkv = _quotient("keys", len(k), D)
    if kv_heads not in (None, Hkv):
        raise ValueError(
            f"kv_heads: expected {Hkv}, the key heads of width {D} in the state_dict, got {kv_heads}"
        )
    sizes: dict[str, Any] = {
        "d_model": q.shape[1], "kv_heads": Hkv, "head_dim": D, "value_dim": _quotient("values", len(v), Hkv),
        "bias": biases is not None, "out": "out.weight" in out, "out_bias": "out.bias" in out,
    }  # fmt: skip
    groups, widths = _grouped(*(x.shape[1] for x in weights))
    state = {f"{name}.weight": torch.cat([weights[i] for i in group]) for name, group in groups.items()}
    if biases is not None:
        state |= {f"{name}.bias": torch.cat([biases[i] for i in group]) for name, group in groups.items()}
    return sizes | widths, state | out


def _grouped(queries: int, keys: int, values: int) -> tuple[dict[str, tuple[int, ...]], dict[str, int]]:
    """Returns the projections of an `Attention` for tokens of these widths, and its options.

    A projection is named as in `Attention`, and has the rows of queries (0), keys (1) and values (2).
    """
    if queries == keys == values:
        return {"qkv": (0, 1, 2)}, {}
    if keys == values:
        return {"q": (0,), "kv": (1, 2)}, {"kv_model": keys}
    return {"q": (0,), "k": (1,), "v": (2,)}, {"kv_model": keys, "value_model": values}


def _projections(parts: dict[str, Tensor], heads: int, kv_heads: int | None) -> list[Tensor]:
    """Returns the weights of queries, keys and values, each (out, in)."""
    names = tuple(name for name in ("q", "k", "v", "kv", "qkv") if f"{name}.weight" in parts)
    if names == ("qkv",):
        Hkv = heads if kv_heads is None else kv_heads
        D = _quotient("queries, keys and values", len(parts["qkv.weight"]), heads + 2 * Hkv)
        return list(parts["qkv.weight"].split((heads * D, Hkv * D, Hkv * D)))
    if names == ("q", "kv"):
        return [parts["q.weight"], *parts["kv.weight"].chunk(2)]
    if names == ("q", "k", "v"):
        return [parts[f"{name}.weight"] for name in names]
    raise ValueError(
        "state_dict: expected weights of q, k and v, of q and kv, or of qkv, got weights of "
        f"{', '.join(names) or 'none of them'}"
    )


def _biases(parts: dict[str, Tensor], widths: list[int]) -> list[Tensor] | None:
    """Returns the biases of queries, keys and values, or None if there are none.

    Some classes have no bias for keys. Zeros stand for it.
    """
    packed = {"qkv": widths, "kv": widths[1:]} | {name: [n] for name, n in zip("qkv", widths, strict=True)}
    found: dict[str, Tensor] = {}
    for name, sizes in packed.items():
        bias = parts.get(f"{name}.bias")
        if bias is None:
            continue
        if tuple(bias.shape) != (sum(sizes),):
            raise ValueError(f"state_dict: expected a bias ({sum(sizes)},) of {name}, got {describe(bias)}")
        if double := found.keys() & set(name):
            raise ValueError(
                f"state_dict: expected one bias for {', '.join(sorted(double))}, got also that of {name}"
            )
        found |= dict(zip(name, bias.split(sizes), strict=True))
    if not found:
        return None
    like = next(iter(found.values()))
    return [found.get(name, like.new_zeros(n)) for name, n in zip("qkv", widths, strict=True)]


def _quotient(what: str, rows: int, by: int) -> int:
    """Returns rows / by. Raises ValueError if the rows of a projection do not divide evenly."""
    if by < 1 or rows % by or not rows:
        raise ValueError(
            f"state_dict: expected a multiple of {by} channels of {what}, got {rows}; check heads, kv_heads"
        )
    return rows // by
