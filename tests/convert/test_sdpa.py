"""`convert.sdpa`: calls of PyTorch's function inside models run on Regard, with the same results."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.checkpoint import CheckpointError, checkpoint

import regard
from regard import convert
from regard._tools.listeners import listening
from regard.convert import _sdpa
from support import HAVE_CORE, assert_close

pytestmark = pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built")


@pytest.fixture
def calls() -> Iterator[list[tuple[int, ...]]]:
    """A list of the query shapes of all calls of `regard.attention`."""
    shapes: list[tuple[int, ...]] = []
    with listening(lambda q, k, options: shapes.append(tuple(q.shape))):
        yield shapes


class SelfAttention(nn.Module):
    """Attention of a vision transformer, as in timm."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(*qkv.unbind(0))
        return self.proj(out.transpose(1, 2).reshape(B, N, C))


class Layer(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim), SelfAttention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    def __init__(self, dim: int = 48, heads: int = 4, depth: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, 8, 8)
        self.cls = nn.Parameter(torch.randn(1, 1, dim))
        self.positions = nn.Parameter(torch.randn(1, 17, dim))
        self.layers = nn.Sequential(*[Layer(dim, heads) for _ in range(depth)])
        self.head = nn.Linear(dim, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.layers(x)[:, 0])


def run(model: Any, *args: Any, **kwargs: Any) -> list[Tensor]:
    """Returns the output of a model and the gradients of its parameters."""
    out = model(*args, **kwargs)
    loss = (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum()
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True)
    return [out, *grads]


def assert_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    size = max(1.0, *(float(x.abs().max()) for x in expected[1:]))
    assert_close(actual[0], expected[0], rtol=1e-5, atol=1e-5)
    for a, b in zip(actual[1:], expected[1:], strict=True):
        assert_close(a, b, rtol=1e-5, atol=1e-5 * size)


def test_vision_transformer(calls: list[tuple[int, ...]]) -> None:
    model, image = VisionTransformer(), torch.randn(2, 3, 32, 32)
    expected = run(model, image)
    assert not calls
    with convert.sdpa():
        actual = run(model, image)
    assert calls == [(2, 4, 17, 12)] * 3
    assert_equal(actual, expected)
    run(model, image)
    assert len(calls) == 3


def test_capture_records_the_calls() -> None:
    model = VisionTransformer().eval()
    with convert.sdpa(), regard.see.capture(model) as seen:
        model(torch.randn(1, 3, 32, 32))
    assert [layer.name for layer in seen] == [f"layers.{i}.attn" for i in range(3)]


@pytest.mark.parametrize("name", ["decoder", "encoder", "grouped", "alibi", "cross"])
def test_x_transformers(name: str, calls: list[tuple[int, ...]]) -> None:
    x_transformers = pytest.importorskip("x_transformers")
    sizes: dict[str, Any] = {"dim": 32, "depth": 2, "heads": 4, "attn_dim_head": 8, "attn_flash": True}
    x, inputs = torch.randint(50, (2, 21)), {}
    if name == "encoder":
        layers = x_transformers.Encoder(**sizes)
        inputs = {"mask": torch.arange(21) < torch.tensor([[21], [15]])}
    elif name == "cross":
        layers = x_transformers.Decoder(**sizes, cross_attend=True)
        inputs = {"context": torch.randn(2, 9, 32)}
    else:
        more: dict[str, dict[str, Any]] = {
            "decoder": {"rotary_pos_emb": True},
            "grouped": {"attn_kv_heads": 2},
        }
        layers = x_transformers.Decoder(**sizes, **more.get(name, {"alibi_pos_bias": True}))
    model = x_transformers.TransformerWrapper(num_tokens=50, max_seq_len=32, attn_layers=layers)
    expected = run(model, x, **inputs)
    with convert.sdpa():
        actual = run(model, x, **inputs)
    assert len(calls) == (4 if name == "cross" else 2)
    assert_equal(actual, expected)


@pytest.mark.parametrize("training", [False, True])
def test_multihead_attention_inside_pytorch(training: bool, calls: list[tuple[int, ...]]) -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2).train(training), torch.randn(2, 9, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(9)
    expected = run(model, x, mask, is_causal=True)
    with convert.sdpa():
        assert_equal(run(model, x, mask, is_causal=True), expected)
    assert len(calls) == 2


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_mask_and_is_causal_both_apply(kind: str) -> None:
    q, k = torch.randn(2, 3, 6, 8), torch.randn(2, 3, 6, 8)
    mask = torch.rand(2, 1, 1, 6) > 0.3 if kind == "bool" else torch.randn(6, 6)
    expected = F.scaled_dot_product_attention(q, k, k, mask, is_causal=True)
    with convert.sdpa():
        actual = F.scaled_dot_product_attention(q, k, k, mask, is_causal=True)
    assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [causal_lower_right, causal_upper_left])
