"""The benchmark cases: shapes, options, and the PyTorch paths that can compute them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard import masks as M, scores

Options = dict[str, Any]


class Inputs(NamedTuple):
    """The inputs of a timed call: q (B, Hq, Lq, D), k, v, and the options."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: Options

    def leaves(self) -> tuple[Tensor, ...]:
        """Returns the tensors that receive a gradient in training."""
        bias = self.options.get("bias")
        return (self.q, self.k, self.v, *([bias] if isinstance(bias, Tensor) else []))


@dataclass(frozen=True)
class Case:
    name: str
    title: str
    B: int = 1
    Hq: int = 8
    Hkv: int = 8
    Lq: int = 2048
    Lk: int = 2048
    D: int = 64
    Dv: int = 64
    dtype: torch.dtype = torch.float32
    mask: Callable[[Case], M.Mask] | None = None
    options: Callable[[Case], Options] | None = None
    peers: tuple[str, ...] = ("sdpa",)
    asked: Mapping[str, float] = field(default_factory=dict, hash=False)  # peer -> target speedup
    calls: int = 1  # calls in one measurement
    work: str = "forward"  # or "backward", or "training" for both
    strided: bool = False  # q, k and v are (B, H, L, D) views of tensors (B, L, H, D)

    @property
    def shape(self) -> str:
        L = str(self.Lq) if self.Lq == self.Lk else f"{self.Lq}/{self.Lk}"
        D = str(self.D) if self.Dv == self.D else f"{self.D}/{self.Dv}"
        times = f", {self.calls} calls" if self.calls > 1 else ""
        return f"{self.B}, {self.Hq}/{self.Hkv}, {L}, {D}{times}"

    def shrunk(self, L: int) -> Case:
        """Returns the case with at most L queries and keys, for tests and quick trials."""
        return replace(self, Lq=min(self.Lq, L), Lk=min(self.Lk, L), calls=min(self.calls, 3))

    def inputs(self) -> Inputs:
        generator = torch.Generator().manual_seed(1)
        sizes = (self.Hq, self.Lq, self.D), (self.Hkv, self.Lk, self.D), (self.Hkv, self.Lk, self.Dv)
        q, k, v = (self._tensor(size, generator) for size in sizes)
        inputs = Inputs(q, k, v, self.options(self) if self.options else {})
        if self.work != "forward":
            for leaf in inputs.leaves():
                leaf.requires_grad_()
        return inputs

    def _tensor(self, size: tuple[int, int, int], generator: torch.Generator) -> Tensor:
        H, L, D = size
        if self.strided:
            return torch.randn(self.B, L, H, D, generator=generator).to(self.dtype).transpose(1, 2)
        return torch.randn(self.B, H, L, D, generator=generator).to(self.dtype)

    def make_mask(self) -> M.Mask | None:
        return self.mask(self) if self.mask else None


def causal(case: Case) -> M.Mask:
    return M.Causal()


def window(case: Case) -> M.Mask:
    """Returns a causal window of 256 keys."""
    return M.sliding(256)


