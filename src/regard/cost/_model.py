"""Models as numbers: blocks of attention and feed-forward layers, embeddings, a head."""

from __future__ import annotations

from dataclasses import dataclass

from ._layers import LayerSpec, PartSpec, Product, Work


@dataclass(frozen=True)
class FeedForwardSpec(PartSpec):
    """Token by token: up and down, with a gate three matrices; or experts of which a router chooses.

    Bytes are counted as if all tokens chose the same experts: the least that is read.

    Args:
        experts: routed ones, each of `hidden` channels; 0: the layer is one.
        active: how many of them a token takes.
        shared: channels of the experts that every token takes.
    """

    d_model: int
    hidden: int
    gated: bool = False
    bias: bool = False
    experts: int = 0
    active: int = 0
    shared: int = 0

    @property
    def parameters(self) -> int:
        if not self.experts:
            return self._size(self.hidden)
        return self.experts * (self._size(self.hidden) + self.d_model) + self._size(self.shared)

    @property
    def active_parameters(self) -> int:
        """Those that a token meets."""
        return self.parameters - (self.experts - self.active) * self._size(self.hidden)

    def _size(self, hidden: int) -> int:
        inside = hidden * (1 + self.gated)
        return self.d_model * (inside + hidden) + self.bias * (inside + self.d_model)

    def products(self, work: Work) -> list[Product]:
        hidden = self.hidden * self.active + self.shared if self.experts else self.hidden
        router = [Product("router", work.rows, self.d_model, self.experts)] * (self.experts > 0)
        up = Product("feed-forward, up", work.rows, self.d_model, hidden * (1 + self.gated))
        return [*router, up, Product("feed-forward, down", work.rows, hidden, self.d_model)]

    def inputs(self, work: Work) -> int:
        """x, and what lies between the products."""
        return sum(product.m * product.k for product in self.products(work)[-2:])


@dataclass(frozen=True)
class LogitsSpec(PartSpec):
    """The logits."""

    d_model: int
    vocab: int

    def products(self, work: Work) -> list[Product]:
        return [Product("logits", work.rows, self.d_model, self.vocab)]


@dataclass(frozen=True)
class BlockSpec:
    attention: LayerSpec
    feed_forward: FeedForwardSpec
    norms: int = 0  # parameters

    @property
    def parameters(self) -> int:
        return self.attention.parameters + self.feed_forward.parameters + self.norms


@dataclass(frozen=True)
class ModelSpec:
    """Blocks between embeddings and a head of `vocab` logits.

    Args:
        embeddings: rows of learned tables of positions and kinds of tokens.
        tied: the head is the table of tokens. `head=False`: there is none.
        others: parameters of the last norm, a pooler and the like.
    """

    blocks: tuple[BlockSpec, ...]
    vocab: int
    d_model: int
    embeddings: int = 0
    tied: bool = True
    head: bool = True
    others: int = 0

    @property
    def parameters(self) -> int:
        tables = self.vocab * (1 + (self.head and not self.tied)) + self.embeddings
        return tables * self.d_model + sum(block.parameters for block in self.blocks) + self.others

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        return tuple(block.attention for block in self.blocks)

    @property
    def parts(self) -> tuple[PartSpec, ...]:
        """All that has work to do."""
        around = [block.feed_forward for block in self.blocks]
        return (*self.layers, *around, *[LogitsSpec(self.d_model, self.vocab)] * self.head)

    @property
    def reach(self) -> int | None:
        """How far back the last token can be reached through all layers; None: as far as one likes."""
        spans = [layer.most_kept for layer in self.layers]
        return None if None in spans else sum(span for span in spans if span is not None)

    def palm_flops(self, L: int) -> int:
        """Of training on L tokens by PaLM's formula: 6 for a parameter, 12 H D L for a layer, each token."""
        asked = sum(call.Hq * call.D for layer in self.layers for call in layer.calls(Work(L)))
        return (6 * self.parameters + 12 * asked * L) * L