def test_causal_bias(make: Any, calls: list[tuple[int, ...]]) -> None:
    q, k = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 6, 8)
    expected = F.scaled_dot_product_attention(q, k, k, make(4, 6))
    with convert.sdpa():
        assert_close(F.scaled_dot_product_attention(q, k, k, make(4, 6)), expected, rtol=1e-5, atol=1e-6)
    assert len(calls) == 1


def test_calls_that_regard_refuses_raise() -> None:
    q = torch.randn(1, 2, 3, 4, dtype=torch.cfloat)
    with convert.sdpa(), pytest.raises(TypeError, match="q: expected dtype"):
        F.scaled_dot_product_attention(q, q, q)


@pytest.mark.parametrize("by_grad", [False, True])
def test_checkpoints_are_recomputed_by_regard(by_grad: bool, calls: list[tuple[int, ...]]) -> None:
    model, x = SelfAttention(16, 4), torch.randn(1, 5, 16)
    with convert.sdpa():
        out = checkpoint(model, x, use_reentrant=False)
        if by_grad:
            torch.autograd.grad(out.sum(), list(model.parameters()))
        else:
            out.sum().backward()
        assert len(calls) == 2
        out = checkpoint(model, x, use_reentrant=False)
    with pytest.raises(CheckpointError):  # recomputed by PyTorch, which saves other tensors
        out.sum().backward()


def test_autocast() -> None:
    model, image = VisionTransformer(), torch.randn(2, 3, 32, 32)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(image)
        with convert.sdpa():
            actual = model(image)
    assert actual.dtype is expected.dtype
    assert_close(actual, expected, rtol=3e-2, atol=3e-2)


def test_use_sdpa(calls: list[tuple[int, ...]]) -> None:
    q = torch.randn(1, 2, 3, 4)

    class Other(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **kwargs or {})

    try:
        with Other():
            convert.use_sdpa()
            convert.use_sdpa()
        assert len(_get_current_function_mode_stack()) == 1
        F.scaled_dot_product_attention(q, q, q)
        assert len(calls) == 1
        thread = threading.Thread(target=F.scaled_dot_product_attention, args=(q, q, q))
        thread.start()
        thread.join()
        assert len(calls) == 1
        torch.set_default_device("meta")
        convert.use_sdpa()
        torch.set_default_device(None)
        assert torch.ones(1).device.type == "cpu"
    finally:
        torch.set_default_device(None)
        convert.use_sdpa(False)
    assert len(_get_current_function_mode_stack()) == 0
    F.scaled_dot_product_attention(q, q, q)
    assert len(calls) == 1


def test_verify_compares_with_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    model, image = VisionTransformer(), torch.randn(2, 3, 32, 32)
    original = _sdpa.scaled_dot_product_attention
    monkeypatch.setattr(_sdpa, "scaled_dot_product_attention", lambda *a, **o: original(*a, **o) * 1.01)
    with convert.sdpa():
        differences = convert.verify(model, image)
        assert len(_get_current_function_mode_stack()) == 1
    assert differences.output > 1e-4 > differences.plain_output
    assert differences.gradient > 1e-4 > differences.plain_gradient


def recording(targets: list[str]) -> Any:
    """Returns a backend of `torch.compile` that appends the functions of each graph to a list."""

    def backend(graph: Any, inputs: Any) -> Any:
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    return backend


@pytest.mark.parametrize("inside", [False, True])
def test_compile(inside: bool) -> None:
    """`torch.compile` compiles the calls of Regard without a graph break."""
    model, image = VisionTransformer(depth=1), torch.randn(2, 3, 32, 32)

    def forward(x: Tensor) -> Tensor:
        with convert.sdpa():
            return model(x)

    expected = model(image)
    targets: list[str] = []
    compiled = torch.compile(forward if inside else model, backend=recording(targets), fullgraph=True)
    with nullcontext() if inside else convert.sdpa():
        actual = compiled(image)
    assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert any("regard" in target for target in targets)
    assert not any("scaled_dot_product" in target for target in targets)
    if not inside:  # compiled again outside of the block
        targets.clear()
        compiled(image)
        assert any("scaled_dot_product" in target for target in targets)


def test_compile_pytorch_layers() -> None:
    model, x = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True), torch.randn(2, 9, 16)
    expected = run(model, x)
    targets: list[str] = []
    with convert.sdpa():
        assert_equal(run(torch.compile(model, backend=recording(targets), fullgraph=True), x), expected)
    assert any("regard" in target for target in targets)
