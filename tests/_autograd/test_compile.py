"""torch.compile, torch.export and opcheck of the operators."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim, export
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

import regard
from regard import masks as M
from regard._autograd import ops as _ops
from regard._call.make import make
from regard._call.spec import Options
from regard._tools.listeners import listening
from regard.scores import Alibi, RelativeBias
from support import HAVE_CORE, assert_close
from support.differentiable import Case, cases

pytestmark = [
    pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built"),
    # raised by PyTorch while it compiles or exports
    pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled"),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec. is deprecated:FutureWarning"),
]
Function = Callable[..., Any]


@pytest.fixture(autouse=True)
def clear_caches() -> Iterator[None]:
    """Clears compiled code and disables disk caches, whose keys do not include operator schemas."""
    torch._dynamo.reset()
    with torch.compiler.config.patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()


# opcheck: schemas, derivatives and shapes, also under AOT autograd with symbolic sizes

QUICK = ("causal", "everything")
SAMPLES = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.full)
    for name in cases()
    if not name.startswith("rank")
]


def arguments_of(case: Case, dtype: torch.dtype = torch.float64) -> tuple[Any, ...]:
    """Returns the operators' arguments for a case; tensors that require grad are leaves."""
    q, k, v, *parameters = (x.to(dtype).requires_grad_() for x in case.inputs)
    args = _ops.arguments(make(q, k, v, Options(**case.options(*parameters))))
    return tuple(x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in args)


def check_operators(args: tuple[Any, ...]) -> None:
    opcheck(_ops.attention_forward, args)
    opcheck(_ops.attention_forward, (*args[:-1], False))
    with torch.no_grad():
        out, lse, stats, residual = _ops.forward(*args)
    dout = torch.randn_like(out.transpose(1, 2).contiguous().transpose(1, 2)).requires_grad_()
    dlse, needs_grad = torch.randn_like(lse), [x is not None for x in args[: _ops.INPUTS]]
    opcheck(_ops.attention_backward, (*args, out, stats, residual, dout, dlse, needs_grad))
    only_k = [index == 1 for index in range(_ops.INPUTS)]
    opcheck(_ops.attention_backward, (*args, out, stats, residual, dout, None, only_k))


@pytest.mark.parametrize("name", SAMPLES)
def test_opcheck(name: str) -> None:
    check_operators(arguments_of(cases()[name]))


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["strided", "everything"])
def test_opcheck_of_dtypes(name: str, dtype: torch.dtype) -> None:
    check_operators(arguments_of(cases(dtype)[name], dtype))


@pytest.mark.full
@pytest.mark.parametrize("name", ["plain", "everything"])
def test_opcheck_of_second_derivatives(name: str) -> None:
    """Second derivatives raise when differentiated, so opcheck runs without AOT autograd."""
    args = tuple(x.detach() if isinstance(x, Tensor) else x for x in arguments_of(cases()[name]))
    tangents = [None if x is None else torch.randn_like(x) for x in args[: _ops.INPUTS]]
    opcheck(_ops.attention_jvp, (*args, *tangents))
    out, lse, *_ = _ops.forward(*args)
    opcheck(_ops.attention_double_backward, (*args, torch.randn_like(out), torch.randn_like(lse), *tangents))


# torch.compile

LENGTHS = (9, 17, 33, 12, 40)
HQ, HKV, D, DV = 4, 2, 8, 6


def inputs(L: int, B: int = 3) -> list[Tensor]:
    sizes = ((HQ, D), (HKV, D), (HKV, DV))
    return [torch.randn(B, H, L, width, requires_grad=True) for H, width in sizes]


def with_captured_lengths(lengths: Tensor) -> Function:
    mask = M.Lengths(lengths) & M.Causal()
    return lambda q, k, v: regard.attention(q, k, v, mask=mask)


