"""Makes explorers of texts, of tensors, and of recordings of `see.capture`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from .. import see
from .._api.plan import plan
from .._tools.arguments import describe
from .._tools.measuring import best_times
from ._read import Model, reader
from ._trace import Trace, wanted
from .explorer import Explorer

SAMPLE = 256  # queries that are timed


def text(*texts: str, model: Model = None) -> Explorer:
    """Makes an explorer of one text, or of several to compare.

    Args:
        texts: one or more texts. With none, the page that `serve` shows waits for a text.
        model: a pair of a model of Transformers and its tokenizer. With the gallery installed also the path
            of a directory of Transformers with safetensors or of a GGUF file; MiniLM by default. Only data
            is read from files: no code of a model is run, no pickle is opened, nothing is downloaded.

    Example:
        >>> explore.text("The cat sat on the mat", model=(model, tokenizer)).save("page.html")
    """
    read = reader(model)
    return Explorer(tuple(map(read, texts)), read)


def tensors(
    q: Tensor | Sequence[Tensor], k: Tensor | Sequence[Tensor], tokens: Sequence[str] | None = None, *,
    title: str = "", **options: Any,
) -> Explorer:  # fmt: skip
    """Makes an explorer of the queries and keys of one call of attention, or of lists for several layers.

    Args:
        q: (Hq, Lq, D), or (1, Hq, Lq, D), or (Lq, D). Fewer queries than keys are the last ones: at 100,000
            tokens q[:, -1000:] is a hundredth of the work.
        k: (Hkv, Lk, D) likewise.
        tokens: Lk strings; positions by default.
        title: what the page is called.
        options: mask, offset, bias, scale, softcap and sink, as `regard.attention` takes them.
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
    """The cost of the facts of one call. Roles that compare tokens are not included; they cost less."""

    flops: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.flops / 1e12:.3g} TFLOP, about {self.seconds:.3g} seconds"


def estimate(q: Tensor, k: Tensor, **options: Any) -> Estimate:
    """Estimates the cost of `tensors(q, k, **options)` by timing the last queries.

    A mask or a bias must depend on positions: one given as a matrix does not fit the last queries alone.

    Example:
        >>> print(explore.estimate(q, k, mask=masks.Causal()))   # then perhaps q[:, -1000:] instead
    """
    whole, few = plan(q, k, k, **options), q[..., -SAMPLE:, :]
    if options.get("offset") is not None:
        options = options | {"offset": options["offset"] + q.shape[-2] - few.shape[-2]}
    sample = plan(few, k, k, **options)
    run = partial(see.record, few, k, want=wanted(few.shape[-2], k.shape[-2], ()), **options)
    seconds = best_times({"sample": run}, 0, least=2)["sample"]
    share = whole.flops_executed / max(1, sample.flops_executed)
    return Estimate(whole.flops // 2, seconds * share)  # values are not read


def captured(
    seen: see.Capture, tokens: Sequence[str] | None = None, *, sample: int = 0, title: str = ""
) -> Explorer:
    """Makes an explorer of one sample of a `see.capture(model, keep="qk")` recording."""
    if not seen.layers:
        raise ValueError("seen: expected a capture that has recorded a call, got an empty one")
    keys = seen.layers[0].key_texts(sample) if tokens is None else tuple(tokens)
    return Explorer((_trace(seen.layers, keys, sample, title),))


def _trace(layers: Sequence[see.Layer], keys: tuple[str, ...], sample: int, title: str) -> Trace:
    queries = layers[0].texts(sample) if layers[0].shape[2] != len(keys) else keys
    return Trace(title, queries, keys, tuple(layers), sample)


def _listed(name: str, value: Tensor | Sequence[Tensor]) -> list[Tensor]:
    listed = [value] if isinstance(value, Tensor) else list(value)
    if not listed or not all(isinstance(x, Tensor) and x.ndim >= 2 for x in listed):
        raise TypeError(f"{name}: expected a tensor (H, L, D), or a list of them, got {describe(value)}")
    return listed
