"""Three operators of ONNX Runtime: MultiHeadAttention, GroupQueryAttention and Attention."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from cases import Case, Inputs
from peers import additive
from torch import Tensor

from .engine import (
    FP16,
    FP32,
    Engine,
    Place,
    Prepared,
    is_causal,
    is_padded,
    is_window,
    key_lengths,
    tokens_first,
)

OPSET, IR = 24, 11  # of the models that this file makes


class OnnxRuntime(Engine):
    """A session with one operator, whose inputs and outputs are bound to memory that never moves."""

    folder = "onnxruntime"
    packages = ("onnxruntime", "onnx", "flatbuffers", "protobuf", "ml_dtypes")
    dtypes = (FP32, FP16)
    operator: ClassVar[str]
    domain: ClassVar[str] = "com.microsoft"

    def __init__(self, threads: int, place: Place) -> None:
        super().__init__(threads, place)
        self.library = importlib.import_module("onnxruntime")
        self.onnx = importlib.import_module("onnx")

    def version(self) -> str:
        return str(self.library.__version__)

    def bound(
        self,
        inputs: Mapping[str, Tensor | None],
        outputs: Mapping[str, Tensor],
        attributes: Mapping[str, Any],
    ) -> Any:
        """Returns a call of the operator. Inputs that are None are left out.

        All tensors are bound by address, so they come from `place`.
        """
        model = self.model(inputs, outputs, attributes)
        options = self.library.SessionOptions()
        options.intra_op_num_threads = self.threads
        session = self.library.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
        binding = session.io_binding()
        for name, x in inputs.items():
            if x is not None:
                binding.bind_input(name, "cpu", 0, self.element(x), list(x.shape), x.data_ptr())
        for name, x in outputs.items():
            binding.bind_output(name, "cpu", 0, self.element(x), list(x.shape), x.data_ptr())
        return lambda: session.run_with_iobinding(binding)

    def model(
        self,
        inputs: Mapping[str, Tensor | None],
        outputs: Mapping[str, Tensor],
        attributes: Mapping[str, Any],
    ) -> Any:
        helper = self.onnx.helper

        def declared(name: str, x: Tensor) -> Any:
            return helper.make_tensor_value_info(name, self.element(x), list(x.shape))

        names = [name if x is not None else "" for name, x in inputs.items()]
        node = helper.make_node(self.operator, names, list(outputs), domain=self.domain, **attributes)
        given = [declared(name, x) for name, x in inputs.items() if x is not None]
        graph = helper.make_graph([node], "call", given, [declared(*item) for item in outputs.items()])
        sets = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=sets, ir_version=IR)

    def element(self, x: Tensor) -> int:
        kinds = self.onnx.TensorProto
        return int(
            {
                torch.float32: kinds.FLOAT,
                torch.float16: kinds.FLOAT16,
                torch.int32: kinds.INT32,
                torch.int64: kinds.INT64,
            }[x.dtype]
        )

    def rows(self, x: Tensor) -> Tensor:
        """Returns (B, H, L, D) as (B, L, H * D)."""
        return self.place(tokens_first(x).flatten(2))

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return self.place(torch.zeros(shape, dtype=dtype))


def unflattened(case: Case, out: Tensor) -> Tensor:
    return out.unflatten(2, (case.Hq, case.Dv)).transpose(1, 2)


class MultiHead(OnnxRuntime):
    name = "onnxruntime-mha"
    title = "ONNX Runtime MHA"
    operator = "MultiHeadAttention"
    dtypes = (FP32,)
    note = "MultiHeadAttention with keys (B, H, L, D); a window is a float bias."

    @classmethod
    def reason(cls, case: Case) -> str:
        return super().reason(case) or ("no grouped heads" if case.Hq != case.Hkv else "")

    def prepare(self, case: Case, inputs: Inputs) -> Prepared:
        q, k, v, _ = inputs
        out = self.empty(case.B, case.Lq, case.Hq * case.Dv, dtype=case.dtype)
        given = {
            "query": self.rows(q),
            "key": k,
            "value": v,
            "bias": None,
            "key_padding_mask": self.place(key_lengths(case).int()) if is_padded(case) else None,
            "attention_bias": self.place(additive(case, {}, case.make_mask())[None, None])
            if is_window(case)
            else None,
        }
        attributes = {"num_heads": case.Hq, "unidirectional": int(is_causal(case))}
        return Prepared(self.bound(given, {"out": out}, attributes), lambda _: unflattened(case, out))


class GroupQuery(OnnxRuntime):
    name = "onnxruntime-gqa"
    title = "ONNX Runtime GQA"
    operator = "GroupQueryAttention"
    note = (
        "GroupQueryAttention with past and present in one buffer: a decode step writes the key and the "
        "value of the last token, a prompt those of all its tokens."
    )

    def prepare(self, case: Case, inputs: Inputs) -> Prepared:
        q, k, v, _ = inputs
        out = self.empty(case.B, case.Lq, case.Hq * case.Dv, dtype=case.dtype)
        new = slice(case.Lk - case.Lq, case.Lk)
        filled = key_lengths(case) if is_padded(case) else torch.full((case.B,), case.Lk)
        given = {
            "query": self.rows(q),
            "key": self.rows(k[:, :, new]),
            "value": self.rows(v[:, :, new]),
            "past_key": k,
            "past_value": v,
            "seqlens_k": self.place(filled.int() - 1),
            "total": self.place(torch.tensor([case.Lk], dtype=torch.int32)),
        }
        attributes = {
            "num_heads": case.Hq,
            "kv_num_heads": case.Hkv,
            "causal": int(case.mask is not None and not is_padded(case)),
        }
        if is_window(case):
            attributes["local_window_size"] = 256
        outputs = {"out": out, "present_key": k, "present_value": v}
        return Prepared(self.bound(given, outputs, attributes), lambda _: unflattened(case, out))


class Attention(OnnxRuntime):
    name = "onnxruntime-attention"
    title = "ONNX Runtime Attention"
    operator = "Attention"
    domain = ""
    note = "the operator Attention of ONNX; a window is a float mask, padding `nonpad_kv_seqlen`."

    def prepare(self, case: Case, inputs: Inputs) -> Prepared:
        q, k, v, _ = inputs
        out = self.empty(case.B, case.Hq, case.Lq, case.Dv, dtype=case.dtype)
        given = {
            "Q": q,
            "K": k,
            "V": v,
            "attn_mask": self.place(additive(case, {}, case.make_mask())) if is_window(case) else None,
            "past_key": None,
            "past_value": None,
            "nonpad_kv_seqlen": self.place(key_lengths(case)) if is_padded(case) else None,
        }
        return Prepared(self.bound(given, {"Y": out}, {"is_causal": int(is_causal(case))}), lambda _: out)
