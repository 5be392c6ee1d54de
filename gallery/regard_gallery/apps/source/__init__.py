"""Python's standard library: a language model that completes functions.

Data: the modules of the running Python's standard library, some 160 files and 5 MB. Whole files are
held out. In every second layer, attention is limited to a window.
"""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

from ...models.generate import Sampling
from .._parts.language import LanguageApp

SHORTEST = 1000  # minimal number of characters of a file; shorter files only re-export names


class App(LanguageApp):
    name = "source"
    request = "the beginning of a function, such as 'def read(path):'"
    vocabulary = 2048
    length, sequences = 512, 2
    near = 128
    held_out = (10, 4)
    sampling = Sampling(max_tokens=200, temperature=0.3)

    @staticmethod
    def documents() -> list[str]:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        texts = [path.read_text(encoding="utf-8") for path in files]
        return [text for text in texts if len(text) >= SHORTEST]

    def ended(self, request: str, written: str) -> int | None:
        """Returns the index in `written` at which the function ends, or None if it has not ended.

        A function ends before the first line that is not indented more than the request.
        """
        indent = len(request) - len(request.lstrip())
        outside = re.search(rf"\n {{0,{indent}}}[^\s]", written)
        return None if outside is None else outside.start()
