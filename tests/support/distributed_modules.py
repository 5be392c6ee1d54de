"""Modules whose tokens are shards, and the same modules in a single process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from regard import distributed as D, masks as M, positions as P
from regard.distributed.layouts import in_order
from regard.nn import (
    AdditiveAttention,
    Attention,
    Block,
    CrossAttention,
    EncoderDecoder,
    FeedForward,
    LatentAttention,
    LinearAttention,
    LongformerAttention,
    PostNorm,
    Stack,
)  # fmt: skip

from .modules import randomized

WIDTH = 24
Seeded = Callable[[], nn.Module]


def _stack(blocks: int, **options: Any) -> Stack:
    return Stack([Block(Attention(WIDTH, 4, **options), FeedForward(WIDTH)) for _ in range(blocks)])


def _decoder() -> Stack:
    return Stack(
        [
            Block(
                Attention(WIDTH, 4, position=P.Rotary(6), mask=M.Causal()),
                FeedForward(WIDTH),
                cross=CrossAttention(WIDTH, heads=2, kv_model=WIDTH),
            )
            for _ in range(2)
        ],
        norm=nn.LayerNorm(WIDTH),
    )


class Remembering(nn.Module):
    """A decoder that projects the keys and values of the context before it reads the target."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = _decoder()

    def forward(self, x: Tensor, context: Tensor, **options: Any) -> Any:
        return self.decoder(x, self.decoder.remember(context), **options)


MODULES: dict[str, Seeded] = {
    "grouped": lambda: Attention(
        WIDTH, 6, kv_heads=2, head_dim=8, value_dim=5, position=P.Rotary(8), mask=M.Causal(),
        qk_norm=nn.RMSNorm, gate=True, sink=True, dropout=0.2,
    ),
    "alibi": lambda: Attention(WIDTH, 4, position=P.AlibiBias(4), softcap=4.0, mask=M.sliding(30)),
    "relative": lambda: Attention(WIDTH, 4, position=P.Relative(4), mask=M.Causal(), dropout=0.1),
    "plain": lambda: Attention(WIDTH, 4),
    "latent": lambda: LatentAttention(
        WIDTH, 4, rank=10, nope_dim=5, rope_dim=6, value_dim=7, q_rank=9, mask=M.Causal(), dropout=0.2
    ),
    "linear": lambda: LinearAttention(WIDTH, 4, kv_heads=2, decay="head", out_norm=nn.RMSNorm),
    "delta": lambda: Block(
        LinearAttention(WIDTH, 4, decay="token", delta=True, gate=True), FeedForward(WIDTH)
    ),
    "linear encoder": lambda: LinearAttention(WIDTH, 4, causal=False),
    "cross": lambda: Attention(WIDTH, 4, kv_model=10, value_model=7, sink=True),
    "stack": lambda: _stack(2, kv_heads=2, position=P.Rotary(6), mask=M.Causal(), dropout=0.1),
    "post-norm": lambda: Block(Attention(WIDTH, 3), FeedForward(WIDTH), residual=PostNorm),
    "decoder": _decoder,
    "remembering": Remembering,
    "longformer": lambda: LongformerAttention(WIDTH, 4, window=3),
    "additive": lambda: Block(AdditiveAttention(WIDTH), FeedForward(WIDTH)),
    "encoder-decoder": lambda: EncoderDecoder(_stack(1), _decoder()),
}  # fmt: skip


@dataclass
class ModuleCase:
    """A call of a module with the whole tensors, and how its tokens are divided."""

    module: str
    tokens: tuple[Tensor, ...]  # x and, for cross-attention, the context and the value
    layout: Any
    method: str = "auto"
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def layouts(self) -> tuple[D.Layout, ...]:
        """The layout of each of the tokens."""
        x, context = self.layout if isinstance(self.layout, tuple) else (self.layout, self.layout)
        return (x, context, context)[: len(self.tokens)]


def _results(model: nn.Module, tokens: list[Tensor], dout: Tensor, call: Callable[..., Any]) -> list[Tensor]:
    """Returns the output and the gradients of the tokens and of all parameters."""
    tokens = [x.detach().clone().requires_grad_() for x in tokens]
    torch.manual_seed(7)  # of the dropout
    out = call(*tokens)
    (out * dout).sum().backward()
    grads = [x.grad for x in (*tokens, *model.parameters())]
    return [out.detach(), *(torch.zeros(()) if g is None else g for g in grads)]


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return randomized(MODULES[name]())  # type: ignore[no-any-return]


def _dout(case: ModuleCase) -> Tensor:
    """Returns the gradient of the output, which has the shape of the last tensor that is a query."""
    target = case.tokens[1] if case.module == "encoder-decoder" else case.tokens[0]
    return torch.randn(target.shape, generator=torch.Generator().manual_seed(1), dtype=target.dtype)


def single(case: ModuleCase) -> list[Tensor]:
    model = built(case.module)
    return _results(model, list(case.tokens), _dout(case), partial(model, **case.options))


def on_rank(mesh: DeviceMesh, case: ModuleCase) -> list[Tensor]:
    model, parallel = built(case.module), D.SequenceParallel(mesh, case.layout, case.method, debug=True)
    shards = [
        D.shard(x, layout, parallel.rank, -2)
        for x, layout in zip(case.tokens, _token_layouts(case), strict=True)
    ]
    dout = parallel.shard(_dout(case), -2)
    return _results(model, shards, dout, partial(model, parallel=parallel, **case.options))


def _token_layouts(case: ModuleCase) -> tuple[D.Layout, ...]:
    """Returns the layout of each of the tokens. An encoder-decoder takes the context first."""
    return case.layouts[::-1] if case.module == "encoder-decoder" else case.layouts


def joined(case: ModuleCase, ranks: list[list[Tensor]]) -> list[Tensor]:
    """Returns the results of the whole sequence: shards joined, gradients of parameters summed."""
    layouts = (case.layouts[0], *_token_layouts(case))
    whole = [in_order([r[i] for r in ranks], layout, -2) for i, layout in enumerate(layouts)]
    return whole + [
        torch.stack(parts).sum(0) for parts in zip(*(r[len(layouts) :] for r in ranks), strict=True)
    ]


# Errors


def _message(call: Callable[[], Any]) -> str:
    try:
        call()
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


def error(mesh: DeviceMesh, module: str, shape: tuple[int, ...], options: dict[str, Any]) -> str:
    """Returns the message of a call with x of the given shape, a shard of 20 tokens on two ranks."""
    parallel = D.SequenceParallel(mesh, D.contiguous(20, 2))
    return _message(lambda: built(module)(torch.zeros(shape), **{"parallel": parallel} | options))


def nested_error(mesh: DeviceMesh) -> str:
    x = torch.nested.nested_tensor([torch.zeros(3, WIDTH)], layout=torch.jagged)
    parallel = D.SequenceParallel(mesh, D.contiguous(20, 2))
    return _message(lambda: built("plain")(x, parallel=parallel))


def layout_error(mesh: DeviceMesh) -> str:
    return _message(lambda: D.SequenceParallel(mesh, D.contiguous(20, 3)))
