"""A decoder that ranks train together, in each of the ways that PyTorch offers, and alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from regard import distributed as D, masks as M, packing, positions as P
from regard.nn import Attention, Block, FeedForward, Stack

L, WIDTH, WORDS, SAMPLES = 75, 16, 11, 2
CU_SEQLENS = packing.cu_seqlens([30, 25, 20])
MASK = M.sliding(12)


class Decoder(nn.Module):
    """Maps packed tokens (L,) to logits (L, WORDS)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        attention = {"kv_heads": 2, "position": P.Rotary(4), "mask": MASK, "dropout": 0.2, "sink": True}
        self.words = nn.Embedding(WORDS, WIDTH)
        blocks = [Block(Attention(WIDTH, 4, **attention), FeedForward(WIDTH)) for _ in range(2)]  # type: ignore[arg-type]
        self.stack, self.logits = Stack(blocks, nn.LayerNorm(WIDTH)), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor, parallel: D.SequenceParallel | None = None) -> Tensor:
        wanted = {} if parallel is None else {"parallel": parallel}
        x = self.stack(self.words(tokens), cu_seqlens=CU_SEQLENS, **wanted)
        logits: Tensor = self.logits(x)
        return logits


class Checkpointed(nn.Module):
    """A block that computes its activations again in the backward pass."""

    def __init__(self, block: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.block, self.use_reentrant = block, use_reentrant

    def forward(self, x: Tensor, context: None, **options: Any) -> Any:
        block = partial(self.block, **options)  # reentrant checkpointing takes no keywords
        return checkpoint(block, x, use_reentrant=self.use_reentrant)


class Autocast(nn.Module):
    """A model in bfloat16 autocast."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(*inputs).float()


class Result(NamedTuple):
    losses: list[float]
    grads: list[Tensor]  # of the last step
    weights: list[Tensor]


def batch(step: int, sample: int) -> tuple[Tensor, Tensor]:
    """Returns the tokens and the labels of a sample, both (L,)."""
    g = torch.Generator().manual_seed(100 * step + sample)
    return torch.randint(WORDS, (L,), generator=g), torch.randint(WORDS, (L,), generator=g)


def share(model: nn.Module, step: int, sample: int, parallel: D.SequenceParallel | None) -> Tensor:
    """Returns this rank's share of the mean loss of a step over all tokens of all samples."""
    torch.manual_seed(1000 + 10 * step + sample)  # of the dropout
    tokens, labels = batch(step, sample)
    if parallel is not None:
        tokens, labels = parallel.shard(tokens, 0), parallel.shard(labels, 0)
    return F.cross_entropy(model(tokens, parallel), labels, reduction="sum") / (L * SAMPLES)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


def whole(x: Tensor | None) -> Tensor:
    assert x is not None
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def result(model: nn.Module, losses: list[float]) -> Result:
    parameters = list(model.parameters())
    return Result(losses, [whole(p.grad) for p in parameters], [whole(p) for p in parameters])


def alone(steps: int) -> Result:
    """Trains in a single process."""
    model = Decoder()
    optimizer, losses = optimizer_of(model), []
    for step in range(steps):
        optimizer.zero_grad()
        loss = sum((share(model, step, s, None) for s in range(SAMPLES)), torch.zeros(()))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return result(model, losses)


# Ranks. Each way makes a model, and sums or scales the gradients of the ranks.


class Way(NamedTuple):
    wrap: Callable[[Decoder, DeviceMesh], nn.Module] = lambda model, mesh: model
    sums: bool = True  # whether the caller sums the gradients
    scaled: bool = False  # whether the wrapper averages over the ranks


def _checkpointed(model: Decoder, mesh: DeviceMesh, use_reentrant: bool) -> Decoder:
    model.stack.blocks = nn.ModuleList(Checkpointed(block, use_reentrant) for block in model.stack.blocks)
    return model


def _flat(mesh: DeviceMesh) -> DeviceMesh:
    return mesh if mesh.ndim == 1 else mesh._flatten("all")


def _ddp(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model, process_group=_flat(mesh).get_group())


def _fully_sharded(
    model: Decoder, mesh: DeviceMesh, sums: bool = False, flat: bool = True, **options: Any
) -> Decoder:
    """Shards the parameters of each block and of the rest, over all ranks or over the last dim."""
    for module in (*model.stack.blocks, model):
        unit = fully_shard(module, mesh=_flat(mesh) if flat else mesh, **options)
        if sums:
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)  # gloo cannot scale in a reduction
    return model


