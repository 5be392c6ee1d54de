"""ggml, the library below llama.cpp, called through its C interface."""

from __future__ import annotations

import ctypes
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from cases import Case, Inputs
from install import HOME, PIP, Run, ensure
from peers import additive
from torch import Tensor

from .engine import FP16, FP32, Engine, Place, Prepared

KINDS = {FP32: 0, FP16: 1}  # enum ggml_type
POOL = 1 << 20  # bytes for the descriptions of tensors and graphs


class InitParams(ctypes.Structure):
    """struct ggml_init_params."""

    _fields_ = (("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


CMAKE = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_CCACHE=OFF",
    *(f"-DLLAMA_BUILD_{part}=OFF" for part in ("COMMON", "EXAMPLES", "SERVER", "TESTS", "TOOLS")),
)

POINTER, SIZE, NUMBER = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_float
BASE = {  # function of libggml-base: result, arguments
    "ggml_version": (ctypes.c_char_p,),
    "ggml_init": (POINTER, InitParams),
    "ggml_free": (None, POINTER),
    "ggml_new_tensor_4d": (POINTER, POINTER, ctypes.c_int, *[ctypes.c_int64] * 4),
    "ggml_flash_attn_ext": (POINTER, *[POINTER] * 5, *[NUMBER] * 3),
    "ggml_new_graph": (POINTER, POINTER),
    "ggml_build_forward_expand": (None, POINTER, POINTER),
    "ggml_backend_cpu_buffer_from_ptr": (POINTER, POINTER, SIZE),
    "ggml_backend_tensor_alloc": (ctypes.c_int, POINTER, POINTER, POINTER),
    "ggml_backend_graph_plan_create": (POINTER, POINTER, POINTER),
    "ggml_backend_graph_plan_compute": (ctypes.c_int, POINTER, POINTER),
}
CPU = {
    "ggml_backend_cpu_init": (POINTER,),
    "ggml_backend_cpu_set_n_threads": (None, POINTER, ctypes.c_int),
}


def build(home: Path, pins: Sequence[str], run: Run) -> None:
    """Compiles ggml's CPU library from the source distribution of llama-cpp-python."""
    source = home / "source"
    run(*PIP, "download", "--no-deps", "--no-binary", "llama-cpp-python", "-d", str(source), *pins)
    (archive,) = source.glob("*.tar.gz")
    shutil.unpack_archive(archive, source, filter="data")
    (project,) = source.glob("*/vendor/llama.cpp")
    tool = str(Path(sys.executable).with_name("cmake"))
    run(tool, "-S", str(project), "-B", str(source / "build"), *CMAKE)
    run(tool, "--build", str(source / "build"), "--target", "ggml-cpu", "--parallel", "2")
    for found in (source / "build" / "bin").glob("libggml-*.so.0"):
        shutil.copy(found, home)
    shutil.rmtree(source)


def library(path: Path, functions: dict[str, tuple[Any, ...]]) -> Any:
    """Loads a shared library and declares the types of its functions."""
    found = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    for name, (result, *arguments) in functions.items():
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    return found


class Ggml(Engine):
    name = folder = "ggml"
    title = "ggml"
    packages = ("llama-cpp-python",)
    dtypes = (FP32, FP16)
    slack = 3.0  # a decode step adds float16 values in float16
    note = (
        "`ggml_flash_attn_ext` by ctypes, from the sources of llama-cpp-python, compiled for this CPU; q "
        "and the result are float32, k and v have the dtype of the case, masks are float16 tensors. A decode "
        "step adds float16 values in float16, so its errors may be three times as large."
    )

    def __init__(self, threads: int, place: Place) -> None:
        super().__init__(threads, place)
        self.base = library(HOME / self.folder / "libggml-base.so.0", BASE)
        cpu = library(HOME / self.folder / "libggml-cpu.so.0", CPU)
        self.backend = cpu.ggml_backend_cpu_init()
        cpu.ggml_backend_cpu_set_n_threads(self.backend, threads)
        self.context: Any = None

    @classmethod
    def install(cls) -> str:
        return ensure(cls.folder, cls.packages, build)

    def version(self) -> str:
        return str(self.base.ggml_version().decode())

    def prepare(self, case: Case, inputs: Inputs) -> Prepared:
        q, k, v, _ = inputs
        self.base.ggml_free(self.context)
        self.context = self.base.ggml_init(InitParams(POOL, None, True))
        out = self.place(torch.zeros(case.B, case.Lq, case.Hq, case.Dv))
        given = map(self.tensor, (self.place(q.float()), k, v, self.mask(case)))
        node = self.base.ggml_flash_attn_ext(self.context, *given, case.D**-0.5, 0.0, 0.0)
        self.put(node, out)
        graph = self.base.ggml_new_graph(self.context)
        self.base.ggml_build_forward_expand(graph, node)
        plan = self.base.ggml_backend_graph_plan_create(self.backend, graph)
        compute, backend = self.base.ggml_backend_graph_plan_compute, self.backend
        return Prepared(lambda: compute(backend, plan), lambda _: out.transpose(1, 2))

    def mask(self, case: Case) -> Tensor | None:
        """Returns the mask as a float16 tensor (B or 1, 1, Lq, Lk)."""
        mask = additive(case, {}, case.make_mask())
        return None if mask is None else self.place(mask.half().view(-1, 1, case.Lq, case.Lk))

    def tensor(self, x: Tensor | None) -> Any:
        """Returns a ggml tensor that shares memory with x. ggml lists sizes from the last dim."""
        if x is None:
            return None
        made = self.base.ggml_new_tensor_4d(self.context, KINDS[x.dtype], *reversed(x.shape))
        self.put(made, x)
        return made

    def put(self, tensor: Any, x: Tensor) -> None:
        """Makes x the memory of a ggml tensor."""
        buffer = self.base.ggml_backend_cpu_buffer_from_ptr(x.data_ptr(), x.nbytes)
        self.base.ggml_backend_tensor_alloc(buffer, tensor, x.data_ptr())
