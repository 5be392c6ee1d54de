"""Runs the experiments of `regard_gallery.claims` and compares their findings with the records."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from regard_gallery.claims import Finding, records
from support import ROOT

PAGE = ROOT / "docs" / "claims" / "README.md"


def experiment(name: str) -> Any:
    return import_module(f"regard_gallery.claims.{name}")


def measure(name: str, **sizes: Any) -> Finding:
    """Runs an experiment and checks that the page has its claim with its verdict."""
    finding: Finding = experiment(name).measure(**sizes)
    record = records.read()[name]
    assert (finding.claim, finding.verdict) == (record["claim"], record["verdict"])
    assert records.row(name, record) in PAGE.read_text(encoding="utf-8")
    text = str(finding)
    assert finding.claim in text
    assert finding.correct in text
    return finding


def same_row(name: str) -> bool:
    """Returns whether the recorded row has exactly the numbers that the experiment computes."""
    finding, record = experiment(name).measure(), records.read()[name]
    return bool((finding.measured, finding.correct) == (record["measured"], record["correct"]))