def document_ids(L: int) -> Tensor:
    """Returns the ids of L tokens: document 0 for a quarter, 1 for a third, 2 for the rest."""
    position = torch.arange(L)
    return (position >= L // 4).long() + (position >= L // 4 + L // 3).long()


def documents(case: Case) -> M.Mask:
    return M.Documents(document_ids(case.Lk)) & M.Causal()


def lengths(case: Case) -> M.Mask:
    """Returns a `Lengths` mask: Lk / 4 keys in the first sample, all Lk keys in the last."""
    return M.Lengths(torch.linspace(max(1, case.Lk // 4), case.Lk, case.B).long())


def longformer(case: Case) -> M.Mask:
    return M.longformer((128, 128), global_tokens=range(min(4, case.Lk)))


def dropout(case: Case) -> Options:
    return {"dropout": 0.1, "seed": 7}


def float_bias(case: Case) -> Options:
    return {"bias": torch.randn(1, case.Hq, case.Lq, case.Lk, generator=torch.Generator().manual_seed(2))}


def alibi(case: Case) -> Options:
    return {"bias": scores.Alibi.standard(case.Hq)}


def softcap(case: Case) -> Options:
    return {"softcap": 30.0}


def sink(case: Case) -> Options:
    return {"sink": torch.linspace(-1, 1, case.Hq)}


def square(name: str, title: str, L: int, D: int = 64, **fields: Any) -> Case:
    """Returns a case with Lq = Lk = L and D = Dv. Further fields override these."""
    return Case(name, title, **{"Lq": L, "Lk": L, "D": D, "Dv": D} | fields)


def needs(ratio: float) -> dict[str, float]:
    """Returns the field `asked` of a case: the speedup over SDPA that Regard should reach."""
    return {"sdpa": ratio}


def training(name: str, title: str, L: int, D: int = 64, **fields: Any) -> Case:
    return square(f"train-{name}", f"training, {title}", L, D, work="training", **fields)


def backward(L: int, D: int, mask: Callable[[Case], M.Mask] | None = None) -> Case:
    kind = "causal" if mask else "dense"
    return square(f"backward-{kind}-{L}-{D}", f"backward alone, {kind}", L, D, mask=mask, work="backward")


def decoding(B: int, Hkv: int, Lk: int, *targets: float) -> tuple[Case, ...]:
    """Returns decode cases with 32 query heads in three dtypes, with their target speedups."""
    kinds = zip(("fp32", "bf16", "fp16"), (torch.float32, BF16, FP16), targets, strict=True)
    return tuple(
        Case(
            f"decode-{name}-{B}-{Hkv}-{Lk}", f"one query, {name}", B=B, Hq=32, Hkv=Hkv, Lq=1, Lk=Lk, D=128,
            Dv=128, dtype=dtype, asked=needs(ratio),
        )
        for name, dtype, ratio in kinds
    )  # fmt: skip


BF16, FP16, FP64 = torch.bfloat16, torch.float16, torch.float64

CASES = (
    square("dense-2048-64", "dense", 2048, asked=needs(1.2)),
    square("dense-2048-128", "dense", 2048, 128, asked=needs(1.12)),
    square("dense-512-64", "dense", 512),
    square("dense-512-128", "dense", 512, 128),
    square("dense-128-64", "dense, small batch", 128, B=4, Hq=12, Hkv=12, asked=needs(1.3)),
    square("causal-512-64", "causal", 512, mask=causal, asked=needs(2.2)),
    square("causal-2048-64", "causal", 2048, mask=causal, asked=needs(1.4)),
    square("causal-2048-128", "causal", 2048, 128, mask=causal, asked=needs(1.3)),
    square("causal-one-head", "causal, one head", 2048, mask=causal, Hq=1, Hkv=1, asked=needs(1.9)),
    square("window-4096", "window of 256, causal", 4096, mask=window, peers=("sdpa", "flex"),
           asked={"sdpa": 16, "flex": 2.5}),
    square("documents-4096", "three packed documents, causal", 4096, mask=documents, peers=("sdpa", "flex"),
           asked=needs(6)),
    square("padded-512", "padded batch", 512, B=8, mask=lengths),
    square("longformer-4096", "Longformer, 128 each side, 4 global", 4096, mask=longformer,
           peers=("sdpa", "flex")),
    square("dropout-1024", "dropout 0.1", 1024, options=dropout, asked=needs(5)),
    square("bias-1024", "float bias (1, 8, L, L)", 1024, options=float_bias, asked=needs(1.1)),
    square("alibi-1024", "ALiBi, causal", 1024, mask=causal, options=alibi, peers=("sdpa", "flex")),
    square("softcap-1024", "softcap 30, causal", 1024, mask=causal, options=softcap, peers=("eager", "flex")),
    square("sink-1024", "sink, causal", 1024, mask=causal, options=sink),
    square("gqa-1024", "grouped heads, causal", 1024, 128, Hq=32, mask=causal),
    square("value-size-1024", "value size is not key size, causal", 1024, 192, Dv=128, mask=causal,
           asked=needs(3)),
    square("bf16-2048", "bfloat16 dense", 2048, dtype=BF16, asked=needs(1.2)),
    square("fp16-1024", "float16 dense", 1024, dtype=FP16, asked=needs(2)),
    square("fp64-1024", "float64 dense", 1024, dtype=FP64),
    square("strided-2048", "(B, L, H, D) views, dense", 2048, strided=True),
    square("tiny-calls", "tiny calls", 64, Lq=1, calls=300, asked=needs(1.0)),
    *decoding(1, 8, 4096, 3.5, 20, 30),
    *decoding(1, 1, 4096, 4.5, 33, 45),
    *decoding(8, 8, 1024, 3, 22, 35),
    *decoding(1, 32, 4096, 1.6, 8, 11),
    *decoding(1, 8, 32768, 4.5, 22, 35),
    training("dense-1024", "dense", 1024, asked=needs(1.35)),
    training("causal-1024", "causal", 1024, mask=causal, asked=needs(1.7)),
    training("causal-2048-128", "causal", 2048, 128, mask=causal, asked=needs(1.35)),
    training("causal-one-head", "causal, one head", 2048, mask=causal, Hq=1, Hkv=1, asked=needs(1.8)),
    training("window-4096", "window of 256, causal", 4096, mask=window, asked=needs(12)),
    training("dropout-1024", "causal, dropout 0.1", 1024, mask=causal, options=dropout, asked=needs(4)),
    training("bias-1024", "learned bias (1, 8, L, L)", 1024, options=float_bias, asked=needs(1.3)),
    training("bf16-1024", "bfloat16 causal", 1024, mask=causal, dtype=BF16, asked=needs(7)),
    training("fp16-1024", "float16 causal", 1024, mask=causal, dtype=FP16, asked=needs(5)),
    training("value-size-1024", "value size is not key size, causal", 1024, 192, Dv=128, mask=causal,
             asked=needs(2)),
    training("gqa-1024", "grouped heads, causal", 1024, 128, Hq=32, mask=causal),
    training("small-128", "dense, small batch", 128, B=4, Hq=12, Hkv=12),
    *(backward(L, D, mask) for L in (512, 2048) for D in (64, 128) for mask in (None, causal)),
)  # fmt: skip


# The cases of `make bench-peers`.
ENGINE_CASES = (
    *(case for case in CASES if case.name in {
        "dense-2048-64", "causal-2048-64", "causal-512-64", "padded-512", "window-4096", "tiny-calls",
        "fp16-1024", "train-causal-1024",
        *(f"decode-{dtype}-1-{Hkv}-4096" for dtype in ("fp32", "bf16", "fp16") for Hkv in (8, 32)),
    }),
    *(square(f"bf16-{kind}-{L}-{D}", f"bfloat16 {kind}", L, D, mask=mask, dtype=BF16)
      for kind, mask in (("dense", None), ("causal", causal)) for L in (512, 2048) for D in (64, 128)),
)  # fmt: skip


def chosen(names: list[str], cases: tuple[Case, ...] = CASES) -> tuple[Case, ...]:
    """Returns the cases whose name contains one of `names`. Without names, returns all."""
    matches = tuple(c for c in cases if not names or any(n in c.name for n in names))
    if not matches:
        raise ValueError(f"--only: expected a substring of {', '.join(c.name for c in cases)}, got {names}")
    return matches
