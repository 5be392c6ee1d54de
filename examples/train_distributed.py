"""Trains a decoder whose sequence several processes share. The losses do not depend on their number.

    torchrun --nproc-per-node 4 examples/train_distributed.py

Packed documents, a sliding window and dropout. Each rank holds some of the tokens.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from regard import distributed, masks, packing
from regard.nn import Attention, Block, FeedForward, Stack
from regard.positions import Rotary

L, WIDTH, HEADS, VOCABULARY, WINDOW = 384, 32, 4, 16, masks.sliding(48)


class Decoder(nn.Module):
    """Maps tokens (n,) to logits (n, VOCABULARY). `options` are those of the stack."""

    def __init__(self) -> None:
        super().__init__()
        rotary = Rotary(WIDTH // HEADS)
        layers = (Attention(WIDTH, HEADS, mask=WINDOW, position=rotary, dropout=0.1) for _ in range(2))
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.stack = Stack([Block(layer, FeedForward(WIDTH)) for layer in layers], nn.LayerNorm(WIDTH))
        self.logits = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, **options: object) -> Tensor:
        return self.logits(self.stack(self.tokens(tokens), **options))


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Returns packed tokens (L,) and their cu_seqlens. Each document counts up from a random token."""
    g = torch.Generator().manual_seed(step)
    ends = torch.randint(0, L, (7,), generator=g).sort().values
    cu_seqlens = torch.cat([torch.tensor([0]), ends, torch.tensor([L])])
    starts = torch.randint(0, VOCABULARY, (8,), generator=g).repeat_interleave(cu_seqlens.diff())
    return (packing.positions(cu_seqlens) + starts) % VOCABULARY, cu_seqlens


def train(mesh: DeviceMesh, steps: int = 20) -> list[float]:
    """Returns the loss of each step, the same on all ranks."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Decoder(), process_group=mesh.get_group())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        tokens, cu_seqlens = batch(step)
        documents = masks.from_cu_seqlens(cu_seqlens)
        layout = distributed.balanced(WINDOW & documents, L, mesh.size())
        parallel = distributed.SequenceParallel(mesh, layout)
        labels = distributed.next_tokens(tokens, layout, parallel.rank, documents=documents.q_ids)
        logits = model(parallel.shard(tokens, 0), cu_seqlens=cu_seqlens, parallel=parallel)
        # This rank's share of the mean loss. The last token of a document has no label.
        count = L - int((cu_seqlens.diff() > 0).sum())
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum") / count
        optimizer.zero_grad()
        (loss * mesh.size()).backward()  # DDP averages the gradients, whose sum is the gradient
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total, group=mesh.get_group())
        losses.append(total.item())
    return losses


def main() -> None:
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("cp",))
    losses = train(mesh)
    if mesh.get_local_rank() == 0:
        for step, loss in enumerate(losses):
            print(f"step {step:2d}  loss {loss:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
