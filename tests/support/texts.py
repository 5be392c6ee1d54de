"""Patterns for tests that compare texts."""

from __future__ import annotations

import re

NUMBER = re.compile(r"\d+(?:[.,]\d+)*(?:e[-+]?\d+)?")
