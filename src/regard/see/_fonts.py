"""Fonts for labels: finds installed fonts that have the characters of a text."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterable
from typing import Any

# Joiners and variation selectors have no shape of their own.
INVISIBLE = "\u200c\u200d\ufe0e\ufe0f"
CJK = ("CJK", "HIRAGANA", "KATAKANA", "HANGUL")  # how the Unicode names of such characters begin


def families(texts: Iterable[str]) -> tuple[list[str], str]:
    """Returns font families for a matplotlib Text, and the characters that no installed font has.

    The families are those of matplotlib's settings, and others for characters that the first font
    of the settings lacks. Matplotlib looks for each character in the families in order.
    """
    from matplotlib import rcParams
    from matplotlib.font_manager import FontProperties, findfont

    config: Any = rcParams
    chosen: list[str] = list(config["font.family"])
    settings = [name for family in chosen for name in config.get(f"font.{family}", [family])]
    missing = _missing("".join(texts), findfont(FontProperties()))
    fonts = _installed(missing) if missing else {}
    while missing and fonts:
        left = {name: _missing(missing, fonts[name]) for name in (*settings, *fonts) if name in fonts}
        useful = [name for name in left if left[name] != missing]
        if not useful:
            break
        best = min(useful, key=lambda name: (name not in settings, len(left[name])))
        missing = left[best]
        chosen += [] if best in chosen else [best]
    return chosen, missing


def _missing(letters: str, font: str) -> str:
    """Returns the characters that a font file lacks, each once and in order."""
    from matplotlib.font_manager import get_font

    has = get_font(font).get_char_index
    return "".join(
        x for x in dict.fromkeys(letters) if x not in INVISIBLE and not x.isspace() and not has(ord(x))
    )


def _installed(letters: str) -> dict[str, str]:
    """Returns installed font families and their files, the best for these letters first.

    Sans-serif fonts come first, and among them those of the letters' region: fonts of China, Japan
    and Korea draw some characters differently, and their names may end in SC, JP or KR.
    """
    from matplotlib.font_manager import fontManager

    scripts = {unicodedata.name(letter, "").partition(" ")[0] for letter in letters}
    region = "JP" if scripts & {"HIRAGANA", "KATAKANA"} else "KR" if "HANGUL" in scripts else "SC"
    fonts = {
        font.name: font.fname
        for font in fontManager.ttflist
        if font.style == "normal" and font.weight == 400 and not font.name.startswith("Last Resort")
        and os.path.exists(font.fname)  # the list may be older than the fonts
    }  # fmt: skip
    order = sorted(fonts, key=lambda name: ("Sans" not in name, not name.endswith(f" {region}"), name))
    return {name: fonts[name] for name in order}


def advice(letters: str) -> str:
    """Returns a sentence that names fonts to install for characters that no font has."""
    from matplotlib import get_cachedir

    letters = "".join(dict.fromkeys(letters))
    names = ", ".join(dict.fromkeys(map(_font_for, letters)))
    shown = ", ".join(letters[:8]) + (", ..." if len(letters) > 8 else "")
    return (
        f"tokens: no installed font has {shown}, which are drawn as escapes; install {names}, and delete "
        f"matplotlib's list of fonts, fontlist*.json in {get_cachedir()}"
    )


def _font_for(letter: str) -> str:
    script = unicodedata.name(letter, "").partition(" ")[0]
    if script in CJK:
        return "Noto Sans CJK (Debian, Ubuntu: fonts-noto-cjk)"
    if unicodedata.category(letter) in ("So", "Sk", "Cn"):
        return "Noto Emoji (black and white: matplotlib does not draw colour fonts)"
    return f"Noto Sans {script.title()}"
