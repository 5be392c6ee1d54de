"""The engines that `make bench-peers` compares: one file for each library."""

from .engine import KINDS as KINDS, Engine as Engine, Place as Place, Prepared as Prepared
from .ggml import Ggml
from .jax import Jax
from .onnxruntime import Attention, GroupQuery, MultiHead
from .openvino import OpenVINO
from .read import PlainRead
from .regard import Regard
from .torch import PyTorch
from .zentorch import Zentorch

ENGINES: dict[str, type[Engine]] = {
    engine.name: engine
    for engine in (
        Regard,
        PyTorch,
        Zentorch,
        MultiHead,
        GroupQuery,
        Attention,
        OpenVINO,
        Ggml,
        Jax,
        PlainRead,
    )
}
