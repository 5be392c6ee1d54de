"""The shapes of a layer: equal to those of tensors, drawn without overlap, printed by a command."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from regard import see
from regard.nn import Attention, LatentAttention
from regard.see._shapes import shapes_of

LAYERS: dict[str, Any] = {
    "plain": (lambda **o: Attention(24, 3, **o), 7, None),
    "grouped": (lambda **o: Attention(24, 6, kv_heads=2, head_dim=5, value_dim=11, **o), 7, None),
    "cross": (lambda **o: Attention(24, 2, kv_model=10, **o), 7, 13),
    "values": (lambda **o: Attention(24, 2, kv_model=10, value_model=17, **o), 7, 13),
    "no output": (lambda **o: Attention(24, 1, value_dim=5, out=False, **o), 7, None),
}


@pytest.mark.parametrize("name", LAYERS)
def test_shapes_are_those_of_tensors(name: str) -> None:
    make, n, m = LAYERS[name]
    layer, x = make(), torch.randn(n, 24)
    context = None if m is None else torch.randn(m, layer.kv_model)
    value = None if layer.value_model is None else torch.randn(m, layer.value_model)
    shapes = shapes_of(layer, n, m)
    (q, k, v), _ = layer.arguments(x, context=context, value=value)
    out, w = layer(x, context, value, return_weights=True)
    for head, matrices in shapes.heads.items():
        group = head * layer.kv_heads // layer.heads
        tensors = (q[head], k[group], w[head], v[group], w[head] @ v[group])
        assert [x[1:3] for x in matrices] == [tuple(t.shape) for t in tensors]
        assert matrices[1].name == f"K{'₁₂₃₄₅₆'[group]}"
    assert shapes.joined[-1][1:3] == tuple(out.shape)
    assert shapes.joined[0].columns == layer.heads * layer.value_dim
    given = [x, *([] if context is None else [context]), *([] if value is None else [value])]
    assert [x[1:3] for x in shapes.inputs] == [tuple(t.shape) for t in given]


def test_many_heads_are_shortened() -> None:
    assert list(shapes_of(Attention(24, 4), 3).heads) == [0, 1, 2, 3]
    assert list(shapes_of(Attention(35, 5), 3).heads) == [0, 1, 4]


def test_other_layers_raise() -> None:
    latent: Any = LatentAttention(24, 3, rank=4, nope_dim=4, rope_dim=4)
    with pytest.raises(TypeError, match=r"expected a regard\.nn\.Attention"):
        shapes_of(latent, 3)


SIZES = {"tiny": (1, 1, 1), "usual": (512, 8, 10), "long": (16, 4, 100_000), "wide": (16_384, 128, 131_072)}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dark", [False, True])
def test_labels_do_not_overlap(size: str, dark: bool, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.patches import Rectangle

    d_model, heads, length = SIZES[size]
    path = tmp_path / "shapes.png"
    figure = see.shapes(Attention(d_model, heads, device="meta"), length, dark=dark, path=path)
    assert path.stat().st_size > 5_000
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    texts = [text.get_window_extent(renderer) for text in figure.axes[0].texts if text.get_text()]
    matrices = [
        x.get_window_extent(renderer) for x in figure.axes[0].patches if isinstance(x, Rectangle) and x.fill
    ]
    assert len(texts) > 20
    for box, other in combinations(texts, 2):
        assert not box.overlaps(other)
    for box in texts:
        assert not any(box.overlaps(matrix) for matrix in matrices)
        assert box.x0 >= 0
        assert box.x1 <= figure.bbox.x1


def test_the_command_prints_and_draws(tmp_path: Path) -> None:
    pytest.importorskip("typer")
    pytest.importorskip("matplotlib")
    from typer.testing import CliRunner

    from regard.cli._app import app

    sizes = ["shapes", "--d-model", "24", "--heads", "6", "--kv-heads", "2", "--length", "7", "--d-k", "5"]
    printed = CliRunner().invoke(app, sizes)
    assert printed.exit_code == 0
    for text in ("the first two and the last", "W_Q₁: 24 × 5", "7 × 30", "W_O: 30 × 24"):
        assert text in printed.output
    path = tmp_path / "shapes.svg"
    assert CliRunner().invoke(app, [*sizes, "--dark", "--out", str(path)]).exit_code == 0
    assert "W_V₂: 24 × 5" in path.read_text(encoding="utf-8")
    wrong = CliRunner().invoke(app, ["shapes", "--d-model", "24", "--heads", "7"])
    assert wrong.exit_code == 1
