"""Layers of tests of tensor parallelism, in a single process and divided among ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from regard import distributed as D, masks as M
from regard.distributed import HeadParallel
from regard.distributed._divisions import Division
from regard.distributed._group import group_of
from regard.nn import (
    Attention,
    Block,
    EncoderBlock,
    FeedForward,
    GatedFeedForward,
    LatentAttention,
    PreNorm,
    Stack,
)
from regard.positions import AlibiBias, Relative, Rotary
from support.modules import randomized

B, L, WIDTH = 2, 37, 24
RMS = partial(nn.RMSNorm, eps=1e-5)


class Case(NamedTuple):
    """A layer, its inputs and its options."""

    module: nn.Module
    inputs: tuple[Tensor, ...]
    options: dict[str, Any]


def _layer(module: nn.Module, *widths: int, tokens: tuple[int, ...] = (B, L), **options: Any) -> Case:
    inputs = tuple(torch.randn(*tokens, width).requires_grad_() for width in (WIDTH, *widths))
    return Case(randomized(module), inputs, options)


def _attention(*widths: int, call: dict[str, Any] | None = None, heads: int = 6, **options: Any) -> Case:
    return _layer(Attention(WIDTH, heads, **{"head_dim": 4} | options), *widths, **call or {})


def _latent(**options: Any) -> Case:
    call = options.pop("call", {})
    sizes = {"rank": 10, "nope_dim": 6, "rope_dim": 4, "value_dim": 5}
    return _layer(LatentAttention(WIDTH, 6, **sizes | options, mask=M.Causal()), **call)


def _head_masks(*shape: int) -> Tensor:
    keep = torch.rand(*shape, L, L) < 0.5
    return keep | torch.eye(L, dtype=torch.bool)


def _per_head() -> M.Mask:
    return M.PerHead([M.sliding(n + 3) for n in range(6)]) & M.Causal()


def _packed(**options: Any) -> Case:
    call = {"tokens": (L,), "cu_seqlens": torch.tensor([0, 11, 11, 30, L])}
    return _attention(call=call, **options)


CASES: dict[str, Callable[[], Case]] = {
    "plain": _attention,
    "value_dim": partial(_attention, value_dim=7, mask=M.Causal(), out_bias=False),
    "grouped": partial(_attention, heads=12, kv_heads=4, position=Rotary(4), mask=M.Causal()),
    "two key heads": partial(_attention, heads=8, kv_heads=2, value_dim=5),
    "three key heads": partial(_attention, kv_heads=3, bias=False),
    "multi-query": partial(_attention, kv_heads=1, qk_norm=RMS, position=Rotary(4)),
    "context": partial(_attention, 10, kv_heads=2, kv_model=10, qk_norm=RMS),
    "context as self": partial(_attention, WIDTH),
    "value": partial(_attention, 10, 9, kv_heads=3, kv_model=10, value_model=9),
    "value of self": partial(_attention, WIDTH, WIDTH, kv_heads=2),
    "gate and sink": partial(_attention, gate=True, sink=True, softcap=2.0, scale=0.4, mask=M.Causal()),
    "alibi": lambda: _attention(position=AlibiBias(6, learned=True), mask=M.Causal()),
    "relative": lambda: _attention(kv_heads=2, position=Relative(6), qk_norm=RMS),
    "per head": lambda: _attention(mask=_per_head()),
    "block table": lambda: _attention(mask=M.Blocks(torch.rand(6, 5, 5) < 0.7, 8) | M.sliding(2)),
    "mask tensor": lambda: _attention(call={"mask": _head_masks(B, 6)}, kv_heads=3),
    "mask of samples": lambda: _attention(call={"mask": _head_masks(B)}),
    "lengths": lambda: _attention(call={"lengths": torch.tensor([L, 20])}, mask=_per_head()),
    "dropout": partial(_attention, kv_heads=2, dropout=0.3, mask=M.Causal()),
    "packed": partial(_packed, position=Rotary(4), mask=M.Causal()),
    "packed dropout": lambda: _packed(dropout=0.3, mask=_per_head(), position=AlibiBias(6)),
    "packed positions": lambda: _packed(dropout=0.3, mask=M.Prefix(3) | M.Causal()),
    "latent": _latent,
    "latent absorbed": partial(_latent, q_rank=8, call={"absorb": True}, bias=True),
    "latent dropout": partial(_latent, rope_dim=0, dropout=0.3, call={"absorb": False}),
    "feed-forward": lambda: _layer(FeedForward(WIDTH, 31, dropout=0.2)),
    "gated": lambda: _layer(GatedFeedForward(WIDTH, 31, dropout=0.2, bias=True)),
}


class Results(NamedTuple):
    output: Tensor
    inputs: list[Tensor]  # gradients
    parameters: dict[str, Tensor]  # gradients


def _run(case: Case) -> Results:
    torch.manual_seed(1)
    output = case.module(*case.inputs, **case.options)
    weights = torch.linspace(-1, 1, output.numel()).view(output.shape).cos()
    (output * weights).sum().backward()
    grads = {name: p.grad for name, p in case.module.named_parameters() if p.grad is not None}
    return Results(output.detach(), [x.grad for x in case.inputs if x.grad is not None], grads)


def case_of(name: str) -> Case:
    torch.manual_seed(0)
    return CASES[name]()


def single(name: str) -> Results:
    return _run(case_of(name))


def divided(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(module, mesh, HeadParallel())


def divisions(module: nn.Module) -> dict[str, Division]:
    """Returns the divisions of all parameters of a model."""
    found = {}
    for prefix, layer in module.named_modules():
        share = getattr(layer, "_share", None)
        if share is not None and hasattr(layer, "_units"):
            start = f"{prefix}." if prefix else ""
            found |= {start + name: division for name, division in share.divisions.items()}
    return found


def on_rank(mesh: DeviceMesh, name: str) -> tuple[Results, dict[str, Division]]:
    """Returns the results of a rank, whose initial parameters differ from those of rank 0."""
    case = case_of(name)
    if mesh.get_local_rank():
        randomized(case.module)
    divided(case.module, mesh)
    return _run(case), divisions(case.module)


# Whole models


def stack(kind: str = "heads") -> Stack:
    """Returns a model of two blocks with grouped heads, a gate and dropout, or latent attention."""
    torch.manual_seed(3)
    residual = partial(PreNorm, norm=nn.RMSNorm, dropout=0.1)
    blocks = []
    for _ in range(2):
        options: dict[str, Any] = {"mask": M.Causal(), "dropout": 0.1}
        if kind == "latent":
            sizes = {"rank": 8, "nope_dim": 4, "rope_dim": 4}
            attention: Any = LatentAttention(WIDTH, 4, **sizes, **options)
        else:
            grouped = {"kv_heads": 2, "qk_norm": RMS, "gate": True, "sink": True}
            attention = Attention(WIDTH, 4, **grouped, position=Rotary(6), **options)
        hidden = GatedFeedForward(WIDTH, 37, dropout=0.1)
        blocks.append(Block(attention, hidden, residual=residual))
    return Stack(blocks, nn.RMSNorm(WIDTH))


class Training(NamedTuple):
    losses: list[float]
    norms: list[float]
    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    replicas_equal: bool


def train(mesh: DeviceMesh | None, steps: int, state: Training | None = None) -> Training:
    """Trains a model for some steps, from the state of an earlier training if one is given."""
    model = stack()
    if mesh is not None:
        divided(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    D.whole_states(optimizer, model)
    if state is not None:
        model.load_state_dict(state.model)
        optimizer.load_state_dict(copy.deepcopy(state.optimizer))  # processes share the tensors' memory
    clip = torch.nn.utils.clip_grad_norm_
    losses, norms = [], []
    for step in range(steps):
        torch.manual_seed(step)
        x = torch.randn(B, L, WIDTH)
        loss = (model(x) - x.roll(1, 1).cumsum(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        norm = clip(model.parameters(), 0.5) if mesh is None else D.clip_grad_norm_(model, 0.5)
        optimizer.step()
        losses.append(float(loss.detach()))
        norms.append(float(norm))
    return Training(losses, norms, model.state_dict(), optimizer.state_dict(), _replicas_equal(model, mesh))


def _replicas_equal(model: nn.Module, mesh: DeviceMesh | None) -> bool:
    """Returns whether undivided parameters are bitwise equal on all ranks."""
    if mesh is None:
        return True
    owned = divisions(model)
    flat = torch.cat([p.detach().flatten() for name, p in model.named_parameters() if name not in owned])
    others = [torch.empty_like(flat) for _ in range(mesh.size())]
    dist.all_gather(others, flat, group=mesh.get_group())
    return all(torch.equal(flat, x) for x in others)


def saved(mesh: DeviceMesh, folder: str) -> None:
    state = {"model": divided(stack(), mesh).state_dict()}
    dcp.save(state, checkpoint_id=folder, process_group=mesh.get_group())


def loaded(mesh: DeviceMesh, folder: str) -> dict[str, Tensor]:
    """Loads a checkpoint into a divided model with other parameters. Returns its state."""
    model = divided(randomized(stack()), mesh)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder, process_group=mesh.get_group())
    model.load_state_dict(state["model"])
    return model.state_dict()


def generated(mesh: DeviceMesh | None, kind: str) -> Tensor:
    """Returns the outputs of a prompt and of single tokens, with caches."""
    model = randomized(stack(kind)).eval()
    if mesh is not None:
        divided(model, mesh)
    torch.manual_seed(0)
    x, caches = torch.randn(B, L, WIDTH), model.new_caches(B)
    with torch.no_grad():
        return torch.cat([model(part, caches=caches) for part in x.split((34, 1, 1, 1), 1)], 1)


def by_memory(mesh: DeviceMesh | None) -> list[Tensor]:
    """Returns the output of cross-attention to a `Memory`, and the gradients of its inputs."""
    case = case_of("context")
    if mesh is not None:
        divided(case.module, mesh)
    x, context = case.inputs
    out = case.module(x, case.module.remember(context))
    out.square().sum().backward()
    return [out.detach(), x.grad, context.grad]


def with_nested(mesh: DeviceMesh | None) -> list[Tensor]:
    """Returns the output of nested tokens and their gradient."""
    case = case_of("grouped")
    if mesh is not None:
        divided(case.module, mesh)
    x = case.inputs[0].detach().clone().requires_grad_()
    nested = torch.nested.as_nested_tensor([x[0], x[1, :9]], layout=torch.jagged)
    out = case.module(nested).values()
    out.square().sum().backward()
    return [out.detach(), x.grad]


def variants(mesh: DeviceMesh | None) -> list[Tensor]:
    """Returns gradients of a copied model, of a checkpointed one, and of one with a frozen layer."""
    grads = []
    for variant in ("copied", "checkpointed", "frozen", "accumulated"):
        model = stack()
        if mesh is not None:
            divided(model, mesh)
        x = torch.randn(B, L, WIDTH, generator=torch.Generator().manual_seed(0)).requires_grad_()
        model.blocks[0].requires_grad_(variant != "frozen")
        model = copy.deepcopy(model) if variant == "copied" else model
        for _ in range(2 if variant == "accumulated" else 1):
            torch.manual_seed(1)
            out = checkpoint(model, x, use_reentrant=False) if variant == "checkpointed" else model(x)
            out.square().sum().backward()
        norms = [p.grad for name, p in model.named_parameters() if p.grad is not None and "norm" in name]
        grads += [x.grad, *norms]
    return grads


def from_meta(mesh: DeviceMesh | None) -> Tensor:
    """Returns the output of a model that is divided on the meta device and loaded then."""
    state = stack().state_dict()
    with torch.device("meta"):
        model = stack()
    if mesh is not None:
        divided(model, mesh)
    model.load_state_dict(state, assign=True)
    x = torch.randn(B, L, WIDTH, generator=torch.Generator().manual_seed(0))
    return model.eval()(x).detach()


def weights(mesh: DeviceMesh | None) -> Tensor:
    module = case_of("per head").module
    if mesh is not None:
        divided(module, mesh)
    return module(case_of("per head").inputs[0], return_weights=True)[1].detach()


def by_styles(mesh: DeviceMesh | None) -> list[Tensor]:
    """Returns output and gradient of a block whose feed-forward layer PyTorch's styles divide."""
    torch.manual_seed(0)
    block = randomized(EncoderBlock(WIDTH, 6, hidden=32))
    x = torch.randn(B, L, WIDTH).requires_grad_()
    if mesh is not None:
        plan = {
            "attention.sublayer": HeadParallel(), "feed_forward.sublayer.up": ColwiseParallel(),
            "feed_forward.sublayer.down": RowwiseParallel(),
        }  # fmt: skip
        parallelize_module(block, mesh, plan)
    out = block(x)
    out.square().sum().backward()
    return [out.detach(), x.grad]


