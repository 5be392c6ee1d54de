"""Checks a call of linear attention and converts it to canonical form."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._tools.arguments import broadcasts, describe, holds_integers, readable
from .check import check_learned, fail
from .layout import heads_4d
from .make import NO_OPTIONS, make
from .spec import Options, Problem, Spec, Strides

SEGMENT = 512  # tokens between two states that training saves; equals the core's LINEAR_SEGMENT


class LinearState(NamedTuple):
    """The state of linear attention. Its size does not depend on the number of tokens.

    The tensors are float32, or float64 for float64 inputs.
    """

    S: Tensor  # (..., Hkv, D, Dv): the decayed sum of k v^T
    z: Tensor | None = None  # (..., Hkv, D): the decayed sum of k, with normalize=True


class LinearOptions(NamedTuple):
    """The keyword arguments of `linear_attention` that `check` takes in addition to `scale`."""

    causal: bool
    normalize: bool
    log_decay: Tensor | float | None
    beta: Tensor | float | None
    lengths: Tensor | None
    state: LinearState | None


class LinearCall(NamedTuple):
    """A checked call of linear attention in canonical form.

    The compute dtype is float64 for float64 inputs, else float32.
    """

    q: Tensor  # (B, Hq, Lq, D)
    k: Tensor  # (B, Hkv, Lk, D)
    v: Tensor  # (B, Hkv, Lk, Dv)
    log_decay: Tensor | None  # (B, Hkv, L) in the compute dtype
    beta: Tensor | None  # (B, Hkv, L) in the compute dtype
    S: Tensor | None  # (B, Hkv, D, Dv) in the compute dtype; None: zeros
    z: Tensor | None  # (B, Hkv, D) in the compute dtype
    lengths: Tensor | None  # (B,) int64
    spec: Spec  # sizes and the caller's layout
    normalize: bool
    causal: bool

    @property
    def dtype(self) -> torch.dtype:
        return self.spec.lse_dtype

    @property
    def scale(self) -> float:
        return self.spec.scale

    @property
    def out_stride(self) -> Strides:
        return self.spec.out_stride


class LinearResult(NamedTuple):
    """The result of a LinearCall, in canonical form, as a backend returns it."""

    out: Tensor  # (B, Hq, Lq, Dv) in q's dtype
    S: Tensor  # (B, Hkv, D, Dv) in the compute dtype
    z: Tensor | None  # (B, Hkv, D) in the compute dtype, with normalize=True


def check(q: Tensor, k: Tensor, v: Tensor, scale: float | None, options: LinearOptions) -> LinearCall:
    """Checks a call of linear attention and returns its canonical form."""
    problem = make(q, k, v, NO_OPTIONS if scale is None else Options(scale=scale))
    spec = problem.spec
    _check_flags(spec, options)
    S, z = _flat_state(spec, options)
    return LinearCall(
        heads_4d(spec, problem.q), heads_4d(spec, problem.k), heads_4d(spec, problem.v),
        _per_token("log_decay", options.log_decay, problem), _per_token("beta", options.beta, problem),
        S, z, _flat_lengths(spec, options.lengths), spec, options.normalize, options.causal,
    )  # fmt: skip


def _check_flags(spec: Spec, options: LinearOptions) -> None:
    for name, flag in (("causal", options.causal), ("normalize", options.normalize)):
        if type(flag) is not bool:
            raise TypeError(f"{name}: expected a bool, got {describe(flag)}")
    if options.causal and spec.Lq != spec.Lk:
        expected = f"Lk = Lq = {spec.Lq} with causal=True, as queries and keys are the same tokens"
        fail(ValueError, "k", expected, f"{spec.Lk}; pass earlier tokens as state=")
    if not options.causal:
        for name, gate in (("log_decay", options.log_decay), ("beta", options.beta)):
            if gate is not None:
                raise ValueError(f"{name}: expected None with causal=False, got {describe(gate)}")
    if options.beta is not None and options.normalize:
        raise ValueError("normalize: expected False with beta, whose weights are not positive, got True")


def _per_token(name: str, gate: Tensor | float | None, problem: Problem) -> Tensor | None:
    """Expands a gate (log_decay or beta) to (B, Hkv, L).

    A gate is one number, or has one value for each head or for each token.
    """
    if gate is None:
        return None
    spec = problem.spec
    shape = (*state_dims(spec), spec.Lk)
    if not isinstance(gate, Tensor):
        if isinstance(gate, bool) or not isinstance(gate, int | float):
            raise TypeError(f"{name}: expected a number or a tensor, got {describe(gate)}")
        gate = torch.tensor(float(gate), device=spec.device, dtype=spec.lse_dtype)
    check_learned(name, gate, (problem.q, problem.k, problem.v))
    _check_gate(name, gate, shape, spec)
    gate = gate.to(spec.lse_dtype)
    if gate.ndim == 1 and spec.rank > 2:
        gate = gate[:, None]
    return gate.expand(shape).reshape(spec.B, spec.Hkv, spec.Lk)


def _check_gate(name: str, gate: Tensor, shape: tuple[int, ...], spec: Spec) -> None:
    per_head = spec.rank > 2 and gate.ndim == 1
    if not (gate.shape[0] in (1, spec.Hkv) if per_head else broadcasts(gate.shape, shape)):
        by_head = "" if spec.rank == 2 else f"(Hkv,) = ({spec.Hkv},) or "
        hint = "; for one gate per query head, expand k and v to Hq heads"
        expected = f"{by_head}a shape broadcastable to (..., Hkv, L) = {shape}"
        fail(ValueError, name, expected, f"{tuple(gate.shape)}{hint if spec.Hq != spec.Hkv else ''}")


def _flat_state(spec: Spec, options: LinearOptions) -> tuple[Tensor | None, Tensor | None]:
    """Checks `options.state`. Returns S (B, Hkv, D, Dv) and z (B, Hkv, D). Both may be None."""
    state = options.state
    if state is None:
        return None, None
    if not isinstance(state, LinearState):
        raise TypeError(f"state: expected a LinearState, got {describe(state)}")
    S, z = state
    if (z is not None) != options.normalize:
        needed = "a tensor" if options.normalize else "None"
        raise ValueError(f"state.z: expected {needed} with normalize={options.normalize}, got {describe(z)}")
    outer = state_dims(spec)
    flat = _flat_state_tensor(spec, "S", S, (*outer, spec.D, spec.Dv))
    return flat, None if z is None else _flat_state_tensor(spec, "z", z, (*outer, spec.D))


def state_dims(spec: Spec) -> tuple[int, ...]:
    """Returns the leading dims of a state: (*batch, Hkv), or () for inputs (L, D)."""
    return () if spec.rank == 2 else (*spec.batch, spec.Hkv)


def _flat_state_tensor(spec: Spec, name: str, x: Any, shape: tuple[int, ...]) -> Tensor:
    if not isinstance(x, Tensor) or x.dtype is not spec.lse_dtype or tuple(x.shape) != shape:
        raise ValueError(f"state.{name}: expected {spec.lse_dtype} {shape}, got {describe(x)}")
    if x.device != spec.device:
        raise ValueError(f"state.{name}: expected q's device {spec.device}, got {x.device}")
    return x if spec.rank == 4 else x.reshape(spec.B, spec.Hkv, *shape[len(state_dims(spec)) :])


def _flat_lengths(spec: Spec, lengths: Tensor | None) -> Tensor | None:
    if lengths is None:
        return None
    if not isinstance(lengths, Tensor) or not holds_integers(lengths):
        raise TypeError(f"lengths: expected an integer tensor (B,), got {describe(lengths)}")
    if tuple(lengths.shape) not in (spec.batch, (spec.B,)) or spec.rank < 4:
        raise ValueError(f"lengths: expected shape {spec.batch}, the batch dims, got {tuple(lengths.shape)}")
    lengths = lengths.reshape(spec.B).to(spec.device, torch.int64)
    if readable(lengths) and lengths.is_cpu and spec.B:
        low, high = (int(x) for x in torch.aminmax(lengths))
        if low < 0 or high > spec.Lk:
            raise ValueError(f"lengths: expected from 0 to L = {spec.Lk}, got values from {low} to {high}")
    return lengths
