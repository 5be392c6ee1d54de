"""Specs of models. A model consists of embeddings, blocks (attention, feed-forward) and a head."""

from __future__ import annotations

from dataclasses import dataclass

from ._layers import LayerSpec, PartSpec, Product, Work


@dataclass(frozen=True)
class FeedForwardSpec(PartSpec):
    """A feed-forward layer with two matrices, or three if gated. May be a mixture of experts.

    The bytes read by a mixture of experts are a lower bound: all tokens are assumed to be routed to
    the same experts.

    Args:
        experts: number of routed experts with `hidden` channels each. 0: the layer is dense.
        active: number of routed experts per token.
        shared: number of hidden channels of the shared experts, which process every token.
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
        """Number of parameters that one token uses, which excludes experts it is not routed to."""
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
        """Counts the elements saved for backward: x and the hidden activations."""
        return sum(product.m * product.k for product in self.products(work)[-2:])


@dataclass(frozen=True)
class LogitsSpec(PartSpec):
    """The projection to `vocab` logits."""

    d_model: int
    vocab: int

    def products(self, work: Work) -> list[Product]:
        return [Product("logits", work.rows, self.d_model, self.vocab)]


@dataclass(frozen=True)
class BlockSpec:
    """A transformer block: attention, feed-forward, and norms with `norms` parameters in total."""

    attention: LayerSpec
    feed_forward: FeedForwardSpec
    norms: int = 0

    @property
    def parameters(self) -> int:
        return self.attention.parameters + self.feed_forward.parameters + self.norms


@dataclass(frozen=True)
class ModelSpec:
    """A transformer: token embeddings, blocks, and a head with `vocab` logits.

    Args:
        embeddings: number of rows of all learned embedding tables except the token embedding:
            positions and token types.
        tied: if True, the head shares the weights of the token embedding.
        head: if True, the model has a head.
        others: number of other parameters, such as the parameters of the last norm and a pooler.
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
        """The specs of all attention layers, all feed-forward layers, and the head (if any)."""
        feed_forward = [block.feed_forward for block in self.blocks]
        return (*self.layers, *feed_forward, *[LogitsSpec(self.d_model, self.vocab)] * self.head)

    @property
    def reach(self) -> int | None:
        """The receptive field of a token through all layers, in tokens. None: there is no limit."""
        limits = [layer.most_kept for layer in self.layers]
        return None if None in limits else sum(limit for limit in limits if limit is not None)

    def palm_flops(self, L: int) -> int:
        """Returns the training FLOPs for a sequence of L tokens by PaLM's formula.

        Each token costs 6 FLOPs per parameter, and 12 H D L FLOPs in each layer with H heads of D
        channels.
        """
        widths = sum(call.Hq * call.D for layer in self.layers for call in layer.calls(Work(L)))
        return (6 * self.parameters + 12 * widths * L) * L
