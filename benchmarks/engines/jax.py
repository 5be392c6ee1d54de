"""JAX, compiled by XLA."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch
from cases import Case, Inputs, causal, lengths, window
from checks import outgoing
from torch import Tensor

from .engine import BF16, FP32, Engine, Place, Prepared, key_lengths, tokens_first


class Jax(Engine):
    name = folder = "jax"
    title = "JAX"
    packages = ("jax", "jaxlib", "ml_dtypes", "opt_einsum")
    dtypes = (FP32, BF16)
    gradients = True
    note = "`jax.nn.dot_product_attention` under `jit`, with tensors (B, L, H, D)."

    def __init__(self, threads: int, place: Place) -> None:
        super().__init__(threads, place)
        os.environ["NPROC"] = str(threads)  # the size of XLA's thread pool
        os.environ["JAX_PLATFORMS"] = "cpu"
        self.library = importlib.import_module("jax")

    def version(self) -> str:
        return str(self.library.__version__)

    def prepare(self, case: Case, inputs: Inputs) -> Prepared:
        attend = self.library.nn.dot_product_attention
        options = self.options(case)

        def forward(q: Any, k: Any, v: Any) -> Any:
            return attend(q, k, v, **options)

        def gradients(q: Any, k: Any, v: Any, dout: Any) -> Any:
            return self.library.vjp(forward, q, k, v)[1](dout)

        training = case.work == "training"
        call = self.library.jit(gradients if training else forward)
        given = [self.array(x) for x in (*inputs[:3], *([outgoing(case)] if training else []))]
        return Prepared(lambda: self.library.block_until_ready(call(*given)), self.tensors)

    def options(self, case: Case) -> dict[str, Any]:
        options: dict[str, Any] = {"is_causal": case.mask in (causal, window)}
        if case.mask is window:
            options["local_window_size"] = (255, 0)
        if case.mask is lengths:
            options["key_value_seq_lengths"] = self.array(key_lengths(case).int())
        return options

    def array(self, x: Tensor) -> Any:
        x = x.detach()
        return self.library.dlpack.from_dlpack(self.place(tokens_first(x) if x.dim() == 4 else x))

    def tensors(self, raw: Any) -> Any:
        """Returns the output, or the gradients of q, k and v, as tensors (B, H, L, D)."""
        several = isinstance(raw, tuple)
        found = [torch.from_dlpack(x).transpose(1, 2) for x in (raw if several else [raw])]
        return tuple(found) if several else found[0]
