"""Estimates of parameters, FLOPs, bytes and seconds of attention layers and models.

The input is a spec of plain numbers, a module, or a `config.json`.
"""

from .._tools.measuring import best_times as best_times, peak_memory as peak_memory
from ._cache import (
    FORMATS as FORMATS,
    Format as Format,
    allocated_bytes as allocated_bytes,
    cache_bytes as cache_bytes,
)
from ._call import CallCost as CallCost, CallSpec as CallSpec, Flops as Flops
from ._config import from_config as from_config
from ._estimate import CostRow as CostRow, TotalCost as TotalCost, estimate as estimate
from ._layers import (
    AttentionSpec as AttentionSpec,
    LatentSpec as LatentSpec,
    LayerSpec as LayerSpec,
    Work as Work,
)
from ._machine import Machine as Machine, measure_machine as measure_machine
from ._model import BlockSpec as BlockSpec, FeedForwardSpec as FeedForwardSpec, ModelSpec as ModelSpec
from ._modules import from_module as from_module, layers_in as layers_in
from ._sparse import (
    BigBirdSpec as BigBirdSpec,
    LinearSpec as LinearSpec,
    LinformerSpec as LinformerSpec,
    LongformerSpec as LongformerSpec,
    PerformerSpec as PerformerSpec,
)
from ._time import attention_seconds as attention_seconds, predict as predict