def fails(mesh: DeviceMesh, kind: str) -> str:
    """Returns the message of an error."""
    module: nn.Module = Attention(WIDTH, 6, kv_heads=2, dropout=0.1)
    try:
        if kind == "heads":
            divided(Attention(WIDTH, 3, kv_heads=1), mesh)
        elif kind == "no output":
            divided(Attention(WIDTH, 6, out=False), mesh)
        elif kind == "module":
            divided(nn.Linear(3, 3), mesh)
        elif kind == "twice":
            divided(divided(module, mesh), mesh)
        elif kind == "mesh":
            divided(module, mesh)
        elif kind == "mask":
            mask = M.PerHead([M.Causal()] * 3)
            divided(module, mesh)(torch.zeros(1, 4, WIDTH), mask=mask)
        elif kind == "seed":
            torch.manual_seed(mesh.get_local_rank())
            divided(module, mesh)(torch.zeros(1, 4, WIDTH))
        elif kind == "state":
            divided(module, mesh)
            local = {name: p.detach() for name, p in module.named_parameters()}
            nn.Sequential(module).load_state_dict({f"0.{name}": x for name, x in local.items()})
        elif kind == "optimizer":
            divided(module.eval(), mesh)
            optimizer = torch.optim.Adafactor(module.parameters())
            D.whole_states(optimizer, module)
            module(torch.zeros(1, 4, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.state_dict()
    except (ValueError, TypeError, RuntimeError) as error:
        return str(error)
    raise AssertionError(kind)


def with_sequence_parallel(mesh: DeviceMesh | None, name: str) -> dict[str, Tensor]:
    """Returns the output and gradients of a layer whose heads and whose tokens are divided.

    The first dim of the mesh divides the tokens, the second one the heads.
    """
    case = case_of(name)
    x, options = case.inputs[0], dict(case.options)
    torch.manual_seed(1)
    weights = torch.linspace(-1, 1, x.numel()).view(x.shape).cos()
    if mesh is None:
        out = case.module(x, **options)
        (out * weights).sum().backward()
        grads = {n: p.grad for n, p in case.module.named_parameters() if p.grad is not None}
        return {"out": out.detach(), "x": x.grad, **grads}
    divided(case.module, mesh["ulysses"])
    parallel = D.SequenceParallel(mesh["ring"], D.zigzag(L, mesh["ring"].size()))
    own = parallel.shard(x.detach(), -2).requires_grad_()
    out = case.module(own, parallel=parallel, **options)
    (out * parallel.shard(weights, -2)).sum().backward()
    whole = {n: D.unshard(t, parallel.layout, parallel.mesh, -2) for n, t in (("out", out), ("x", own.grad))}
    owned, grads = divisions(case.module), {}
    for n, p in case.module.named_parameters():
        dist.all_reduce(p.grad, group=parallel.mesh.get_group())
        grads[n] = owned[n].whole(group_of(mesh["ulysses"]), p.grad) if n in owned else p.grad
    return {n: t.detach() for n, t in (whole | grads).items()}
