"""Regard: attention for PyTorch. `regard.attention` computes every exact variant with one call.

Begin with `help(regard.attention)`, or with the code that you have:

- one call: `regard.attention(q, k, v, mask=regard.masks.Causal())` for q (B, Hq, Lq, D). Masks are in
  `regard.masks`, biases in `regard.scores`, packed sequences in `regard.packing`.
- a model to build: `regard.nn` has attention modules, blocks and stacks, `regard.positions` rotary
  positions, `regard.cache` KV caches for decoding.
- a model that exists: `with regard.convert.sdpa():` runs PyTorch's function on Regard, `import regard.hf`
  adds `attn_implementation="regard"` to Transformers, `regard.compat` has the functions of flash-attn,
  xFormers and FlexAttention.
- a question about attention: `regard.see` draws weights, `regard.evidence` computes statistics of them,
  `regard.cost` counts FLOPs and bytes, `regard.plan` says which kernel runs.

examples/first_hour.py does fourteen everyday tasks, each in at most ten lines. docs/README.md lists the
pages by task. The command `regard --help` lists the commands.

Names are imported when they are first used, so that `import regard` does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from . import cache, compat, convert, cost, facts, features, masks, nn, packing, positions, scores, see
    from ._api.attention import attention, weights
    from ._api.evidence import Evidence, evidence, rollout
    from ._api.linear_attention import linear_attention
    from ._api.merge import merge
    from ._api.meter import Comparison, compare_to_exact
    from ._api.plan import Plan, plan
    from ._call.linear import LinearState
    from .compat.torch import scaled_dot_product_attention
    from .facts import BlockMass, BlockMax, ColumnMass, DistanceHistogram, Entropy, MassOn, RowMax, Rows, TopK

_MODULES = {
    "_api.attention": ("attention", "weights"),
    "_api.evidence": ("Evidence", "evidence", "rollout"),
    "_api.linear_attention": ("linear_attention",),
    "_api.merge": ("merge",),
    "_api.meter": ("Comparison", "compare_to_exact"),
    "_api.plan": ("Plan", "plan"),
    "_call.linear": ("LinearState",),
    "compat.torch": ("scaled_dot_product_attention",),
    "facts": (
        "BlockMass", "BlockMax", "ColumnMass", "DistanceHistogram", "Entropy", "MassOn", "RowMax", "Rows",
        "TopK",
    ),
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "BlockMass", "BlockMax", "ColumnMass", "Comparison", "DistanceHistogram", "Entropy", "Evidence",
    "LinearState", "MassOn", "Plan", "RowMax", "Rows", "TopK", "attention", "cache", "compare_to_exact",
    "compat", "convert", "cost", "evidence", "facts", "features", "linear_attention", "masks", "merge",
    "nn", "packing", "plan", "positions", "rollout", "scaled_dot_product_attention", "scores", "see",
    "weights",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("regard")
    if name not in __all__:
        raise AttributeError(f"module 'regard' has no attribute {name!r}")
    module = import_module(f".{_MODULE_OF.get(name, name)}", __name__)
    value = getattr(module, name) if name in _MODULE_OF else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(globals() | dict.fromkeys(__all__))
