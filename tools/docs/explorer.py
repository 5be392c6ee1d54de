"""Writes the pictures of docs/explorer.md, as screenshots. Needs chromium and Playwright."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from regard import explore, masks
from regard.explore._trace import Trace

IMAGES = Path(__file__).parents[2] / "docs" / "images"
SENTENCE = "The cat, which was very hungry, ate the fish."
LONG = 100_000


def source_words(count: int) -> list[str]:
    """Returns the first `count` words and punctuation marks of the standard library's code."""
    words: list[str] = []
    for file in sorted((Path(tempfile.__file__).parent).glob("*.py")):
        words += re.findall(r"\w+|[^\w\s]", file.read_text(encoding="utf-8", errors="replace"))
    return words[:count]


def same_word_head() -> explore.Explorer:
    """Returns a constructed head whose queries attend to earlier occurrences of the same word."""
    words = source_words(LONG)
    number = {word: i for i, word in enumerate(dict.fromkeys(words))}
    vectors = torch.nn.functional.normalize(torch.randn(len(number), 32), dim=-1)
    q = vectors[[number[word] for word in words]][None]
    return explore.tensors(80 * q, q, words, mask=masks.sliding(16_384), title="100,000 words of Python code")


def choose(page: Any, layer: int, head: int, word: str) -> None:
    page.click(f'#overview button[data-layer="{layer}"][data-head="{head}"]')
    page.wait_for_selector(f'#headName:has-text("layer {layer}, head {head}")')
    page.click(f'#tokens button:text-is("{word}")')
    page.wait_for_selector(f'#rowTitle:has-text("“{word}”")')


def linking_heads(trace: Trace, query: str, key: str) -> list[tuple[int, int]]:
    """Returns all heads, sorted by descending weight from the word `query` to the word `key`."""
    i, j = trace.keys.index(query), trace.keys.index(key)
    heads = [(layer, head) for layer, call in enumerate(trace.layers) for head in range(call.heads)]
    return sorted(heads, key=lambda which: -trace.rows(*which, [i])[0, j])


def one_head(page: Any, trace: Trace) -> None:
    choose(page, *linking_heads(trace, "ate", "cat")[0], "ate")


def compared(page: Any, trace: Trace) -> None:
    one, other = linking_heads(trace, "ate", "cat")[:2]
    choose(page, *one, "ate")
    page.click("#pin")
    page.select_option("#otherHead", f"{other[0]},{other[1]}")
    page.wait_for_selector(f'#otherRowTitle:has-text("layer {other[0]}, head {other[1]}")')


def far_in(page: Any, trace: Trace) -> None:
    page.fill("#search", "#60000")
    page.press("#search", "Enter")
    page.wait_for_selector('#rowTitle:has-text("(60000)")')


def pictures() -> Iterator[tuple[str, explore.Explorer, Any, str]]:
    text = explore.text(SENTENCE)
    yield "explorer", text, one_head, "light"
    yield "explorer-compare", text, compared, "dark"
    yield "explorer-long", same_word_head(), far_in, "light"


def main() -> None:
    from playwright.sync_api import sync_playwright

    torch.manual_seed(0)
    chosen = sys.argv[1:]
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, explorer, prepare, scheme in pictures():
            if chosen and name not in chosen:
                continue
            path = explorer.save(Path(folder) / "page.html")
            page = browser.new_page(viewport={"width": 1280, "height": 860}, color_scheme=scheme)
            page.goto(path.as_uri())
            page.wait_for_selector("html[data-ready]")
            prepare(page, explorer.traces[0])
            page.evaluate("scrollTo(0, 0)")
            page.wait_for_timeout(300)
            image = IMAGES / f"{name}.png"
            page.screenshot(path=image)
            print(f"{name}.png: {image.stat().st_size:,} bytes; {path.stat().st_size:,} of page")


if __name__ == "__main__":
    main()
