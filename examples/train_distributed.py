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

from regard import distributed, masks

L, WIDTH, HEADS, VOCABULARY, WINDOW, DROPOUT = 384, 32, 4, 16, 48, 0.1


class Block(nn.Module):
    """A pre-norm block. Its attention sees the whole sequence, its feed-forward layer a shard."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feedforward = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(
        self, x: Tensor, mesh: DeviceMesh, layout: distributed.Layout, mask: masks.Mask, seed: int
    ) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2).chunk(3, 1)
        heads = distributed.attention(
            q, k, v, mesh=mesh, layout=layout, mask=mask, dropout=DROPOUT, seed=seed
        )
        assert isinstance(heads, Tensor)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.feedforward(self.norms[1](x))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(L, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.logits = nn.Linear(WIDTH, VOCABULARY)

    def forward(
        self, tokens: Tensor, mesh: DeviceMesh, layout: distributed.Layout, mask: masks.Mask, seed: int
    ) -> Tensor:
        places = distributed.positions(layout, mesh.get_local_rank())
        x = self.tokens(tokens) + self.places(places)
        for i, block in enumerate(self.blocks):
            x = block(x, mesh, layout, mask, seed=seed + i)
        return self.logits(x)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Returns tokens (1, L) and document ids (L,). Each document counts up from a random token."""
    g = torch.Generator().manual_seed(step)
    ids = torch.searchsorted(torch.randint(0, L, (7,), generator=g).sort().values, torch.arange(L))
    starts = torch.randint(0, VOCABULARY, (8,), generator=g)
    return ((torch.arange(L) + starts[ids]) % VOCABULARY)[None], ids


def train(mesh: DeviceMesh, steps: int = 20) -> list[float]:
    """Returns the loss of each step, the same on all ranks."""
    torch.manual_seed(0)
    model, rank = Decoder(), mesh.get_local_rank()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        tokens, ids = batch(step)
        mask = masks.sliding(WINDOW) & masks.Documents(ids)
        layout = distributed.balanced(mask, L, mesh.size())
        labels = distributed.next_tokens(tokens, layout, rank, documents=ids)
        logits = model(distributed.shard(tokens, layout, rank, 1), mesh, layout, mask, seed=100 * step)
        # The mean over all ranks' labels: each rank adds its share.
        count = int(
            (distributed.next_tokens(tokens, distributed.contiguous(L, 1), 0, documents=ids) >= 0).sum()
        )
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count
        optimizer.zero_grad()
        loss.backward()
        total = loss.detach().clone()
        for x in (total, *(p.grad for p in model.parameters() if p.grad is not None)):
            dist.all_reduce(x, group=mesh.get_group())
        optimizer.step()
        losses.append(float(total))
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
