from collections.abc import Sequence

class Attention:
    def __init__(
        self,
        numbers: Sequence[int],
        code: Sequence[int],
        scale: float,
        softcap: float,
        drop_below: int,
        keep_scale: float,
    ) -> None: ...
    def forward(self, arg0: int, arg1: int, arg2: int, arg3: int, arg4: int, arg5: int, /) -> None: ...
    def forward_with(
        self,
        arg0: int,
        arg1: int,
        arg2: int,
        arg3: int,
        arg4: int,
        arg5: int,
        arg6: Sequence[int],
        arg7: Sequence[int],
        /,
    ) -> None: ...
    def decode(self, arg0: Sequence[int], arg1: Sequence[int], arg2: Sequence[int], /) -> None: ...
    def decodes(self) -> bool: ...
    def backward(
        self,
        arg0: int,
        arg1: int,
        arg2: int,
        arg3: int,
        arg4: Sequence[int],
        arg5: Sequence[int],
        arg6: Sequence[int],
        /,
    ) -> None: ...
    def evidence(
        self,
        arg0: int,
        arg1: int,
        arg2: int,
        arg3: Sequence[int],
        arg4: Sequence[int],
        arg5: Sequence[int],
        /,
    ) -> None: ...
    def cost(
        self, arg0: int, arg1: Sequence[int], arg2: Sequence[int], /
    ) -> tuple[int, int, int, int, int, int, int, int]: ...
    def runs(
        self,
        arg0: int,
        arg1: int,
        arg2: int,
        arg3: int,
        arg4: int,
        arg5: int,
        arg6: Sequence[int],
        arg7: Sequence[int],
        /,
    ) -> list[tuple[int, int, int]]: ...

def write(arg0: Sequence[int], arg1: Sequence[int], arg2: Sequence[int], /) -> None: ...

LINEAR_SEGMENT: int = 512

class Linear:
    def __init__(self, numbers: Sequence[int], scale: float) -> None: ...
    def forward(self, arg: Sequence[int], /) -> None: ...
    def backward(self, arg0: Sequence[int], arg1: Sequence[int], /) -> None: ...

def compiled() -> list[str]: ...
def runnable() -> list[str]: ...
def isa() -> str: ...
def use(arg: str, /) -> bool: ...
def open_pool(arg: str, /) -> bool: ...
def threads() -> int: ...
def compiler() -> str: ...
def fma_probe(arg: int, /) -> float: ...
def read_probe(arg0: int, arg1: int, /) -> float: ...
