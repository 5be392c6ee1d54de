"""Estimates of parameters, FLOPs, bytes and seconds of attention layers and models.

A layer or model is described by a spec of plain numbers, by a module, or by a `config.json`.
"""

from .._tools.measuring import best_times, peak_memory
from ._cache import FORMATS, Format, allocated_bytes, cache_bytes
from ._call import CallCost, CallSpec, Flops
from ._config import from_config
from ._estimate import CostRow, TotalCost, estimate
from ._layers import AttentionSpec, LatentSpec, LayerSpec, Work
from ._machine import Machine, measure_machine
from ._methods import RankLink, RanksCost
from ._model import BlockSpec, FeedForwardSpec, ModelSpec
from ._modules import from_module, layers_in
from ._ranks import over_ranks
from ._ranks_table import RanksTable, ranks_table
from ._sparse import BigBirdSpec, LinearSpec, LinformerSpec, LongformerSpec, PerformerSpec
from ._table import CostTable, table
from ._time import attention_seconds, predict

__all__ = [
    "FORMATS", "AttentionSpec", "BigBirdSpec", "BlockSpec", "CallCost", "CallSpec", "CostRow",
    "CostTable", "FeedForwardSpec", "Flops", "Format", "LatentSpec", "LayerSpec", "LinearSpec",
    "LinformerSpec", "LongformerSpec", "Machine", "ModelSpec", "PerformerSpec", "RankLink",
    "RanksCost", "RanksTable", "TotalCost", "Work", "allocated_bytes", "attention_seconds",
    "best_times", "cache_bytes", "estimate", "from_config", "from_module", "layers_in",
    "measure_machine", "over_ranks", "peak_memory", "predict", "ranks_table", "table",
]  # fmt: skip
