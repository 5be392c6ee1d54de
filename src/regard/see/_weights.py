"""Recordings of attention weights that are given as tensors, such as `outputs.attentions`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._tools.arguments import describe
from . import _tokens
from ._capture import Capture, Recorder
from ._layer import Head, Layer

SLACK = 0.01  # how far the sum of a row of 16-bit weights may be from 1
TAKEN = (
    "weights: expected a recording of `see`, a tensor or an array (L, L), (H, L, L) or (B, H, L, L), or a "
    "tuple of them, one per layer, such as outputs.attentions"
)


class Labels(NamedTuple):
    """The tokens of queries and keys that a picture was given."""

    tokens: _tokens.Texts | None = None
    key_tokens: _tokens.Texts | None = None


def from_weights(
    weights: Any, tokens: _tokens.Texts | None = None, *, key_tokens: _tokens.Texts | None = None
) -> Capture:  # fmt: skip
    """Returns a recording of given attention weights.

    Args:
        weights: a tensor or an array (L, L), (H, L, L) or (B, H, L, L) whose rows sum to 1, or less
            if the model has a sink; or a sequence with one of them per layer, such as the
            `outputs.attentions` of Transformers.
        tokens: a list of L strings, for all samples of the batch, or one list per sample. Default:
            positions.
        key_tokens: the tokens of the keys, if they are other tokens than those of the queries, as
            in cross-attention with weights (B, H, Lq, Lk). Default: `tokens`.

    Example:
        >>> outputs = model(**inputs, output_attentions=True)
        >>> see.from_weights(outputs.attentions, tokens)[2, 7].role
    """
    layers = [_checked(layer) for layer in _listed(weights)]
    texts, of_keys = (
        given * len(layers[0]) if given is not None and len(given) == 1 else given
        for given in (_tokens.samples(tokens), _tokens.samples(key_tokens, "key_tokens"))
    )
    recorder = Recorder(texts, (), True, of_keys)
    for layer in layers:
        recorder.layers.append(_recorded(recorder, layer))
    seen = Capture(nn.Module(), recorder, None)
    seen._check_recorded()
    return seen


def recording(seen: Any, tokens: _tokens.Texts | None, key_tokens: _tokens.Texts | None = None) -> Capture:
    """Returns `seen` if it is a recording already. Converts weights to a recording."""
    if isinstance(seen, Capture):
        _unused(seen, tokens=tokens, key_tokens=key_tokens)
        return seen
    return from_weights(seen, tokens, key_tokens=key_tokens)


def head_of(weights: Any, labels: Labels, layer: int | str | None, head: int | None, sample: int) -> Head:
    """Returns one head of a recording, or of given weights, of which only this layer is recorded."""
    if isinstance(weights, Head):
        _unused(weights, **labels._asdict(), layer=layer, head=head)
        return weights
    if isinstance(weights, Layer):
        _unused(weights, **labels._asdict(), layer=layer)
        return weights.head(_only("head", head, weights.heads), sample)
    if isinstance(weights, Capture):
        _unused(weights, **labels._asdict())
        return head_of(weights[_only("layer", layer, len(weights))], Labels(), None, head, sample)
    layers = _listed(weights)
    index = _only("layer", layer, len(layers))
    (recorded,) = from_weights(layers[index : index + 1], labels.tokens, key_tokens=labels.key_tokens)
    return head_of(replace(recorded, index=index), Labels(), None, head, sample)


def _only(name: str, value: Any, size: int) -> Any:
    """Returns an index from 0 to size - 1. None is the only one of one."""
    if value is None and size != 1:
        raise ValueError(f"{name}: expected an index below {size}, got None; see.grid draws all heads")
    return value if isinstance(value, str) else _tokens.index(name, value or 0, size)


def _unused(seen: Any, **arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"{name}: expected None for a {type(seen).__name__}, got {describe(value)}")


def _listed(weights: Any) -> list[Any]:
    """Returns a list with the weights of each layer. The output of a Transformers model has them."""
    weights = getattr(weights, "attentions", weights)
    if isinstance(weights, list | tuple) and weights:
        return list(weights)
    if not _is_array(weights):
        hint = ""
        if weights is None:
            hint = '; Transformers needs attn_implementation="eager" and output_attentions=True'
        raise TypeError(f"{TAKEN}, got {describe(weights)}{hint}")
    return [weights]


def _is_array(weights: Any) -> bool:
    return isinstance(weights, Tensor) or hasattr(weights, "__array__")


def _checked(weights: Any) -> Tensor:
    """Returns the weights of a layer as float32 (B, H, Lq, Lk) on the CPU."""
    if not _is_array(weights) or not 2 <= weights.ndim <= 4 or 0 in weights.shape:
        raise TypeError(f"{TAKEN}, got {describe(weights)}")
    rows = torch.as_tensor(weights).detach().float().cpu()
    sums = rows.sum(-1)
    if not ((rows >= 0).all() and (sums <= 1 + SLACK).all()):
        raise ValueError(
            f"weights: expected rows of at least 0 that sum to at most 1, got numbers from {rows.min():.3g} "
            f"and sums up to {sums.max():.3g}; apply softmax to scores, and call model.eval() against dropout"
        )
    return rows[(None,) * (4 - rows.ndim)]


def _recorded(recorder: Recorder, weights: Tensor) -> Layer:
    """Returns the `Layer` of a call whose weights are those given: zero queries, and log(weights) as bias.

    If rows sum to less than 1, a sink takes the rest. Its score is 0, so the bias of a row is
    log(weights / rest).
    """
    B, H, Lq, Lk = weights.shape
    sums = weights.sum(-1, keepdim=True)
    options: dict[str, Any] = {"bias": weights.log()}
    if ((sums > 0) & (sums < 1 - SLACK)).any():
        rest = (1 - sums).clamp_min(torch.finfo(torch.float32).tiny)
        options = {"bias": weights.log() - rest.log(), "sink": torch.zeros(H)}
    q, k = torch.zeros(B, H, Lq, 1), torch.zeros(B, H, Lk, 1)
    return recorder.layer(f"layer {len(recorder.layers)}", q, k, options)
