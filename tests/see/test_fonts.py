"""Fonts of labels. The fonts are those that matplotlib ships, whatever is installed."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from regard import see

pytest.importorskip("matplotlib")

import matplotlib
from matplotlib import font_manager
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

WATCH, CHINESE = (
    "⌚",
    "中文",
)  # STIXGeneral has the first, DejaVu Sans does not; no shipped font has the others


@pytest.fixture(autouse=True)
def shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = matplotlib.get_data_path()
    fonts = [font for font in font_manager.fontManager.ttflist if font.fname.startswith(folder)]
    monkeypatch.setattr(font_manager.fontManager, "ttflist", fonts)


def heatmap(*tokens: str, **options: Any) -> Figure:
    return see.heatmap(torch.eye(len(tokens)), tokens, **options)


def names(figure: Figure) -> list[Any]:
    return list(figure.axes[0].get_yticklabels())


def test_a_character_is_drawn_with_a_font_that_has_it() -> None:
    figure = heatmap("a", WATCH)
    assert [name.get_text() for name in names(figure)] == ["a", WATCH]
    assert all(name.get_fontfamily() == ["sans-serif", "STIXGeneral"] for name in names(figure))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib warns of a missing glyph
        FigureCanvasAgg(figure).draw()


def test_every_family_of_the_settings_is_asked_first() -> None:
    families = ["DejaVu Sans", "no such font", "STIXGeneral"]
    with matplotlib.rc_context({"font.sans-serif": families}):
        assert names(heatmap(WATCH))[0].get_fontfamily() == ["sans-serif", "STIXGeneral"]
    with matplotlib.rc_context({"font.family": ["DejaVu Sans", "STIXGeneral"]}):
        assert names(heatmap(WATCH))[0].get_fontfamily() == ["DejaVu Sans", "STIXGeneral"]


def test_a_font_that_was_removed_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matplotlib's list of fonts is a file, which may be older than the fonts."""
    removed = font_manager.FontEntry("removed.ttf", name="A Sans", style="normal", weight=400)
    fonts = [removed, *font_manager.fontManager.ttflist]
    monkeypatch.setattr(font_manager.fontManager, "ttflist", fonts)
    assert names(heatmap(WATCH))[0].get_fontfamily() == ["sans-serif", "STIXGeneral"]


def test_titles_have_the_fonts_of_their_characters() -> None:
    figure = see.token(torch.eye(2), 1, tokens=["a", WATCH])
    assert WATCH in figure.get_suptitle()
    assert "STIXGeneral" in figure._suptitle.get_fontfamily()
    axes = Figure().subplots()
    heatmap("a", "b", title=WATCH, ax=axes)
    assert "STIXGeneral" in axes.title.get_fontfamily() or "STIXGeneral" in axes._left_title.get_fontfamily()


@pytest.mark.parametrize(
    ("token", "font"),
    [
        (CHINESE, "Noto Sans CJK"),
        ("ひらがな", "Noto Sans CJK"),
        ("한국어", "Noto Sans CJK"),
        ("🦜", "Noto Emoji"),
        ("हिन्दी", "Noto Sans Devanagari"),
    ],
)
def test_a_missing_font_is_named(token: str, font: str) -> None:
    with pytest.warns(UserWarning, match=f"no installed font has .*{token[0]}.*install {font}"):
        figure = heatmap("a", token)
    escapes = token.encode("unicode_escape").decode()
    assert names(figure)[1].get_text() == (escapes if len(escapes) <= 18 else escapes[:17] + "…")


def test_characters_without_a_glyph_are_escaped() -> None:
    with pytest.warns(UserWarning, match="no installed font has 中, 文"):
        figure = heatmap("[CLS]", "$x$", CHINESE, "a_b^c", "<b>", "word" * 20, "\n", "Ġcat", "[SEP]")
    assert [name.get_text() for name in names(figure)] == [
        "[CLS]", "$x$", r"\u4e2d\u6587", "a_b^c", "<b>", "wordwordwordwordw…", "⏎", "·cat", "[SEP]",
    ]  # fmt: skip


def test_one_warning_for_a_picture_and_short_escapes() -> None:
    with pytest.warns(UserWarning, match="no installed font has 中, 文, 字, which") as caught:
        figure = heatmap("中文字中", title="文")
    assert [warning.filename for warning in caught] == [__file__]
    assert figure.get_suptitle() == r"\u6587"
    assert names(figure)[0].get_text() == r"\u4e2d\u6587\u5b57"[:17] + "…"


def test_right_to_left_tokens_and_joined_emoji_keep_their_characters() -> None:
    tokens = ["שלום", "سلام", "می‌روم", "😀", "😀‍♀️"]
    figure = heatmap(*tokens)
    assert [name.get_text() for name in names(figure)] == tokens
    FigureCanvasAgg(figure).draw()


def test_svg_keeps_characters_that_no_font_here_has(tmp_path: Path) -> None:
    path = tmp_path / "a.svg"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        heatmap("a", CHINESE, WATCH, path=path)
    text = path.read_text(encoding="utf-8")
    assert f">{CHINESE}</text>" in text
    assert f">{WATCH}</text>" in text
