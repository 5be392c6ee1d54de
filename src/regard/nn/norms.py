"""Residual connections with a norm before (pre-norm) or after (post-norm) the sublayer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ._padding import finite_padding
from ._parallel import checked_parallel

Norm = Callable[[int], nn.Module]


class Residual(nn.Module):
    """Base of `PreNorm` and `PostNorm`: a sublayer with a norm, dropout and a residual connection.

    Args:
        d_model: width of the tokens.
        sublayer: a module that maps (..., d_model) to (..., d_model).
        norm: factory of the norm, called as `norm(d_model)`.
        dropout: dropout probability of the sublayer's output in training.
    """

    def __init__(
        self, d_model: int, sublayer: nn.Module, *, norm: Norm = nn.LayerNorm, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.norm, self.sublayer, self.dropout = norm(d_model), sublayer, nn.Dropout(dropout)


class PreNorm(Residual):
    """A pre-norm residual connection, x + dropout(sublayer(norm(x), ...)).

    Pre-norm models train without warm-up. A stack of pre-norm blocks needs a final norm. The
    arguments are `d_model`, `sublayer`, `norm` (default: `nn.LayerNorm`) and `dropout`.
    """

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Any:
        """Applies norm, sublayer and dropout to x (..., d_model) and adds x.

        The output has x's shape. Other arguments go to the sublayer. If the sublayer returns
        (output, weights), as with `return_weights=True`, so does this module.
        """
        x = _finite(x, args, options)
        result = self.sublayer(self.norm(x), *args, **options)
        return _on_output(result, lambda output: x + self.dropout(output))


class PostNorm(Residual):
    """A post-norm residual connection, norm(x + dropout(sublayer(x, ...))).

    "Attention is all you need" uses this connection. The arguments are `d_model`, `sublayer`,
    `norm` (default: `nn.LayerNorm`) and `dropout`.
    """

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Any:
        """Applies sublayer and dropout to x (..., d_model), adds x, and normalises.

        The output has x's shape. Other arguments go to the sublayer. If the sublayer returns
        (output, weights), as with `return_weights=True`, so does this module.
        """
        x = _finite(x, args, options)
        result = self.sublayer(x, *args, **options)
        return _on_output(result, lambda output: self.norm(x + self.dropout(output)))


def _on_output(result: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Applies `function` to a sublayer's output, the first entry if the result is a tuple."""
    return (function(result[0]), *result[1:]) if isinstance(result, tuple) else function(result)


def _finite(x: Tensor, args: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    """Replaces padding that has NaN or Inf by zeros, if the sublayer's arguments declare padding of x.

    With a context, a cache or cu_seqlens, a mask is not about the tokens of x.
    """
    about_x = not any(arg is not None for arg in args)
    is_self = about_x and all(options.get(name) is None for name in ("context", "cache", "cu_seqlens"))
    lengths = options.get("lengths") if about_x else None
    if x.is_nested or (lengths is None and not is_self):
        return x
    mask, parallel = options.get("mask") if is_self else None, options.get("parallel")
    parallel = None if parallel is None else checked_parallel(parallel, "x", x)
    return finite_padding(x, lengths, mask, parallel=parallel)
