"""Three operators of ONNX Runtime: MultiHeadAttention, GroupQueryAttention and Attention."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from cases import Case, Inputs, causal, lengths, window
from peers import additive
from torch import Tensor

from .engine import FP16, FP32, Engine, Place, Prepared, key_lengths, tokens_first

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
        return int(self.onnx.helper.np_dtype_to_tensor_dtype(x.numpy().dtype))

    def rows(self, x: Tensor) -> Tensor:
        """Returns (B, H, L, D) as (B, L, H * D)."""
        return self.place(tokens_first(x).flatten(2))

    def window_bias(self, case: Case) -> Tensor | None:
        """Returns the mask of a window as floats (1, 1, Lq, Lk), or None in other cases."""
        return self.place(additive(case, {}, case.make_mask())[None, None]) if case.mask is window else None

    def key_counts(self, case: Case, dtype: torch.dtype) -> Tensor | None:
        """Returns the numbers of keys (B,) of a padded batch, or None in other cases."""
        return self.place(key_lengths(case).to(dtype)) if case.mask is lengths else None


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
        out = self.place(torch.zeros(case.B, case.Lq, case.Hq * case.Dv, dtype=case.dtype))
        given = {
            "query": self.rows(q),
            "key": k,
            "value": v,
            "bias": None,
            "key_padding_mask": self.key_counts(case, torch.int32),
            "attention_bias": self.window_bias(case),
        }
        attributes = {"num_heads": case.Hq, "unidirectional": int(case.mask is causal)}
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
        out = self.place(torch.zeros(case.B, case.Lq, case.Hq * case.Dv, dtype=case.dtype))
        new = slice(case.Lk - case.Lq, case.Lk)
        given = {
            "query": self.rows(q),
            "key": self.rows(k[:, :, new]),
            "value": self.rows(v[:, :, new]),
            "past_key": k,
            "past_value": v,
            "seqlens_k": self.place(key_lengths(case).int() - 1),
            "total": self.place(torch.tensor([case.Lk], dtype=torch.int32)),
        }
        attributes = {
            "num_heads": case.Hq,
            "kv_num_heads": case.Hkv,
            "causal": int(case.mask in (causal, window)),
        }
        if case.mask is window:
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
        out = self.place(torch.zeros(case.B, case.Hq, case.Lq, case.Dv, dtype=case.dtype))
        given = {
            "Q": q,
            "K": k,
            "V": v,
            "attn_mask": self.window_bias(case),
            "past_key": None,
            "past_value": None,
            "nonpad_kv_seqlen": self.key_counts(case, torch.int64),
        }
        return Prepared(self.bound(given, {"Y": out}, {"is_causal": int(case.mask is causal)}), lambda _: out)
