"""`capture`: records facts about every attention call while a model runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as tree

from .. import facts
from .._api.evidence import evidence, rollout
from .._tools.arguments import describe
from .._tools.listeners import listening
from ..convert._replace import regard_attention
from ..masks import Documents
from ..masks._both import both
from ..masks._mask import decode
from . import _html, _tokens
from ._layer import Head, Layer, Link, on_cpu
from ._roles import WANTED, of_tokens

Tokens = tuple[tuple[str, ...], ...]


def capture(
    model: nn.Module, *, tokens: _tokens.Texts | None = None, tokenizer: Any = None,
    want: Sequence[facts.Fact] = (), keep: str | None = None,
) -> Capture:  # fmt: skip
    """Returns a context manager that records facts about every attention call of a model.

    It records calls of `regard.attention` (also inside `regard.nn`), `torch.nn.MultiheadAttention`
    and models of Hugging Face Transformers. PyTorch's modules and Transformers models use Regard's
    kernels inside the `with` block and are restored after it, also after an exception. The
    recording of a call with L tokens takes O(L) memory. The L x L weights are never stored.

    Args:
        model: the module to record. Each attention call in it becomes a `Layer`, in order.
        tokens: a list of strings, or one list per sample of the batch. In a sample with fewer
            tokens than the longest, the remaining positions are padding, which facts ignore.
        tokenizer: a tokenizer of Transformers, which decodes the model's `input_ids` to tokens.
        want: more facts to record, such as `regard.BlockMass(64)`. The facts from which head roles
            are computed are always recorded.
        keep: if "qk", queries and keys are stored too, in O(L) memory, so that rows, heat maps and
            other facts can be computed later. Default: they are not stored.

    Example:
        >>> with see.capture(model, tokenizer=tokenizer, keep="qk") as seen:
        ...     model(**tokenizer("The cat sat on the mat", return_tensors="pt"))
        >>> seen[2, 7].role
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {describe(model)}")
    if keep not in (None, "qk"):
        raise ValueError(f'keep: expected None or "qk", got {keep!r}')
    if tokens is not None and tokenizer is not None:
        raise ValueError("tokens, tokenizer: expected one of them, got both")
    for fact in want:
        if not isinstance(fact, facts.Fact):
            raise TypeError(f"want: expected facts such as regard.BlockMass(64), got {describe(fact)}")
    return Capture(model, Recorder(_tokens.samples(tokens), want, keep == "qk"), tokenizer)


def read(model: Any, tokenizer: Any, text: str, *, want: Sequence[facts.Fact] = ()) -> Capture:
    """Runs a Transformers model on a text and returns the recording, with queries and keys.

    Example:
        >>> seen = see.read(model, tokenizer, "The cat sat on the mat")
    """
    seen = capture(model, tokenizer=tokenizer, want=want, keep="qk")
    inputs = tokenizer(text, return_tensors="pt")
    length = inputs["input_ids"].shape[1]
    if length > tokenizer.model_max_length:
        raise ValueError(f"text: expected at most {tokenizer.model_max_length} tokens, got {length}")
    with seen, torch.inference_mode():
        model(**inputs.to(model.device))
    return seen


def record(
    q: Tensor, k: Tensor, tokens: _tokens.Texts | None = None, *, key_tokens: _tokens.Texts | None = None,
    name: str = "attention", want: Sequence[facts.Fact] = (), **options: Any,
) -> Layer:  # fmt: skip
    """Returns the recording of one call `attention(q, k, v, **options)`, with q and k stored.

    `key_tokens` are the tokens of the keys, if they are other tokens than those of the queries.
    """
    texts, of_keys = _tokens.samples(tokens), _tokens.samples(key_tokens, "key_tokens")
    return Recorder(texts, want, True, of_keys).layer(name, q, k, options)


