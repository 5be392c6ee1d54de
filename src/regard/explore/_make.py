"""Builds explorers from texts, from tensors, and from recordings of `see.capture`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from .. import see
from .._api.plan import plan
from .._tools.arguments import describe
from .._tools.measuring import best_times
from ..see._tokens import Texts
from ._read import Model, reader
from ._trace import Trace, wanted
from .explorer import Explorer

SAMPLE = 256  # `estimate` times this number of queries


def text(*texts: str, model: Model = None) -> Explorer:
    """Runs a model on one or more texts and returns an explorer.

    Args:
        texts: texts to show and compare. Without texts, the page of `serve` asks for a text.
        model: a pair of a Transformers model and its tokenizer. If `regard-gallery` is installed,
            `model` may also be the path of a Transformers directory with safetensors or of a GGUF
            file, and it defaults to MiniLM. Only data is read from files: code that comes with a
            model is not executed, pickle files are not opened, and nothing is downloaded.

    Example:
        >>> explore.text("The cat sat on the mat", model=(model, tokenizer)).save("page.html")
    """
    read = reader(model)
    return Explorer(tuple(map(read, texts)), read)


def tensors(
    q: Tensor | Sequence[Tensor], k: Tensor | Sequence[Tensor], tokens: Sequence[str] | None = None, *,
    title: str = "", **options: Any,
) -> Explorer:  # fmt: skip
    """Returns an explorer of the queries and keys of one attention call, or of one call per layer.

    Args:
        q: (Hq, Lq, D), (1, Hq, Lq, D) or (Lq, D), or a list with one such tensor per layer. If
            Lq < Lk, the queries belong to the last Lq tokens. With 100,000 tokens, passing
            q[:, -1000:] instead of q needs a hundredth of the work.
        k: (Hkv, Lk, D), (1, Hkv, Lk, D) or (Lk, D), or a list with one such tensor per layer.
        tokens: Lk strings, the keys' tokens. Default: the positions as text.
        title: the title of the page.
        options: options of `regard.attention`: mask, offset, bias, scale, softcap and sink.
    """
    pairs = list(zip(_listed("q", q), _listed("k", k), strict=True))
    Lq, Lk = pairs[0][0].shape[-2], pairs[0][1].shape[-2]
    keys = tuple(map(str, range(Lk))) if tokens is None else tuple(tokens)
    if len(keys) != Lk:
        raise ValueError(f"tokens: expected Lk = {Lk}, got {len(keys)}")
    layers = [
        see.record(*pair, keys if Lq == Lk else None, want=wanted(Lq, Lk, keys), **options) for pair in pairs
    ]
    return Explorer((_trace(layers, keys, 0, title),))


class Estimate(NamedTuple):
    """The estimated cost of computing the facts of one call.

    The cost of the roles "duplicate" and "induction", which compare tokens, is not included.
    """

    flops: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.flops / 1e12:.3g} TFLOP, about {self.seconds:.3g} seconds"


def estimate(q: Tensor, k: Tensor, **options: Any) -> Estimate:
    """Estimates the cost of `tensors(q, k, **options)` by timing the last 256 queries.

    The mask and the bias must be functions of positions, because a matrix with Lq rows does not fit
    the 256 timed queries.

    Example:
        >>> print(explore.estimate(q, k, mask=masks.Causal()))   # if too slow, use q[:, -1000:]
    """
    whole, last = plan(q, k, k, **options), q[..., -SAMPLE:, :]
    if options.get("offset") is not None:
        options = options | {"offset": options["offset"] + q.shape[-2] - last.shape[-2]}
    sample = plan(last, k, k, **options)
    record = partial(see.record, last, k, want=wanted(last.shape[-2], k.shape[-2], ()), **options)
    seconds = best_times({"sample": record}, 0, least=2)["sample"]
    ratio = whole.flops_executed / max(1, sample.flops_executed)
    return Estimate(whole.flops // 2, seconds * ratio)  # half, because facts need no product with values


def captured(
    seen: see.Capture, tokens: Sequence[str] | None = None, *, sample: int = 0, title: str = ""
) -> Explorer:
    """Returns an explorer of one sample of a recording made by `see.capture(model, keep="qk")`."""
    if not seen.layers:
        raise ValueError("seen: expected a capture with at least one call, got an empty one")
    keys = seen.layers[0].key_texts(sample) if tokens is None else tuple(tokens)
    return Explorer((_trace(seen.layers, keys, sample, title),))


def weights(
    weights: Any, tokens: Texts | None = None, *, key_tokens: Texts | None = None, sample: int = 0,
    title: str = "",
) -> Explorer:  # fmt: skip
    """Returns an explorer of given weights, such as the `outputs.attentions` of Transformers.

    `weights`, `tokens` and `key_tokens` are those of `see.from_weights`.
    """
    return captured(see.from_weights(weights, tokens, key_tokens=key_tokens), sample=sample, title=title)


def _trace(layers: Sequence[see.Layer], keys: tuple[str, ...], sample: int, title: str) -> Trace:
    others = layers[0].shape[2] != len(keys) or layers[0].key_tokens is not None
    queries = layers[0].texts(sample) if others else keys
    return Trace(title, queries, keys, tuple(layers), sample)


def _listed(name: str, value: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """Returns a list of tensors, one per layer. A single tensor becomes a list of one."""
    layers = [value] if isinstance(value, Tensor) else list(value)
    if not layers or not all(isinstance(x, Tensor) and x.ndim >= 2 for x in layers):
        raise TypeError(f"{name}: expected a tensor (H, L, D), or a list of them, got {describe(value)}")
    return layers
