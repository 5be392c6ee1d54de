"""`SequenceParallel`: the argument `parallel` of the modules in `regard.nn`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._call.spec import Options
from ._group import check_mesh
from .attention import Layouts, attend_heads
from .latent_attention import latent_attention
from .layouts import Layout, as_pair, positions, shard
from .linear_attention import linear_attention


@dataclass(frozen=True)
class SequenceParallel:
    """The ranks that share a model's sequence, and the tokens of each rank.

    Modules take it as the argument `parallel` of `forward`. Tokens are then this rank's shards. All
    other arguments are those of the whole sequence: masks, lengths, positions and cu_seqlens.

    Args:
        mesh, method, debug: as in `distributed.attention`.
        layout: the tokens of each rank, or a pair of layouts for x and for the context of
            cross-attention.

    Example:
        >>> parallel = regard.distributed.SequenceParallel(mesh, zigzag(L, mesh.size()))
        >>> out = model(parallel.shard(x, dim=1), parallel=parallel)
    """

    mesh: DeviceMesh
    layout: Layouts
    method: str = "auto"
    debug: bool | None = None

    def __post_init__(self) -> None:
        as_pair(self.layout, check_mesh(self.mesh).size())

    @property
    def layouts(self) -> tuple[Layout, Layout]:
        """The layouts of queries and of keys."""
        return as_pair(self.layout, self.mesh.size())

    @property
    def of_queries(self) -> SequenceParallel:
        """The same ranks for self-attention of the queries' tokens."""
        return dataclasses.replace(self, layout=self.layouts[0])

    @property
    def of_keys(self) -> SequenceParallel:
        """The same ranks for self-attention of the keys' tokens."""
        return dataclasses.replace(self, layout=self.layouts[1])

    @property
    def rank(self) -> int:
        """This rank's place in the layout, which is its place in the flattened mesh."""
        place = 0
        for dim in range(self.mesh.ndim):
            place = place * self.mesh.size(dim) + self.mesh.get_local_rank(dim)
        return place

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """Returns this rank's shard of x along `dim`, which has the tokens of the queries' layout."""
        return shard(x, self.layouts[0], self.rank, dim)

    def positions(self, device: torch.device | str | None = None) -> Tensor:
        """Returns the position of each of this rank's query tokens, int64 (lengths[rank],)."""
        return positions(self.layouts[0], self.rank, device)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, part: tuple[int, int] | None = None, **options: Any
    ) -> Tensor:
        """Computes `distributed.attention`, of the heads `part` of a call (see `attend_heads`)."""
        values = Options(**options)
        place = self.mesh, self.layouts, self.method, self.debug
        out: Tensor = attend_heads(part, q, k, v, values, *place)[0]
        return out

    def latent_attention(self, q: Tensor, latent: Tensor, **options: Any) -> Any:
        """Calls `distributed.latent_attention` with the mesh, layouts, method and debug mode."""
        return latent_attention(
            q, latent, mesh=self.mesh, layout=self.layouts, method=self.method, debug=self.debug, **options
        )

    def linear_attention(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        """Calls `distributed.linear_attention` with the mesh, layouts and debug mode."""
        return linear_attention(q, k, v, mesh=self.mesh, layout=self.layouts, debug=self.debug, **options)
