"""Applications from data to report, on little data and with few steps."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("sklearn")

from regard.apps import Application, Options, find, load, run
from regard.apps._plain import plain

# Of each, a request, part of the answer, and one that is refused.
ASKED = {
    "control": ("7", "steps of 500", "left"),
    "image": ("7", "in the data", "200"),
    "emoji": ("a fast car", "never seen: ", " "),
    "speech": ("3141", "spoken 3141, heard ", "three"),
    "medical": ("104", "not for diagnosis", "90"),
}


@pytest.mark.parametrize("name", ASKED)
def test_quick(name: str, tmp_path: Path) -> None:
    kind, options = find(name), Options(quick=True, out=tmp_path)
    try:
        report = run(kind, options)
    except FileNotFoundError as missing:
        if "make data" not in str(missing):
            raise
        pytest.skip(str(missing))
    for scores in (*report.own, *(one for found in report.baselines.values() for one in found)):
        assert set(scores) == {*kind.more, *kind.less}
        assert all(math.isfinite(value) for value in scores.values())
    assert report.picture.read_bytes().startswith(b"\x89PNG")
    app, model = load(kind, options)
    with torch.no_grad():
        assert app.scores(model) == report.own[0]
        asked, answer, refused = ASKED[name]
        assert answer in app.use(model, asked)
        with pytest.raises(ValueError, match="use: expected"):
            app.use(model, refused)
        same_with_plain_attention(app, model)


def same_with_plain_attention(app: Application, model: torch.nn.Module) -> None:
    batch = app.batch(model, torch.Generator().manual_seed(0))
    own = app.loss(model, batch)
    assert bool(own.isfinite())
    torch.testing.assert_close(app.loss(plain(model), batch), own, atol=1e-4, rtol=1e-4)
