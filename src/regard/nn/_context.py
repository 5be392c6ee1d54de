"""`ContextInputs`: checks of the context and the values of attention modules."""

from __future__ import annotations

from torch import Tensor

from .._tools.arguments import describe
from ._module import CheckedModule
from ._options import Context, Memory, is_nested


class ContextInputs(CheckedModule):
    """A module that computes keys from a context, and values from the context or other tokens."""

    d_model: int
    kv_model: int | None
    value_model: int | None
    kv_heads: int
    head_dim: int
    value_dim: int

    @property
    def _context_width(self) -> int:
        return self.d_model if self.kv_model is None else self.kv_model

    @property
    def _value_width(self) -> int:
        return self._context_width if self.value_model is None else self.value_model

    def _check_inputs(self, context: Context, value: Tensor | None) -> None:
        """Checks the context and the values of a call, except that their batch is that of x."""
        self._check_forms(context, value)
        if context is None:
            self._check_widths_equal()
        elif isinstance(context, Memory):
            self._check_memory(context)
        else:
            self._check_context(context, value)

    def _check_widths_equal(self) -> None:
        """Checks that keys and values can be computed from x."""
        if self.kv_model not in (None, self.d_model):
            raise ValueError(f"context: expected tokens of width kv_model = {self.kv_model}, got None")
        if self.value_model not in (None, self.d_model):
            raise ValueError(f"value: expected tokens of width value_model = {self.value_model}, got None")

    @staticmethod
    def _check_forms(context: Context, value: Tensor | None) -> None:
        """Checks that `value` is only given together with a context of tokens."""
        if value is not None and not isinstance(context, Tensor):
            got = "None" if context is None else "a Memory, which has values"
            raise TypeError(f"context: expected a tensor, the tokens of the keys, with `value`, got {got}")

    def _check_context(self, context: Tensor, value: Tensor | None = None) -> None:
        width = self._context_width
        if is_nested("context", context) or context.dim() not in (2, 3) or context.shape[-1] != width:
            raise ValueError(f"context: expected (..., Lk, {width}), got {describe(context)}")
        self._check_value(context, value)

    def _check_value(self, context: Tensor, value: Tensor | None) -> None:
        """Checks the shape of `value`. Its default, the context, must have the width `value_model`."""
        width = self._value_width
        if value is None:
            if width != context.shape[-1]:
                raise ValueError(f"value: expected tokens of width value_model = {width}, got None")
            return
        if is_nested("value", value) or value.shape != (*context.shape[:-1], width):
            expected = f"{(*context.shape[:-1], width)}, the tokens of context and width {width}"
            raise ValueError(f"value: expected {expected}, got {describe(value)}")

    def _check_memory(self, memory: Memory) -> None:
        sizes = (self.kv_heads, self.head_dim), (self.kv_heads, self.value_dim)
        for x, size, shape in zip(memory, sizes, ("(..., Hkv, Lk, D)", "(..., Hkv, Lk, Dv)"), strict=True):
            if x.shape[-3::2] != size:
                raise ValueError(f"context: expected a Memory of {shape} with {size}, got {describe(x)}")