def in_bfloat16(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return regard.attention(q, k, v, mask=M.Causal())


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.repeat_interleave(HQ // HKV, 1).mT


def in_projection_layout(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Computes attention of inputs that are stored as (B, L, H, D), as after a projection."""
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    return regard.attention(q, k, v).transpose(1, 2).flatten(2)


def positions(q: Tensor) -> Tensor:
    return torch.arange(q.shape[2], device=q.device)


n, seed = torch.tensor([3, 9, 5]), torch.tensor(7)
slopes, table, sink = torch.rand(HQ), torch.randn(8, HQ), torch.randn(HQ)
window = M.Window(5, 0) | M.Prefix(2)
alibi = Alibi(slopes)
COMPILED: dict[str, tuple[Function, tuple[Tensor, ...]]] = {
    "plain": (regard.attention, ()),
    "mask outside": (lambda q, k, v: regard.attention(q, k, v, mask=window, return_lse=True), ()),
    "mask inside": (lambda q, k, v: regard.attention(q, k, v, mask=M.Causal() & M.Window(5, 0)), ()),
    "lengths outside": (with_captured_lengths(n), ()),
    "lengths inside": (lambda q, k, v, n: regard.attention(q, k, v, mask=M.Lengths(n) & M.Causal()), (n,)),
    "documents": (lambda q, k, v: regard.attention(q, k, v, mask=M.Documents(positions(q) // 4)), ()),
    "global": (lambda q, k, v, n: regard.attention(q, k, v, mask=M.Global(n) | M.Window(2, 0)), (n,)),
    "patterns": (lambda q, k, v: regard.attention(q, k, v, mask=M.bigbird(4)), ()),
    "bool tensor": (lambda q, k, v: regard.attention(q, k, v, mask=scores_of(q, k) > 0), ()),
    "per head": (
        lambda q, k, v: regard.attention(q, k, v, mask=M.PerHead([M.Causal(), M.Window(3, 0)] * 2)),
        (),
    ),
    "offsets": (lambda q, k, v, n: regard.attention(q, k, v, mask=M.Causal(), offset=n), (n,)),
    "from 0": (lambda q, k, v: regard.attention(q, k, v, mask=M.Causal(), offset=0), ()),
    "bias": (lambda q, k, v: regard.attention(q, k, v, bias=scores_of(q, k)), ()),
    "alibi": (lambda q, k, v, s: regard.attention(q, k, v, bias=Alibi(s)), (slopes,)),
    "alibi outside": (lambda q, k, v: regard.attention(q, k, v, bias=alibi), ()),
    "relative": (
        lambda q, k, v, t: regard.attention(q, k, v, bias=RelativeBias(t, max_distance=9)),
        (table,),
    ),
    "sink": (lambda q, k, v, s: regard.attention(q, k, v, sink=s), (sink,)),
    "numbers": (lambda q, k, v: regard.attention(q, k, v, softcap=3.0, scale=0.2), ()),
    "dropout": (lambda q, k, v: regard.attention(q, k, v, dropout=0.3, seed=5), ()),
    "seed tensor": (lambda q, k, v, s: regard.attention(q, k, v, dropout=0.3, seed=s), (seed,)),
    "layout": (in_projection_layout, ()),
    "rank 3": (lambda q, k, v: regard.attention(q[0], k[0], v[0]), ()),
    "rank 5": (lambda q, k, v: regard.attention(q[None], k[None], v[None]), ()),
    "autocast": (in_bfloat16, ()),
    "torch": (lambda q, k, v: regard.attention(q, k, v, mask=M.Causal(), impl="torch"), ()),
}
QUICK_COMPILED = ("mask outside", "lengths inside", "layout", "relative")


def results(f: Function, x: list[Tensor], parameters: tuple[Tensor, ...]) -> list[Tensor]:
    """Returns the outputs of f, then the gradients of the inputs that require grad."""
    parameters = tuple(y.clone().requires_grad_() if y.is_floating_point() else y for y in parameters)
    outputs = f(*x, *parameters)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    loss = sum((y.square().sum() for y in outputs), torch.zeros(()))
    leaves = [y for y in (*x, *parameters) if y.requires_grad]
    return [*outputs, *torch.autograd.grad(loss, leaves)]


def check_compiled(name: str, backend: str, lengths: tuple[int, ...]) -> None:
    f, parameters = COMPILED[name]
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(f, fullgraph=True, backend=counter)
    limit = 1e-2 if name == "autocast" else 1e-6
    for L in lengths:
        x = inputs(L)
        for got, want in zip(results(compiled, x, parameters), results(f, x, parameters), strict=True):
            assert_close(got, want, rtol=limit, atol=limit)
            assert not want.requires_grad or got.stride() == want.stride()
    assert counter.frame_count <= 2, "a new length is no reason to compile again"


@pytest.mark.parametrize("name", QUICK_COMPILED)
def test_compiled_for_all_lengths(name: str) -> None:
    check_compiled(name, "aot_eager", LENGTHS)


@pytest.mark.full
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_by_inductor_for_all_lengths(name: str) -> None:
    check_compiled(name, "inductor", LENGTHS)


def test_compiled_by_inductor() -> None:
    f = COMPILED["mask outside"][0]
    x = inputs(12)
    compiled = torch.compile(lambda *x: f(*(y * 2 for y in x))[0].relu(), fullgraph=True)
    for got, want in zip(
        results(compiled, x, ()), results(lambda *x: f(*(y * 2 for y in x))[0].relu(), x, ()), strict=True
    ):
        assert_close(got, want)


def test_all_sizes_dynamic() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(regard.attention, fullgraph=True, dynamic=True, backend=counter)
    for L, B in ((9, 3), (17, 5), (33, 7), (15, 12)):
        x = inputs(L, B)
        assert_close(compiled(*x), regard.attention(*x))
    assert counter.frame_count <= 2


def test_marked_lengths_compile_once() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(with_captured_lengths(n), fullgraph=True, backend=counter)
    for L in LENGTHS:
        x = inputs(L)
        for y in x:
            torch._dynamo.mark_dynamic(y, 2)
        assert_close(compiled(*x), with_captured_lengths(n)(*x))
    assert counter.frame_count == 1


@pytest.mark.parametrize("what", ["window", "offset"])
def test_integers_do_not_become_constants(what: str) -> None:
    def call(x: Tensor, i: int) -> Tensor:
        mask, offset = (M.Window(i, 0), None) if what == "window" else (M.Causal(), i)
        return regard.attention(x, x, x, mask=mask, offset=offset)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, backend=counter)
    x = torch.randn(1, 2, 9, 4)
    for i in (2, 3, 4, 5, 6):
        assert_close(compiled(x, i), call(x, i))
    assert counter.frame_count <= 2


def test_decode_steps_compile_at_most_twice() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(regard.attention, fullgraph=True, backend=counter)
    q = torch.randn(2, HQ, 1, D)
    for L in (5, 6, 7, 8):
        k = torch.randn(2, HKV, L, D)
        assert torch.equal(compiled(q, k, k), regard.attention(q, k, k))
    assert counter.frame_count <= 2


def test_dropout_draws_new_seeds_and_follows_manual_seed() -> None:
    compiled = torch.compile(
        lambda q, k, v: regard.attention(q, k, v, dropout=0.5), fullgraph=True, backend="aot_eager"
    )
    x = inputs(64)
    assert not torch.equal(compiled(*x), compiled(*x))
    torch.manual_seed(1)
    first = compiled(*x)
    torch.manual_seed(1)
    assert torch.equal(compiled(*x), first)
    torch.manual_seed(1)
    assert torch.equal(regard.attention(*x, dropout=0.5), first)


def test_checkpoint_inside_compiled_code() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return checkpoint(lambda *x: regard.attention(*x, mask=M.Causal()), q, k, v, use_reentrant=False)

    x = inputs(9)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for got, want in zip(results(compiled, x, ()), results(call, x, ()), strict=True):
        assert_close(got, want)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # from PyTorch
def test_a_backward_pass_compiled_on_its_own() -> None:
    x = inputs(9)
    expected = torch.autograd.grad(regard.attention(*x, mask=M.Causal()).square().sum(), x)
    with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        regard.attention(*x, mask=M.Causal()).square().sum().backward()
    for leaf, want in zip(x, expected, strict=True):
        assert_close(leaf.grad, want)


def test_vmap_inside_compiled_code() -> None:
    mapped = torch.func.vmap(lambda q, k, v: regard.attention(q, k, v, mask=M.Causal()))
    x = [y.detach() for y in inputs(9)]
    compiled = torch.compile(lambda *x: mapped(*x), fullgraph=True, backend="aot_eager")
    assert_close(compiled(*x), mapped(*x))


def test_torch_func_inside_compiled_code_raises() -> None:
    gradient = torch.func.grad(lambda q, k, v: regard.attention(q, k, v).sum())
    compiled = torch.compile(lambda *x: gradient(*x), fullgraph=True, backend="aot_eager")
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match=r"call regard\.attention under torch\.func outside"
    ):
        compiled(*(y.detach() for y in inputs(9)))


@pytest.mark.parametrize("fullgraph", [False, True])
def test_wrong_arguments_raise_the_usual_errors(fullgraph: bool) -> None:
    q, k, v = (x.detach() for x in inputs(9))
    compiled = torch.compile(regard.attention, backend="aot_eager", fullgraph=fullgraph)
    error = torch._dynamo.exc.Unsupported if fullgraph else ValueError
    with pytest.raises(error, match="k: expected last dim D = 8 as in q, got 7"):
        compiled(q, k[..., :7], v)


def test_unchecked_lengths_beyond_the_keys_are_harmless() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, n: Tensor) -> Tensor:
        return regard.attention(q, k, v, mask=M.Lengths(n))

    x = inputs(9)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*x, torch.tensor([3, 99, 9])), call(*x, torch.tensor([3, 9, 9])))


# torch.export


class Layer(torch.nn.Module):
    def __init__(self, mask: M.Mask) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(16, 48)
        self.sink = torch.nn.Parameter(torch.randn(4))
        self.mask = mask

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        B, L, _ = x.shape
        q, k, v = self.inner(x).view(B, L, 3, 4, 4).permute(2, 0, 3, 1, 4)
        out = regard.attention(q, k, v, mask=self.mask & M.Lengths(n), sink=self.sink)
        return out.transpose(1, 2).flatten(2)


X, N = torch.randn(3, 9, 16), torch.tensor([4, 9, 2])
SIZES = {"static": None, "dynamic": {"x": {0: Dim("B"), 1: Dim("L", min=2)}, "n": {0: Dim("B")}}}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_export(sizes: str, strict: bool) -> None:
    layer = Layer(M.Causal())
    program = export(layer, (X, N), dynamic_shapes=SIZES[sizes], strict=strict)
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count("regard.attention_forward.default") == 1
    samples = [(X, N)] if sizes == "static" else [(X, N), (torch.randn(5, 31, 16), torch.arange(5) * 7)]
    for sample in samples:
        assert_close(program.module()(*sample), layer(*sample))


def test_an_exported_program_trains_and_is_saved() -> None:
    layer = Layer(M.Window(4, 0) | M.Lengths(torch.tensor([1, 2, 3])))
    program = export(layer, (X, N))
    exported = program.module()
    exported(X, N).square().sum().backward()
    layer(X, N).square().sum().backward()
    exported_parameters = dict(exported.named_parameters())
    for name, parameter in layer.named_parameters():
        assert_close(exported_parameters[name].grad, parameter.grad)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    assert_close(torch.export.load(file).module()(X, N), layer(X, N))


def test_evidence_breaks_the_graph() -> None:
    """torch.compile breaks the graph at `evidence`, which runs uncompiled."""

    def model(x: Tensor) -> Tensor:
        y = 2 * x
        (mass,) = regard.evidence(y, x, None, regard.ColumnMass(), mask=M.Causal())
        return mass + x.sum()

    x = torch.randn(1, 2, 9, 8)
    counter = CompileCounterWithBackend("eager")
    assert torch.equal(torch.compile(model, backend=counter)(x), model(x))
    assert counter.frame_count >= 2


def test_listeners_run_uncompiled() -> None:
    """A compiled call notifies listeners at a graph break, and their code is not traced either."""
    traced: list[bool] = []

    def listen(q: Tensor, k: Tensor, options: dict[str, Any]) -> None:
        traced.append(torch.compiler.is_compiling() or type(q) is not Tensor)

    def model(x: Tensor) -> Tensor:
        return regard.attention(2 * x, x, x) + 1

    x, counter = torch.randn(1, 2, 9, 8), CompileCounterWithBackend("eager")
    with listening(listen):
        actual = torch.compile(model, backend=counter)(x)
    assert_close(actual, model(x))
    assert traced == [False]
    assert counter.frame_count >= 2