WAYS = {
    "plain": Way(),
    "checkpoint": Way(partial(_checkpointed, use_reentrant=False)),
    "reentrant": Way(partial(_checkpointed, use_reentrant=True)),
    "ddp": Way(_ddp, sums=False, scaled=True),
    "fully_shard": Way(_fully_sharded, sums=False, scaled=True),
    "fully_shard with a sum": Way(partial(_fully_sharded, sums=True), sums=False),
    "compiled": Way(lambda model, mesh: torch.compile(model, backend="eager")),  # type: ignore[arg-type,return-value]
    "autocast": Way(lambda model, mesh: Autocast(model)),
    "hybrid": Way(partial(_fully_sharded, flat=False), sums=False, scaled=True),
    "fully_shard in bfloat16": Way(
        partial(_fully_sharded, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)),
        sums=False,
        scaled=True,
    ),
    "fully_shard of checkpoints": Way(
        lambda model, mesh: _fully_sharded(_checkpointed(model, mesh, False), mesh), sums=False, scaled=True
    ),
}


class Trainer:
    """One rank of a mesh with the dims (data, sequence), or of the sequence alone."""

    def __init__(self, mesh: DeviceMesh, way: str, method: str = "auto") -> None:
        self.mesh, self.way = mesh, WAYS[way]
        cp = mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[-1]]  # type: ignore[index]
        layout = D.balanced(MASK & M.from_cu_seqlens(CU_SEQLENS), L, cp.size())
        self.parallel = D.SequenceParallel(cp, layout, method)
        ranks, n = (0, 1) if mesh.ndim == 1 else (mesh.get_local_rank(0), mesh.size(0))
        self.samples = range(ranks, SAMPLES, n)
        self.model = self.way.wrap(Decoder(), mesh)
        self.optimizer = optimizer_of(self.model)

    def step(self, step: int) -> float:
        self.optimizer.zero_grad()
        loss = torch.zeros(())
        for sample in self.samples:
            loss = loss + share(self.model, step, sample, self.parallel)
        (loss * self.mesh.size() if self.way.scaled else loss).backward()  # type: ignore[no-untyped-call]
        total = loss.detach().clone()
        group = _flat(self.mesh).get_group()
        for x in (total, *(p.grad for p in self.model.parameters() if self.way.sums)):
            assert x is not None
            dist.all_reduce(x, group=group)
        self.optimizer.step()
        return float(total)

    def result(self, losses: list[float]) -> Result:
        return result(self.model, losses)


def together(mesh: DeviceMesh, way: str, steps: int, method: str = "auto") -> Result:
    trainer = Trainer(mesh, way, method)
    return trainer.result([trainer.step(step) for step in range(steps)])


# Checkpoints


def save(mesh: DeviceMesh, path: Path, steps: int) -> None:
    """Trains with sharded parameters and saves the model and the optimizer."""
    trainer = Trainer(mesh, "fully_shard")
    for step in range(steps):
        trainer.step(step)
    model, optimizer = get_state_dict(trainer.model, trainer.optimizer)
    state = {"model": model, "optimizer": optimizer}
    dcp.save(state, checkpoint_id=path, process_group=mesh.get_group())


def resume(mesh: DeviceMesh, path: Path, steps: range) -> Result:
    """Loads what `save` saved, on any number of ranks, and trains on."""
    trainer = Trainer(mesh, "fully_shard")
    model, optimizer = get_state_dict(trainer.model, trainer.optimizer)
    state = {"model": model, "optimizer": optimizer}
    dcp.load(state, checkpoint_id=path, process_group=mesh.get_group())
    set_state_dict(trainer.model, trainer.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    return trainer.result([trainer.step(step) for step in steps])


# Parameters that layers read without their projection


def sharded_projections(mesh: DeviceMesh) -> tuple[float, float, str]:
    """Returns the error of cross-attention of a sharded layer.

    Also of self-attention of a layer with a sharded `qkv`, and the message of its cross-attention.
    """
    torch.manual_seed(0)
    layers, x, context = [Attention(WIDTH, 4) for _ in range(2)], torch.randn(8, WIDTH), torch.randn(6, WIDTH)
    expected = layers[0](x, context), layers[1](x)
    fully_shard(layers[0], mesh=mesh)
    fully_shard(layers[1].qkv, mesh=mesh)
    message = ""
    try:
        layers[1](x, context)
    except RuntimeError as error:
        message = str(error)
    errors = [
        (a - b).abs().max().item()
        for a, b in zip(expected, (layers[0](x, context), layers[1](x)), strict=True)
    ]
    return errors[0], errors[1], message
