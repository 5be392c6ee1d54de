from collections.abc import Callable, Sequence

from typing_extensions import CapsuleType

class Spec:
    def __init__(
        self,
        *,
        dtype: int,
        bias_dtype: int,
        bias: int,
        B: int,
        Hq: int,
        Hkv: int,
        Lq: int,
        Lk: int,
        D: int,
        Dv: int,
        q: Sequence[int],
        k: Sequence[int],
        v: Sequence[int],
        out: Sequence[int],
        bias_stride: Sequence[int],
        scale: float,
        softcap: float,
        drop_below: int,
        keep_scale: float,
        store: int = 0,
        k_scale: Sequence[int] = [0, 0, 0, 0],
        v_scale: Sequence[int] = [0, 0, 0, 0],
        page: int = 0,
        pages: int = 0,
    ) -> None: ...

class MaskTensor:
    def __init__(self, *, data: int, size: Sequence[int], stride: Sequence[int]) -> None: ...

class Operands:
    def __init__(
        self,
        *,
        bias: int = 0,
        by_head: int = 0,
        distance_low: int = 0,
        distances: int = 0,
        sink: int = 0,
        offsets: int = 0,
        seed: int = 0,
        origin: Sequence[int] = [0, 0, 0, 0],
        tensors: Sequence[MaskTensor] = (),
    ) -> None: ...

class Gradients:
    def __init__(
        self,
        *,
        out: int,
        residual: int,
        dout: int,
        dout_stride: Sequence[int],
        dlse: int,
        stats: int,
        dq: int,
        dk: int,
        dk_stride: Sequence[int],
        dv: int,
        dv_stride: Sequence[int],
        dbias: int,
        dbias_stride: Sequence[int],
        dby_head: int,
        dsink: int,
    ) -> None: ...

class Facts:
    def __init__(
        self,
        *,
        k: int = 0,
        top_weights: int = 0,
        top_keys: int = 0,
        nats: int = 0,
        choices: int = 0,
        column_mass: int = 0,
        row_weights: int = 0,
        row_weights_batch: int = 0,
        histogram: int = 0,
        distance_low: int = 0,
        distances: int = 0,
        sets: int = 0,
        chosen: int = 0,
        mass_on: int = 0,
        block: int = 0,
        block_mass: int = 0,
        block_max: int = 0,
        n_rows: int = 0,
        rows: int = 0,
        row_values: int = 0,
    ) -> None: ...

class Side:
    def __init__(
        self,
        *,
        source: int,
        source_stride: Sequence[int],
        target: int,
        target_stride: Sequence[int],
        scales: int,
        scale_stride: Sequence[int],
        width: int,
    ) -> None: ...

class Write:
    def __init__(
        self,
        *,
        dtype: int,
        store: int,
        B: int,
        H: int,
        table: int,
        table_stride: int,
        page: int,
        pages: int,
        sides: Sequence[Side],
    ) -> None: ...

class Token:
    def __init__(self, *, k: int, k_stride: Sequence[int], v: int, v_stride: Sequence[int]) -> None: ...

class LinearSpec:
    def __init__(
        self,
        *,
        dtype: int,
        B: int,
        Hq: int,
        Hkv: int,
        L: int,
        D: int,
        Dv: int,
        q: Sequence[int],
        k: Sequence[int],
        v: Sequence[int],
        out: Sequence[int],
        scale: float,
        normalize: bool,
    ) -> None: ...

class LinearCall:
    def __init__(
        self,
        *,
        q: int,
        k: int,
        v: int,
        out: int,
        log_decay: int,
        beta: int,
        lengths: int,
        S: int,
        z: int,
        S_end: int,
        z_end: int,
        S_kept: int,
        z_kept: int,
        errors: int,
    ) -> None: ...

class LinearGradients:
    def __init__(
        self,
        *,
        dout: int,
        dout_stride: Sequence[int],
        dS_end: int,
        dz_end: int,
        dq: int,
        dq_stride: Sequence[int],
        dk: int,
        dk_stride: Sequence[int],
        dv: int,
        dv_stride: Sequence[int],
        dlog_decay: int,
        dbeta: int,
        dS: int,
        dz: int,
    ) -> None: ...

class Attention:
    def __init__(self, spec: Spec, code: Sequence[int]) -> None: ...
    def forward(
        self,
        q: int,
        k: int,
        v: int,
        out: int,
        lse: int,
        stats: int,
        residual: int,
        offset: int,
        operands: Operands,
    ) -> None: ...
    def decode(
        self,
        q: int,
        k: int,
        v: int,
        out: int,
        lse: int,
        offset: int,
        Lk: int,
        k_scale: int,
        v_scale: int,
        table: int,
        table_stride: int,
        operands: Operands,
        token: Token | None,
    ) -> None: ...
    def decodes(self) -> bool: ...
    def backward(
        self, q: int, k: int, v: int, offset: int, operands: Operands, gradients: Gradients
    ) -> None: ...
    def evidence(self, q: int, k: int, offset: int, operands: Operands, facts: Facts) -> None: ...
    def cost(self, offset: int, operands: Operands) -> dict[str, int]: ...
    def spans(
        self, batch: int, head: int, row: int, step: int, count: int, offset: int, operands: Operands
    ) -> list[tuple[int, int, int]]: ...

class Repeats:
    def __init__(
        self, exchange: CapsuleType, empty_like: Callable, empty_strided: Callable, is_grad_enabled: Callable
    ) -> None: ...
    def run(
        self,
        q: object | None,
        k: object | None,
        v: object | None,
        program: object | None,
        offset: object | None,
        bias: object | None,
        scale: object | None,
        softcap: object | None,
        sink: object | None,
        dropout: object | None,
        seed: object | None,
        return_lse: object | None,
        impl: object | None,
    ) -> object: ...
    def remember(
        self, arguments: tuple, attention: object, spec: object, out: object, lse: object | None
    ) -> None: ...
    def clear(self) -> None: ...

def write(rows: Write, starts: Sequence[int], counts: Sequence[int]) -> None: ...

LINEAR_SEGMENT: int = 512

def linear_forward(spec: LinearSpec, call: LinearCall) -> None: ...
def linear_backward(spec: LinearSpec, call: LinearCall, gradients: LinearGradients) -> None: ...
def project(
    dtype: int,
    rows: int,
    depth: int,
    width: int,
    x: int,
    x_row: int,
    x_column: int,
    weight: int,
    weight_row: int,
    bias: int,
    out: int,
) -> None: ...
def compiled() -> list[str]: ...
def runnable() -> list[str]: ...
def isa() -> str: ...
def objection(name: str) -> str: ...
def multiplies_pairs() -> bool: ...
def panel_rows() -> int: ...
def use(name: str) -> bool: ...
def open_pool(library: str) -> bool: ...
def threads() -> int: ...
def compiler() -> str: ...
def fma_probe(rounds: int, bfloat16: bool = False) -> float: ...
def read_probe(blocks: Sequence[tuple[int, int]], threads: int) -> None: ...
