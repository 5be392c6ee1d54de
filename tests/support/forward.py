"""Random calls of `attention`, their expected results, and error limits."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch
from torch import Tensor

import regard
from regard import masks as M
from regard._backends.native import core
from regard._backends.native.attention import decodes
from regard._call.layout import dense_bias, dense_mask, heads_4d
from regard._call.make import make
from regard._call.spec import Options
from regard.scores import Alibi, RelativeBias
from support import rel_l2

INF = float("inf")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LENGTHS = (
    1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 95, 96, 97, 113, 127, 128, 129, 191, 193,
    255, 257, 511, 513, 1023,
)  # fmt: skip
WIDTHS = (1, 2, 3, 8, 13, 40, 64, 72, 80, 96, 111, 128, 192, 256, 576)
GROUPS = (1, 2, 3, 4, 7, 8, 12, 32)
SCORE_MASKS = ("none", "causal", "causal_at_0", "window", "padding", "packed", "bool", "sparse", "per_head")
BIASES = ("none", "tensor", "excluding", "lowest", "alibi", "relative")

# Limit of the relative L2 error against float64, before the result is rounded to its dtype.
# Rounding adds 1.7e-3 in bfloat16 and 2.1e-4 in float16, so the sums stay below 2.2e-3 and 2.7e-4.
COMPUTED = {torch.float32: 1e-6, torch.bfloat16: 1e-6, torch.float16: 1e-6, torch.float64: 1e-12}
UNIT = {dtype: torch.finfo(torch.float32).eps / 2 for dtype in DTYPES} | {torch.float64: 2.0**-53}
HUGE = 1e30  # an |LSE| above this comes from a bias of finfo.min


class Call(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]
    isa: str

    def __repr__(self) -> str:
        shapes = " ".join(f"{n}{tuple(x.shape)}" for n, x in zip("qkv", self[:3], strict=True))
        return f"[{self.isa} {self.q.dtype} {shapes} {self.options}]"

    def run(self, **changes: Any) -> tuple[Tensor, Tensor]:
        """Returns out and LSE of the native kernels."""
        with core.use_isa(self.isa):
            options = self.options | {"return_lse": True, "impl": "native"} | changes
            return regard.attention(self.q, self.k, self.v, **options)

    def expected(self) -> tuple[Tensor, Tensor]:
        """Returns out and LSE of the reference for the same inputs in float64."""
        q, k, v = (x.double() for x in self[:3])
        options = {name: doubled(x) for name, x in self.options.items()}
        return regard.attention(q, k, v, **options, return_lse=True, impl="reference")


def doubled(x: Any) -> Any:
    """Converts an option's tensors to float64."""
    if isinstance(x, Alibi):
        return Alibi(x.slopes.double())
    if isinstance(x, RelativeBias):
        return RelativeBias(x.table.double(), bidirectional=x.bidirectional, max_distance=x.max_distance)
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def fused(call: Call) -> Tensor | None:
    """Runs the call with PyTorch's fused CPU kernel.

    Returns None if the kernel does not support it.
    """
    p = make(call.q, call.k, call.v, Options(**call.options))
    s = p.spec
    if s.softcap is not None or s.sink or s.dropout or s.Dv != s.D or 0 in call.q.shape + call.k.shape:
        return None
    q, k, v = (heads_4d(s, x) for x in (p.q, p.k, p.v))
    k, v = (x.repeat_interleave(s.Hq // s.Hkv, 1) for x in (k, v))
    keep, attn_bias = dense_mask(p), dense_bias(p, s.bias_dtype or s.lse_dtype)
    if keep is not None:
        attn_bias = torch.where(keep, 0.0 if attn_bias is None else attn_bias, -INF)
    if attn_bias is not None:
        attn_bias = attn_bias.to(s.dtype).expand(s.B, s.Hq, s.Lq, s.Lk)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(q, k, v, 0.0, False, attn_mask=attn_bias, scale=s.scale)[0].reshape(s.out_shape)


def rounding(expected: Tensor, dtype: torch.dtype) -> float:
    """Returns the relative error of rounding the exact result to `dtype`."""
    return rel_l2(expected.to(dtype), expected)


def faults(call: Call) -> list[str]:
    """Returns the faults of the native result, [] if there are none."""
    out, lse = call.run()
    want, want_lse = call.expected()
    errors = [f"NaN in {n}" for n, x in (("out", out), ("LSE", lse), ("reference", want)) if x.isnan().any()]
    if errors:
        return errors
    error, limit = rel_l2(out, want), allowed(call, want, want_lse)
    errors = [] if error <= limit else [f"error {error:.3g} above {limit:.3g}"]
    errors += lse_faults(lse, want_lse)
    return errors + (fused_faults(call, want, error) if comparable(call, want_lse) else [])


def allowed(call: Call, want: Tensor, lse: Tensor) -> float:
    limit = computed(call.q.dtype, lse) + 1.01 * rounding(want, call.q.dtype)
    return limit + (rounded_weights(call, want) if multiplies_pairs(call) else 0.0)


def multiplies_pairs(call: Call) -> bool:
    """Returns whether forward rounds weights to bfloat16 and multiplies them in pairs."""
    with core.use_isa(call.isa):
        problem = make(*call[:3], Options(**call.options))
        decode = decodes(problem) and not call.q.requires_grad
        return core.products(call.q.dtype) == core.PAIRS and not decode


def rounded_weights(call: Call, want: Tensor, rows: Any = ...) -> float:
    """Returns the relative error of some rows that rounding all weights to bfloat16 may cause.

    Weights may be wrong by 2**-9, in the sum of values and in the sum that it is divided by. So the
    error of weight p_ij moves the output by kept_ij v_j - p_ij out_i. Terms of two keys may add up.
    """
    q, k, v = (x.double() for x in call[:3])
    options = {name: doubled(x) for name, x in call.options.items()}
    kept = regard.weights(q, k, v, **options)
    p = regard.weights(q, k, v, **options | {"dropout": 0.0})
    v = v.repeat_interleave(q.shape[-3] // v.shape[-3], -3)
    squares = kept.square() @ v.square() - 2 * want * ((kept * p) @ v)
    squares = squares + want.square() * p.square().sum(-1, keepdim=True)
    norm = torch.linalg.vector_norm(want[rows]).item() or 1.0
    return 2.0**-8.5 * squares[rows].clamp(min=0).sum().sqrt().item() / norm


def computed(dtype: torch.dtype, lse: Tensor) -> float:
    """Returns the error limit for results before they are rounded to their dtype.

    The limit grows with |LSE|, because the rounding error of scores of that size does.
    """
    return max(COMPUTED[dtype], UNIT[dtype] * largest(lse))


def largest(lse: Tensor) -> float:
    sizes = lse[lse.abs() < HUGE].abs()
    return sizes.max().item() if sizes.numel() else 0.0


def lse_faults(lse: Tensor, want: Tensor) -> list[str]:
    """Compares LSEs. Returns a list of messages.

    Infinities must be equal. Errors are relative if |LSE| is above 1, else absolute.
    """
    if not torch.equal(lse == -INF, want == -INF):
        return ["other rows have LSE -inf"]
    real = want != -INF
    error = (lse.double() - want)[real] / want[real].abs().clamp(min=1)
    if not error.numel():
        return []
    limit = COMPUTED[lse.dtype]
    mean, worst = error.square().mean().sqrt().item(), error.abs().max().item()
    return [] if mean <= limit and worst <= 6 * limit else [f"LSE error {mean:.3g}, at most {worst:.3g}"]


def comparable(call: Call, lse: Tensor) -> bool:
    """Returns whether the error can be compared with the fused kernel's.

    The comparison needs enough rows for an average. Very large scores are excluded: their own
    rounding, in powers of 2 here and of e in PyTorch, dominates the error.
    """
    return call.q.dtype is not torch.float64 and lse.numel() >= 256 and largest(lse) < 16


def fused_faults(call: Call, want: Tensor, error: float) -> list[str]:
    """Checks that the error is at most 1.5x that of PyTorch's fused kernel, plus one rounding."""
    fused_out = fused(call)
    if fused_out is None or fused_out.isnan().any():
        return []
    limit = 1.5 * rel_l2(fused_out, want) + torch.finfo(call.q.dtype).eps / 2
    return [] if error <= limit else [f"error {error:.3g} above {limit:.3g}, 1.5x the fused kernel's"]


def failures(seeds: range, work: float) -> str:
    """Returns a report of the sampled calls with faults, empty if there are none."""
    calls = ((seed, sample(seed, work)) for seed in seeds)
    return "\n".join(f"seed {n}: {'; '.join(text)} in {call}" for n, call in calls if (text := faults(call)))


class Sampler:
    """Samples one random call. Equal seeds give equal calls on every machine."""

    def __init__(self, seed: int, work: float, isas: list[str]) -> None:
        self.pick = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.isas = isas
        self.dtype = self.choice(DTYPES)
        self.sizes(work)

    def choice(self, values: Any) -> Any:
        return self.pick.choice(values)

    def chance(self, p: float) -> bool:
        return self.pick.random() < p

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype or self.dtype)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Returns random integers from low to high inclusive."""
        return torch.randint(low, high + 1, shape, generator=self.generator)

    def sizes(self, work: float) -> None:
        """Chooses unusual sizes for which the call takes at most `work` multiplications."""
        while True:
            self.batch = self.choice(((1,), (1,), (2,), (3,), (), (2, 2)))
            self.Hkv, group = self.choice((1, 1, 2, 3)), self.choice(GROUPS)
            self.Hq = self.Hkv * group
            self.Lq, self.Lk = self.choice(LENGTHS), self.choice(LENGTHS)
            self.D = self.choice(WIDTHS)
            self.Dv = self.D if self.chance(0.6) else self.choice(WIDTHS)
            pairs = (len(self.batch) and self.batch[0] ** len(self.batch)) or 1
            if pairs * self.Hq * self.Lq * self.Lk * (self.D + self.Dv + 32) <= work:
                return

    def call(self) -> Call:
        q = self.tensor(self.Hq, self.Lq, self.D)
        k = self.tensor(self.Hkv, self.Lk, self.D)
        v = self.tensor(self.Hkv, self.Lk, self.Dv)
        options: dict[str, Any] = self.offset() | self.mask() | self.bias() | self.numeric_options()
        if isinstance(options.get("bias"), Alibi):
            options.pop("offset", None)
        return Call(q, k, v, options, self.choice(self.isas))

    def tensor(self, H: int, L: int, width: int) -> Tensor:
        """Returns a tensor (..., H, L, width). Half of all calls store it as (..., L, H, width)."""
        if self.chance(0.5):
            return self.randn(*self.batch, H, L, width)
        return self.randn(*self.batch, L, H, width).transpose(-3, -2)

    def numeric_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if self.chance(0.15):
            options["softcap"] = self.choice((0.5, 5.0, 50.0))
        if self.chance(0.15):
            options["sink"] = self.randn(self.Hq, dtype=self.choice((torch.float32, self.dtype)))
        if self.chance(0.15):
            options |= {"dropout": self.choice((0.1, 0.5, 0.9)), "seed": self.pick.getrandbits(64)}
        if self.chance(0.1):
            options["scale"] = self.choice((0.01, 0.3, 1.0)) / self.D**0.5
        return options

    def offset(self) -> dict[str, Any]:
        if len(self.batch) == 1 and self.chance(0.2):
            return {"offset": self.integers(-3, self.Lk + 3, *self.batch)}
        return {"offset": self.pick.randint(-3, self.Lk + 3)} if self.chance(0.2) else {}

    def mask(self) -> dict[str, Any]:
        kind = self.choice(SCORE_MASKS)
        if kind == "none":
            return {}
        if kind == "causal_at_0":
            return {"mask": M.Causal(), "offset": 0}
        return {"mask": getattr(self, kind)()}

    def causal(self) -> M.Mask:
        return M.Causal()

    def window(self) -> M.Mask:
        reach = (0, 1, 7, 16, 40, 100, None)
        return M.Window(self.choice(reach), self.choice(reach))

    def padding(self) -> M.Mask:
        lengths = M.Lengths(self.integers(0, self.Lk, *self.batch))
        return lengths if self.chance(0.5) else lengths & M.Causal()

    def packed(self) -> M.Mask:
        documents = M.Documents(self.integers(0, 3, self.Lk).sort().values)
        return documents if self.chance(0.5) else documents & M.Causal()

    def bool(self) -> Tensor:
        shape = (self.choice((1, self.Hq)), self.choice((1, self.Lq)), self.choice((1, self.Lk)))
        return self.integers(0, 2, *(1 for _ in self.batch), *shape) > 0

    def sparse(self) -> M.Mask:
        block = self.choice((2, 5, 16))
        masks: list[M.Mask] = [
            M.longformer((7, 7), [0, self.Lk // 2], dilation=self.choice((1, 2, 3))),
            M.bigbird(block, seed=self.pick.getrandbits(32), causal=self.chance(0.5)),
            M.Dilated(self.choice((2, 3, 5))) & M.Causal(),
            M.streaming(16, 3),
            ~M.Window(3, 3),
            M.prefix_lm(9),
            M.Blocks(self.integers(0, 1, -(-self.Lq // block), -(-self.Lk // block)) > 0, block),
        ]
        return self.choice(masks)

    def per_head(self) -> M.Mask:
        choices = [M.Causal(), M.Window(5, 5), M.Dilated(2), M.Prefix(4), M.Dilated(3) & M.Causal()]
        return M.PerHead([self.choice(choices) for _ in range(self.Hq)])

    def bias(self) -> dict[str, Any]:
        kind = self.choice(("none", "none", "none", *BIASES))
        if kind == "none" or (kind == "alibi" and self.Lq > self.Lk):  # no key is close to the query
            return {}
        if kind == "alibi":
            return {"bias": Alibi.standard(self.Hq)}
        if kind == "relative":
            table = self.randn(32, self.Hq, dtype=self.choice((torch.float32, self.dtype)))
            return {
                "bias": RelativeBias(table, bidirectional=self.chance(0.5), max_distance=20 + self.Lk // 2)
            }
        return {"bias": self.tensor_bias(kind)}

    def tensor_bias(self, kind: str) -> Tensor:
        """Returns random numbers, with some -inf if "excluding"; if "lowest", 0 or finfo.min."""
        shape = tuple(self.choice((1, n)) for n in (self.Hq, self.Lq)) + (self.choice((1, self.Lk, self.Lk)),)
        if len(self.batch) == 1:
            shape = (self.choice((1, *self.batch)), *shape)
        elif self.batch:
            shape = (1, *shape)
        if kind == "lowest":
            return (self.integers(0, 2, *shape) == 0) * torch.finfo(torch.float32).min
        bias = self.randn(*shape, dtype=self.choice((torch.float32, self.dtype)))
        return bias if kind == "tensor" else bias.masked_fill(self.integers(0, 2, *shape) == 0, -INF)


def sample(seed: int, work: float) -> Call:
    return Sampler(seed, work, core.isas()).call()
