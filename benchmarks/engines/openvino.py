"""OpenVINO's CPU plug-in."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from cases import Case, Inputs, causal
from peers import additive
from torch import Tensor

from .engine import BF16, FP32, Engine, Place, Prepared


class OpenVINO(Engine):
    name = folder = "openvino"
    title = "OpenVINO"
    packages = ("openvino",)
    dtypes = (FP32, BF16)
    note = (
        "ScaledDotProductAttention with the inference precision of the inputs; masks that are not causal "
        "are float tensors. In a decode step, the query heads of a group are rows of one head, and k and "
        "v are inputs, not OpenVINO's stateful cache."
    )

    def __init__(self, threads: int, place: Place) -> None:
        super().__init__(threads, place)
        self.library = importlib.import_module("openvino")

    def version(self) -> str:
        return str(self.library.__version__).split("-")[0]

    def prepare(self, case: Case, inputs: Inputs) -> Prepared:
        q, k, v, _ = inputs
        mask = None if case.mask is causal else additive(case, {}, case.make_mask())
        rows = q.view(case.B, case.Hkv, -1, case.D)
        given = [rows, k, v, *([] if mask is None else [self.place(mask)])]
        kind = self.library.Type.f32 if case.dtype == FP32 else self.library.Type.bf16
        options = {
            "INFERENCE_NUM_THREADS": self.threads,
            "INFERENCE_PRECISION_HINT": kind,
            "PERFORMANCE_HINT": "LATENCY",
        }
        compiled = self.library.Core().compile_model(self.model(case, given, kind), "CPU", options)
        request = compiled.create_infer_request()
        for index, x in enumerate(given):
            request.set_input_tensor(index, self.shared(x, kind))
        out = self.place(torch.zeros(*rows.shape[:3], case.Dv, dtype=case.dtype))
        request.set_output_tensor(0, self.shared(out, kind))
        return Prepared(request.infer, lambda _: out.view(case.B, case.Hq, case.Lq, case.Dv))

    def model(self, case: Case, given: list[Tensor], kind: Any) -> Any:
        ops = self.library.opset13
        parameters = [ops.parameter(list(x.shape), kind) for x in given]
        out = ops.scaled_dot_product_attention(*parameters, causal=case.mask is causal)
        return self.library.Model([out], parameters, "call")

    def shared(self, x: Tensor, kind: Any) -> Any:
        """Returns an OpenVINO tensor that shares memory with x."""
        array = x.view(torch.int16).numpy() if x.dtype == BF16 else x.numpy()
        return self.library.Tensor(array, list(x.shape), kind)
