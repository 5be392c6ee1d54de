"""Calls of linear attention in every form, sampled by seed."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from regard import LinearState

SIZES = (1, 3, 17, 63, 65, 97, 129)
FORMS = ("plain", "normalized", "decayed", "normalized decayed", "delta", "gated delta")


class Case(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]

    def run(self, impl: str = "native") -> tuple[Tensor, LinearState]:
        return regard.linear_attention(*self[:3], **self.options, return_state=True, impl=impl)

    @property
    def inputs(self) -> dict[str, Tensor]:
        """Returns the differentiable inputs by name."""
        state = self.options.get("state") or LinearState(None, None)  # type: ignore[arg-type]
        tensors = {
            "q": self.q, "k": self.k, "v": self.v, "log_decay": self.options.get("log_decay"),
            "beta": self.options.get("beta"), "S": state.S, "z": state.z,
        }  # fmt: skip
        return {name: x for name, x in tensors.items() if isinstance(x, Tensor)}

    def requiring_grad(self) -> Case:
        """Returns a copy whose tensors are leaves that require gradients."""
        fresh = {name: x.detach().clone().requires_grad_() for name, x in self.inputs.items()}
        options = {name: fresh.get(name, x) for name, x in self.options.items()}
        if "S" in fresh:
            options["state"] = LinearState(fresh["S"], fresh.get("z"))
        return Case(fresh["q"], fresh["k"], fresh["v"], options)


class Gradients(NamedTuple):
    """The results of a call, and the gradients of a random linear function of out and state."""

    out: Tensor
    state: LinearState
    by_input: dict[str, Tensor]


def differentiate(case: Case, impl: str = "native", seed: int = 0) -> Gradients:
    case = case.requiring_grad()
    out, state = case.run(impl)
    draw = torch.Generator().manual_seed(seed)
    results = [x for x in (out, *state) if x is not None]
    dys = [torch.randn(x.shape, generator=draw, dtype=torch.float64).to(x.dtype) for x in results]
    input_grads = torch.autograd.grad(results, list(case.inputs.values()), dys)
    return Gradients(out.detach(), state, dict(zip(case.inputs, input_grads, strict=True)))


def make(
    form: str, L: int, *, B: int = 2, Hq: int = 4, Hkv: int = 2, D: int = 17, Dv: int = 23,
    dtype: torch.dtype = torch.float32, state: bool = True, ragged: bool = False, seed: int = 0,
) -> Case:  # fmt: skip
    """Returns a random case. Equal seeds give the same numbers, rounded to `dtype`."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    q, k, v = normal(B, Hq, L, D), normal(B, Hkv, L, D), normal(B, Hkv, L, Dv)
    gate, beta, S, z = normal(B, Hkv, L), normal(B, Hkv, L), normal(B, Hkv, D, Dv), normal(B, Hkv, D)
    normalized, wide = "normalized" in form, torch.float64 if dtype is torch.float64 else torch.float32
    q, k = (q.exp(), k.exp()) if normalized else (q, F.normalize(k, dim=-1))
    options: dict[str, Any] = {"normalize": normalized}
    if "decayed" in form or "gated" in form:
        options["log_decay"] = (0.2 * F.logsigmoid(gate)).to(wide)
    if "delta" in form:
        options["beta"] = beta.sigmoid().to(dtype)
    if state:
        options["state"] = LinearState(S.to(wide), z.exp().to(wide) if normalized else None)
    if ragged:
        options["lengths"] = torch.randint(0, L + 1, (B,), generator=draw)
    return Case(q.to(dtype), k.to(dtype), v.to(dtype), options)


def sample(seed: int) -> Case:
    """Returns a case of random form, size and memory layout."""
    pick = random.Random(seed)
    Hkv = pick.choice((1, 2, 3))
    case = make(
        pick.choice(FORMS), pick.choice(SIZES), B=pick.choice((1, 2)), Hq=Hkv * pick.choice((1, 2)), Hkv=Hkv,
        D=pick.choice((1, 8, 16, 17, 33)), Dv=pick.choice((1, 7, 16, 24, 33)),
        dtype=pick.choice((torch.float32, torch.float64, torch.bfloat16, torch.float16)),
        state=pick.random() < 0.5, ragged=pick.random() < 0.3, seed=seed,
    )  # fmt: skip
    layout = pick.choice(("plain", "tokens first", "every other column"))
    return case._replace(**{name: _in_layout(getattr(case, name), layout) for name in "qkv"})


def _in_layout(x: Tensor, layout: str) -> Tensor:
    """Copies x into another memory order."""
    if layout == "tokens first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    return x.repeat_interleave(2, -1)[..., ::2] if layout == "every other column" else x
