"""Tests of mask drawings: text, images and HTML."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
import torch

from regard import masks as M


def body(text: str) -> list[str]:
    """Returns the rows of the drawn matrix without their labels."""
    lines = (line.lstrip() for line in text.splitlines()[3:])
    return [line.split(" ", 1)[1] for line in lines if line[:1].isdigit()]


def test_small_masks_draw_one_cell_per_pair() -> None:
    text = M.Causal().draw(3, 3)
    assert text.splitlines()[0] == "Causal()"
    assert text.splitlines()[1] == "3 queries x 3 keys, offset 0, 66.7 % may attend"
    assert body(text) == ["██· ·", "████·", "██████"]


@pytest.mark.parametrize("L", [1, 3, 17, 63, 65, 1000])
@pytest.mark.parametrize("width", [20, 79])
def test_drawings_fit_the_width(L: int, width: int) -> None:
    lines = M.Window(3, 2).draw(L, L, width=width).splitlines()
    rows = [line for line in lines[3:] if "pairs" not in line]
    assert max(map(len, rows)) <= width
    assert len(rows) <= width // 2


def test_large_masks_draw_many_pairs_per_cell() -> None:
    text = M.Causal().draw(400, 400, width=24)
    rows = body(text)
    assert rows[0] == "▒▒" + "· " * 8 + "·"
    assert rows[-1].startswith("██")
    assert "each cell is 40 x 40 pairs" in text
    single = M.Global([0]).draw(400, 400, width=24)
    assert "· " not in body(single)[0], "one pair in a cell still shows"


def test_rows_are_labelled_by_position() -> None:
    lines = M.Causal().draw(2, 12).splitlines()
    assert [line.split()[0] for line in lines[3:]] == ["10", "11"]
    assert lines[2].split() == ["0", "5", "10"]


@pytest.mark.parametrize(
    ("mask", "sizes"),
    [
        (M.Causal(), "32 queries x 32 keys"),
        (M.Lengths([3, 50]), "50 queries x 50 keys"),
        (M.Documents([0, 1, 1]) & M.Causal(), "3 queries x 3 keys"),
        (M.Documents([0, 1], [0, 1, 1]), "2 queries x 3 keys"),
        (M.Dense(torch.ones(2, 5).bool()), "2 queries x 5 keys"),
        (M.Blocks(torch.ones(2, 3).bool(), 4), "8 queries x 12 keys"),
    ],
)
def test_default_sizes_come_from_the_mask(mask: M.Mask, sizes: str) -> None:
    assert sizes in mask.draw()


def test_draw_one_head_and_sample() -> None:
    mask = M.PerHead([M.Causal(), M.Prefix(1)]) & M.Lengths([2, 3])
    assert body(mask.draw(3, 3, head=1, sample=0)) == ["██· ·"] * 3
    assert "(head 1) (sample 0)" in mask.draw(3, 3, head=1)
    assert body(M.Causal().draw(1, 4, torch.tensor([0, 2]), sample=1)) == ["██████·"]
    with pytest.raises(ValueError, match="head: expected 0 to 1, got 2"):
        mask.draw(3, 3, head=2)
    with pytest.raises(ValueError, match="sample: expected 0 to 1, got -1"):
        mask.draw(3, 3, sample=-1)
    with pytest.raises(ValueError, match="Lq and Lk: expected at least 1 to draw, got 0"):
        mask.draw(0, 3)


def test_show_prints(capsys: pytest.CaptureFixture[str]) -> None:
    M.Causal().show(4, 4)
    assert capsys.readouterr().out == M.Causal().draw(4, 4) + "\n"
    file = io.StringIO()
    M.Causal().show(4, 4, file=file)
    assert file.getvalue() == M.Causal().draw(4, 4) + "\n"


def test_images(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "mask.png"
    (M.Window(3, 3) | M.Global([0, 9])).show(20, 24, file=path)
    assert path.read_bytes().startswith(b"\x89PNG")
    figure = M.Causal().image(None, 200, 300)
    assert "200 queries x 300 keys" in figure.axes[0].get_title(loc="left")


def test_images_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install regard\[plot\]"):
        M.Causal().image()


def test_html_contains_an_svg() -> None:
    html = (M.Window(1, 0) | M.Prefix(1))._repr_html_()
    assert "<svg" in html
    assert "32 queries x 32 keys" in html
    assert "Window(1, 0) | Prefix(1)" in html
    assert "&lt;int64 (9,)&gt;" in M.Documents(torch.arange(9))._repr_html_()