class Capture:
    """A recording: a sequence of layers.

    For a recording `seen`, `seen[3]` and `seen["name"]` are layers, and `seen[3, 5]` is head 5 of
    layer 3.
    """

    def __init__(self, model: nn.Module, recorder: Recorder, tokenizer: Any) -> None:
        self._model, self._recorder, self._tokenizer = model, recorder, tokenizer
        self._running: ExitStack | None = None
        self._names: list[str] = []  # names of the running modules, outermost first
        self._thread = 0
        self._ran = False

    @property
    def layers(self) -> list[Layer]:
        return self._recorder.layers

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    def __getitem__(self, which: Any) -> Any:
        if isinstance(which, tuple):
            layer, head = which
            return self[layer].head(head)
        if isinstance(which, str):
            return self._named(which)
        return self.layers[_tokens.index("layer", which, len(self))]

    def _named(self, name: str) -> Layer:
        matches = [layer for layer in self if layer.name == name]
        if len(matches) != 1:
            names = ", ".join(dict.fromkeys(layer.name for layer in self))
            raise KeyError(f"layer: expected a name that occurs once in {names}, got {name!r}")
        return matches[0]

    def heads(self, sample: int = 0) -> Iterator[Head]:
        """Iterates over every head of every layer, for one sample."""
        return (head for layer in self for head in layer._of_sample(sample))

    def links(self, query: int | str, key: int | str, sample: int = 0) -> list[Link]:
        """Returns the weight from a query to a key in every head of every layer, largest first."""
        links = []
        for layer in self:
            i = _tokens.find(layer.texts(sample), query)
            j = _tokens.find(layer.key_texts(sample), key)
            weights = layer.rows([i])[sample, :, 0, j].tolist()
            links += [Link(layer.index, head, weight) for head, weight in enumerate(weights)]
        return sorted(links, key=lambda link: -link.weight)

    def entropy_map(self, sample: int = 0) -> list[Tensor]:
        """Returns a list with one tensor (Hq,) per layer: the mean normalised entropy of each head.

        The mean is over queries. 0 means that all weight is on one key, 1 that all allowed keys
        have equal weights.
        """
        return [torch.stack([head.entropy.mean() for head in layer._of_sample(sample)]) for layer in self]

    def rollout(self, token: int | str, sample: int = 0) -> Tensor:
        """Returns one token's row (L,) of attention rollout.

        The row contains the contribution of each of the L tokens to this token through all layers.
        """
        if not self.layers:
            raise ValueError("rollout: expected at least one layer, got none")
        for layer in self:
            if layer.q is None:
                raise ValueError('rollout: expected capture(model, keep="qk"), got layers without q and k')
            if layer.shape[2] != layer.shape[3] or layer.key_tokens is not None:
                raise ValueError(f"rollout: expected self-attention in every layer, got {layer!r}")
        calls: list[Any] = [(layer.q, layer.k, layer.options) for layer in self]
        texts = self[0].texts(sample)
        return rollout(calls, _tokens.find(texts, token))[sample, : len(texts)].cpu()

    def __repr__(self) -> str:
        if not self.layers:
            return "Capture(nothing recorded yet)"
        heads = sum(layer.heads for layer in self)
        return f"Capture({len(self)} layers, {heads} heads, {self.layers[0].shape[2]} queries)"

    def _repr_html_(self) -> str:
        return _html.capture(self)

    # Recording

    def __enter__(self) -> Capture:
        if self._running is not None:
            raise RuntimeError("capture: expected a capture that is not recording, got one that is")
        self._thread, self._ran, self._names = threading.get_ident(), False, []
        with ExitStack() as stack:
            if any(hasattr(module, "set_attn_implementation") for module in self._model.modules()):
                from ..hf import register

                register()
            stack.enter_context(regard_attention(self._model))
            for name, module in self._model.named_modules():
                self._follow(stack, name or type(module).__name__, module)
            stack.enter_context(listening(self._record))
            self._running = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self._running is not None
        self._running.close()
        self._running = None
        if kind is None and self._ran:
            self._check_recorded()

    def _check_recorded(self) -> None:
        """Raises if no call was recorded, or if the argument `tokens` fits none of the calls."""
        if not self.layers:
            raise RuntimeError(
                "capture: expected calls of regard.attention, torch.nn.MultiheadAttention or a model of "
                f"Transformers, got none from {type(self._model).__name__}"
            )
        tokens = self._recorder.tokens
        keys, first = self._recorder.key_tokens, self.layers[0]
        if tokens is not None and self._tokenizer is None and all(layer.tokens is None for layer in self):
            raise ValueError(
                f"tokens: expected one string for each token of {first!r}, got lengths "
                f"{list(map(len, tokens))}; special tokens count, and other tokens of keys go to key_tokens"
            )
        if keys is not None and all(layer.key_tokens is None for layer in self):
            got = f"lengths {list(map(len, keys))}"
            raise ValueError(f"key_tokens: expected one string for each key of {first!r}, got {got}")

    def _follow(self, stack: ExitStack, name: str, module: nn.Module) -> None:
        """Adds hooks to `module` that keep the list of running modules in `_names`.

        When the outermost module starts, its hook also calls `_begin`.
        """

        def entered(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            if threading.get_ident() != self._thread:
                return
            if not self._names:
                self._begin(args, kwargs)
            self._names.append(name)

        def left(module: nn.Module, args: Any, out: Any) -> None:
            if threading.get_ident() == self._thread and self._names:
                self._names.pop()

        stack.callback(module.register_forward_pre_hook(entered, with_kwargs=True).remove)
        stack.callback(module.register_forward_hook(left, always_call=True).remove)

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Decodes the tokens from the inputs of the outermost module, if there is a tokenizer."""
        self._ran = True
        if self._tokenizer is None:
            return
        self._recorder.tokens = None
        ids = kwargs.get("input_ids", args[0] if args else None)
        encoder_decoder = getattr(getattr(self._model, "config", None), "is_encoder_decoder", False)
        if isinstance(ids, Tensor) and not ids.is_floating_point() and not encoder_decoder:
            self._recorder.tokens = _tokens.of_ids(self._tokenizer, ids, kwargs.get("attention_mask"))
            self._recorder.length = ids.shape[-1]

    def _record(self, q: Tensor, k: Tensor, options: dict[str, Any]) -> None:
        if self._names and threading.get_ident() == self._thread:
            self._recorder.layers.append(self._recorder.layer(self._names[-1], q, k, options))


class Recorder:
    """Builds a `Layer` from the arguments of each attention call and keeps the layers."""

    def __init__(
        self, tokens: Tokens | None, want: Sequence[facts.Fact], keep: bool, key_tokens: Tokens | None = None
    ) -> None:
        self.want, self.keep = tuple(dict.fromkeys((*WANTED, *want))), keep
        self.layers: list[Layer] = []
        self.tokens, self.key_tokens = tokens, key_tokens  # key_tokens: None if they are the queries'
        self.length = 0 if tokens is None else max(map(len, tokens))  # tokens per sample, with padding

    @torch.no_grad()
    def layer(self, name: str, q: Tensor, k: Tensor, options: dict[str, Any]) -> Layer:
        """Returns the `Layer` of a call. q is (B, Hq, Lq, D) or (Hq, Lq, D), and k likewise."""
        options = _in_batch(options) if q.ndim == 3 else options
        q, k = (x.detach()[(None,) * (4 - x.ndim)] for x in (q, k))
        if q.ndim != 4:
            raise ValueError(f"capture: expected queries with at most one batch dim, got {describe(q)}")
        B, Hq, Lq, _ = q.shape
        Lk, offset = k.shape[2], options.get("offset")
        tokens, key_tokens = self._tokens(B, Lq, Lk), self._tokens_of_keys(B, Lk)
        options = self._without_padding(options, tokens, q, Lk)
        results = evidence(q, k, None, *self.want, **options)
        inputs: dict[str, Any] = {}
        if self.keep:
            detached = tree.tree_map_only(Tensor, Tensor.detach, options)
            inputs = {"q": q.clone(), "k": k.clone(), "options": detached}
        return Layer(
            name, len(self.layers), (B, Hq, Lq, Lk), Lk - Lq if offset is None else offset,
            dict(zip(self.want, on_cpu(results), strict=True)),
            of_tokens(q, k, options, None if key_tokens else tokens), tokens, key_tokens, **inputs,
        )  # fmt: skip

    def _tokens(self, B: int, Lq: int, Lk: int) -> Tokens | None:
        """Returns the tokens of all samples if they are the tokens of the call's queries, else None.

        Without `key_tokens`, the call must be self-attention over the tokens.
        """
        fits = Lq == self.length and (self.key_tokens is not None or Lq == Lk)
        return self.tokens if self.tokens and fits and len(self.tokens) == B else None

    def _tokens_of_keys(self, B: int, Lk: int) -> Tokens | None:
        """Returns the tokens of the keys of all samples if there are as many as in the call, else None."""
        keys = self.key_tokens
        return keys if keys is not None and len(keys) == B and max(map(len, keys)) == Lk else None

    def _without_padding(
        self, options: dict[str, Any], tokens: Tokens | None, q: Tensor, Lk: int
    ) -> dict[str, Any]:
        """Returns options whose mask excludes padded queries, so that facts ignore them."""
        Lq = q.shape[2]
        if tokens is None or all(len(sample) == Lq for sample in tokens):
            return options
        ids = [[-(i >= len(sample)) for i in range(Lq)] for sample in tokens]  # 0, or -1 for padding
        queries = torch.tensor(ids, device=q.device)
        real_rows = Documents(queries, queries.new_zeros(len(tokens), Lk))
        return options | {"mask": both(real_rows, options.get("mask"))}


def _in_batch(options: dict[str, Any]) -> dict[str, Any]:
    """Converts the mask and the bias of an unbatched call to those of a batch of one sample."""
    mask, bias = both(None, options.get("mask")), options.get("bias")
    if mask is not None and mask.lower().tensors:
        program = mask.lower()
        options = options | {"mask": decode(program.code, program.bind(()))}
    return options | {"bias": bias[None]} if isinstance(bias, Tensor) and bias.ndim == 3 else options
