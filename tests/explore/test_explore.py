"""The explorer without a browser: facts, packing, loading of models, and the saved file."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import regard
from regard import explore, see
from regard.explore import _page
from regard.explore._pack import head_facts, overview, pack
from regard.explore._read import pieces
from regard.explore._trace import finest_block
from regard.masks import Causal, Lengths, Window
from support import assert_close, model_files
from support.explore import data_of, harmful_tokens, small, unpacked
from support.processes import killed_while_writing


def test_packing_round_trips() -> None:
    for dtype in ("float32", "float16", "int32"):
        x = np.arange(12).reshape(3, 4).astype(dtype)[:, ::2]
        assert np.array_equal(unpacked(pack(x)), x)


@pytest.mark.parametrize(
    ("Lq", "Lk", "block"),
    [(1, 1, 1), (1024, 1024, 1), (1025, 1024, 2), (100_000, 100_000, 128), (10, 100_000, 1)],
)
def test_blocks_are_as_fine_as_the_limit_allows(Lq: int, Lk: int, block: int) -> None:
    assert finest_block(Lq, Lk) == block


def test_facts_equal_those_of_the_weights() -> None:
    q, k = torch.randn(3, 23, 8), torch.randn(1, 23, 8)
    tokens = [f"t{i}" for i in range(23)]
    trace = explore.tensors(q, k, tokens, mask=Window(9, 0)).traces[0]
    weights = regard.weights(q.double(), k.double(), k.double(), mask=Window(9, 0))
    for head in range(3):
        facts = head_facts(trace, 0, head)
        assert facts["block"] == 1
        assert_close(torch.tensor(unpacked(facts["mass"])), weights[head])
        assert_close(torch.tensor(unpacked(facts["column"])), weights[head].sum(0))
        assert_close(torch.tensor(unpacked(facts["rowMax"])), weights[head].amax(1))
        assert_close(torch.tensor(unpacked(facts["delimiters"])), weights[head][:, 0])
        top = weights[head].topk(8)
        assert_close(torch.tensor(unpacked(facts["topWeights"])), top.values)
        by_distance = unpacked(facts["distances"]["mass"])
        first = facts["distances"]["first"]
        expected = [weights[head].diagonal(-(first + i)).sum().item() for i in range(len(by_distance))]
        np.testing.assert_allclose(by_distance, expected, rtol=1e-4)
        assert abs(by_distance.sum() - 23) < 1e-4


def test_rows_are_exact_with_options() -> None:
    q, k, sink = torch.randn(4, 7, 8), torch.randn(2, 11, 8), torch.randn(4)
    trace = explore.tensors(q, k, scale=0.7, softcap=3.0, sink=sink, mask=Causal()).traces[0]
    options: dict[str, Any] = {"scale": 0.7, "softcap": 3.0, "sink": sink, "mask": Causal()}
    weights = regard.weights(q, k, k, **options)
    assert trace.offset == 4
    assert trace.queries == tuple(map(str, range(4, 11)))
    assert_close(torch.tensor(trace.rows(0, 3, [0, 5])), weights[3, [0, 5]])


OPTIONS: list[dict[str, Any]] = [
    {},
    {"mask": Lengths(9)},
    {"mask": Window(3, 2)},
    {"bias": torch.arange(23.0)},
    {"mask": Causal(), "sink": torch.tensor([0.5, -1.0, 2.0]), "softcap": 2.0, "scale": 0.5},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_rows_and_tiles_agree(options: dict[str, Any]) -> None:
    trace = small(**({"mask": None} | options)).traces[0]
    all_rows = trace.layers[1].rows(list(range(23)))[0, 2].numpy()
    for queries in ([5], range(4, 9), [7, 3, 22], [0, 22]):
        np.testing.assert_allclose(trace.rows(1, 2, queries), all_rows[list(queries)], atol=1e-6)
    for queries, keys in ((range(4, 9), range(3, 20)), (range(23), range(5)), (range(1), range(20, 23))):
        expected = all_rows[queries.start : queries.stop, keys.start : keys.stop]
        np.testing.assert_allclose(trace.tile(1, 2, queries, keys), expected, atol=1e-6)


def test_overview_has_every_head_with_its_roles() -> None:
    n = 29
    eye = 30.0 * torch.eye(n)
    # Head 0 attends to the previous token, head 1 attends uniformly.
    q, k = (
        torch.stack([torch.cat([eye[:1], eye[:-1]]), torch.zeros(n, n)]),
        torch.stack([eye, torch.zeros(n, n)]),
    )
    trace = explore.tensors(q, k, [f"t{i}" for i in range(n)], mask=Causal()).traces[0]
    result = overview(trace, [(0, 0), (0, 1)])
    roles = [[name for name, _ in head["roles"]] for head in result["heads"]]
    assert roles[0][0] == "previous token"
    assert "broad" in roles[1]
    assert unpacked(result["thumbnails"]).shape == (2, n, n)
    assert result["keys"][3] == "t3"
    assert result["heads"][0]["distance"] < 1.1


def test_a_capture_can_be_explored() -> None:
    layer = torch.nn.MultiheadAttention(16, 4, batch_first=True)
    x = torch.randn(2, 9, 16)
    with see.capture(layer, keep="qk") as capture:
        layer(x, x, x)
    trace = explore.captured(capture, [f"w{i}" for i in range(9)], sample=1).traces[0]
    assert_close(torch.tensor(trace.rows(0, 2, [4])), capture[0].rows([4])[1, 2])
    with see.capture(layer) as capture:
        layer(x, x, x)
    with pytest.raises(ValueError, match="expected layers of capture"):
        explore.captured(capture)


def test_an_estimate_counts_the_visible_pairs() -> None:
    q, k = torch.randn(2, 700, 8), torch.randn(1, 700, 8)
    estimate = explore.estimate(q, k, mask=Causal())
    assert estimate.flops == 2 * 8 * 2 * 700 * 701 // 2
    assert 0 < estimate.seconds < 60
    assert "TFLOP, about" in str(estimate)
    later = explore.estimate(q, k, mask=Causal(), offset=3)
    assert later.flops > estimate.flops


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    """Returns a small random model of Transformers and its tokenizer."""
    pytest.importorskip("transformers")
    return model_files.tiny_llama(len(model_files.byte_words())), model_files.byte_tokenizer()


def set_loaders(monkeypatch: pytest.MonkeyPatch, *loaders: Any) -> None:
    """Replaces the loaders of models that installed packages offer."""
    points = [SimpleNamespace(load=lambda load=load: load) for load in loaders]
    monkeypatch.setattr("regard.explore._read.entry_points", lambda **_: points)


def test_a_pair_reads_texts_without_the_gallery(
    pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_loaders(monkeypatch)
    explorer = explore.text("hello you", model=pair)
    (trace,) = explorer.traces
    assert "".join(trace.keys) == "hello you"
    assert trace.model == "LlamaForCausalLM"
    weights = np.stack([trace.rows(0, 1, [i])[0] for i in range(len(trace.keys))])
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-5)
    assert not np.triu(weights, 1).any()
    assert explorer.read is not None
    for text, match in ((" ", "text: expected some text"), ("word " * 5000, "text: expected from 1 to 128")):
        with pytest.raises(ValueError, match=match):
            explorer.read(text)


@pytest.mark.parametrize("model", [None, "folder", Path("model.gguf")])
def test_without_the_gallery_other_models_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch, model: Any
) -> None:
    set_loaders(monkeypatch)
    expected = (
        r"model: expected a pair of a model of Transformers and its tokenizer, got .*: pip install regard-g"
    )
    with pytest.raises(ModuleNotFoundError, match=expected):
        explore.text("hello", model=model)


def test_a_loader_receives_the_path(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    paths: list[Any] = []

    def load(path: Path | None) -> tuple[Any, Any, str]:
        paths.append(path)
        return *pair, "small"

    set_loaders(monkeypatch, load)
    assert explore.text("you", model="folder").traces[0].model == "small"
    assert explore.text().read is not None
    assert paths == [Path("folder"), None]


def test_models_that_are_not_pairs_raise(pair: tuple[Any, Any]) -> None:
    for model in (pair[0], pair[:1], 3):
        with pytest.raises(TypeError, match=r"model: expected a pair .* and its tokenizer, or a path, got"):
            explore.text("hello", model=model)
    encoder_decoder = SimpleNamespace(config=SimpleNamespace(is_encoder_decoder=True, name_or_path=""))
    with pytest.raises(
        ValueError, match="model: expected an encoder or a decoder alone, got SimpleNamespace"
    ):
        explore.text("hello", model=(encoder_decoder, pair[1]))


@pytest.mark.parametrize("is_fast", [True, False])
def test_tokens_are_slices_of_the_text(is_fast: bool) -> None:
    class Tokenizer:
        def __init__(self) -> None:
            self.is_fast = is_fast

        def __call__(self, text: str, return_offsets_mapping: bool) -> dict[str, Any]:
            assert return_offsets_mapping == is_fast
            return {"input_ids": [0, 1, 2], "offset_mapping": [(0, 0), (0, 3), (3, 6)]}

        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return [["<s>", "\u0120caf", "##\u00c3"][i] for i in ids]

    expected = ("<s>", "caf", "\u00e9s!") if is_fast else ("<s>", "\u0120caf", "##\u00c3")
    assert pieces(Tokenizer(), "caf\u00e9s!") == expected


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("typer")
    pytest.importorskip("transformers")
    from typer.testing import CliRunner

    from regard.cli._app import app

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return lambda *arguments: CliRunner().invoke(app, ["explore", *map(str, arguments)])


def test_the_command_writes_a_file(
    command: Any, pair: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_loaders(monkeypatch, lambda path: (*pair, path.name))
    page = tmp_path / "page.html"
    result = command("hello", "you", "--model", "small", "--save", page)
    assert result.exit_code == 0, result.output
    traces = data_of(page.read_text(encoding="utf-8"))["traces"]
    assert [(trace["title"], trace["model"]) for trace in traces] == [("hello", "small"), ("you", "small")]


@pytest.mark.parametrize("arguments", [("hello",), ("--model", "small"), ()])
def test_without_the_gallery_the_command_says_what_to_install(
    command: Any, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    set_loaders(monkeypatch)
    result = command(*arguments)
    assert result.exit_code == 1
    assert result.stderr.endswith("come with the gallery: pip install regard-gallery\n")
    assert result.stderr.count("\n") == 1


# --- the saved file ---


def test_the_file_holds_everything(tmp_path: Path) -> None:
    explorer = small()
    page = explorer.save(tmp_path / "page.html").read_text(encoding="utf-8")
    (trace,) = data_of(page)["traces"]
    assert [(head["layer"], head["head"]) for head in trace["facts"]] == [
        (i, j) for i in range(2) for j in range(3)
    ]
    assert not re.search(r"(src|href)=\"(?!data:)", page)
    assert "http://" not in page.replace("http-equiv", "")
    assert "https://" not in page


def test_a_kill_while_the_page_is_saved(tmp_path: Path) -> None:
    path = small().save(tmp_path / "page.html")
    before = path.read_bytes()
    killed_while_writing(f"""
        from support.explore import small
        explorer = small()
        LIMIT
        explorer.save({str(path)!r})
    """)
    assert path.read_bytes() == before
    assert small().save(path) == path
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]


def test_fewer_heads_have_finer_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.explore.explorer.CELLS", 23 * 23)
    explorer = small()
    for heads, block in ((None, 4), ([(1, 2)], 1)):
        page = explorer.save(tmp_path / "page.html", heads=heads).read_text(encoding="utf-8")
        (trace,) = data_of(page)["traces"]
        assert {head["block"] for head in trace["facts"]} == {block}
        for head in trace["facts"]:
            np.testing.assert_allclose(unpacked(head["mass"]).sum(), 23, rtol=1e-5)


def test_requested_rows_and_keys_are_embedded(tmp_path: Path) -> None:
    explorer = small(mask=Window(5, 2))
    page = explorer.save(tmp_path / "page.html", heads=[(1, 2)], rows=[7], embed="qk").read_text(
        encoding="utf-8"
    )
    (head,) = data_of(page)["traces"][0]["facts"]
    np.testing.assert_allclose(unpacked(head["rows"]["7"]), explorer.traces[0].rows(1, 2, [7])[0])
    assert (head["qk"]["left"], head["qk"]["right"], head["qk"]["offset"]) == (5, 2, 0)
    layer = explorer.traces[0].layers[1]
    assert layer.k is not None
    np.testing.assert_allclose(unpacked(head["qk"]["k"]), layer.k[0, 2].numpy(), atol=2e-3)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"embed": "all"}, "embed: expected one of facts, qk, got 'all'"),
        ({"heads": [(2, 0)]}, r"heads: expected pairs \(layer, head\) up to \(1, 2\), got \[\(2, 0\)\]"),
        ({"heads": []}, "heads: .* got none"),
        ({"rows": [23]}, "rows: expected queries up to 22, got 23"),
        ({"rows": [-1]}, "rows: expected an integer from 0"),
    ],
)
def test_save_refuses(tmp_path: Path, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        small().save(tmp_path / "page.html", **options)
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"mask": Lengths(9)}, "expected no mask, Causal or Window, got Lengths"),
        ({"bias": torch.zeros(23, 23)}, "expected no bias"),
        ({"q": 1e6}, "within the range of float16"),
    ],
)
def test_keys_are_embedded_only_with_options_of_the_browser(
    tmp_path: Path, options: dict[str, Any], match: str
) -> None:
    factor = options.pop("q", 1.0)
    q, k = torch.randn(1, 23, 8) * factor, torch.randn(1, 23, 8)
    with pytest.raises(ValueError, match=match):
        explore.tensors(q, k, **options).save(tmp_path / "page.html", embed="qk")


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda x: explore.tensors(x, x, ["a"]), "tokens: expected Lk = 5, got 1"),
        (lambda x: explore.tensors([], []), "q: expected a tensor"),
        (lambda x: explore.tensors(x, "k"), "k: expected a tensor"),
        (lambda x: explore.Explorer(()), "traces: expected at least one"),
        (lambda x: explore.tensors([x, x[:, :3]], [x, x]), "tokens: expected as many as in Layer"),
        (lambda x: explore.tensors(x[:, :0], x), "layers: expected at least one head, query and key, got La"),
        (lambda x: explore.tensors(x, x[:, :0]), "layers: expected at least one head, query and key, got La"),
        (lambda x: explore.tensors(x[:0], x[:0]), "layers: expected at least one head, query and key, got L"),
        (lambda x: explore.tensors(x / 0, x), "layers: expected weights without NaN, got NaN in Layer"),
        (lambda x: explore.tensors(x, x * torch.nan), "layers: expected weights without NaN, got NaN in Lay"),
    ],
)
def test_wrong_arguments_raise(call: Any, match: str) -> None:
    with pytest.raises((ValueError, TypeError), match=match):
        call(torch.randn(2, 5, 8))


class ElementParser(HTMLParser):
    """Collects the elements and comments of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[Any] = []

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.tags.append((tag, attributes))

    def handle_comment(self, data: str) -> None:
        self.tags.append(("comment", data))


def elements(page: str) -> list[Any]:
    parser = ElementParser()
    parser.feed(page)
    return parser.tags


def test_no_token_changes_the_elements_of_the_file(tmp_path: Path) -> None:
    tokens = harmful_tokens()
    assert len(set(tokens)) == len(tokens) == 200
    harmless, harmful = (
        small(words, heads=1, layers=1).save(tmp_path / "page.html").read_text(encoding="utf-8")
        for words in (["a"] * 200, tokens)
    )
    assert elements(harmless) == elements(harmful)
    assert data_of(harmful)["traces"][0]["keys"] == tokens


def test_escaped_json_is_ascii_without_markup() -> None:
    text = _page.escaped({"x": "</script><!--&\u2028\u2029"})
    assert text.isascii()
    assert not set("<>&") & set(text)
    assert json.loads(text) == {"x": "</script><!--&\u2028\u2029"}


def test_every_file_of_the_page_can_be_bundled() -> None:
    """All imports and exports have the form that the bundler supports."""
    for name, text in _page.files().items():
        lines = [line for line in text.splitlines() if re.match(r"\s*(import|export)\b", line)]
        assert name.endswith(".js") or not lines
        assert all(_page.IMPORT.fullmatch(line) or _page.EXPORT.match(line) for line in lines), name
    modules = set(re.findall(r"const module_(\w+) =", _page.bundle("main") + _page.bundle("worker")))
    assert modules == {name.removesuffix(".js") for name in _page.files() if name.endswith(".js")}


def test_the_file_of_100_000_tokens_is_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file stays small even if all facts are random numbers, which do not compress."""
    n, rng = 100_000, np.random.default_rng(0)
    facts = small(heads=1, layers=1).traces[0].facts(0)
    sides = [-(-n // (128 << i)) for i in range(11)]
    blocks = tuple(rng.random((1, side, side), np.float32) for side in sides)
    per_token = {
        name: rng.random((1, n), np.float32)
        for name in ("column", "entropy", "normalized", "row_max", "delimiters")
    }
    random_facts = type(facts)(
        mass=blocks, max=blocks, **per_token, distances=np.arange(1 - n, n),
        by_distance=np.pad(rng.random((1, n), np.float32), ((0, 0), (n - 1, 0))),
        top_weights=rng.random((1, n, 8), np.float32), top_keys=rng.integers(0, n, (1, n, 8), np.int32),
    )  # fmt: skip
    q = torch.randn(1, n, 1)
    monkeypatch.setattr(explore._make.see, "record", lambda q, k, *_, **__: _layer_without_facts(q, k))
    trace = explore.tensors(q, q, ["token"] * n).traces[0]
    trace._facts_cache[0] = random_facts
    monkeypatch.setattr(type(trace), "roles", lambda self, layer: [[]])
    size = explore.Explorer((trace,)).save(tmp_path / "page.html").stat().st_size
    assert 10_000_000 < size < 20_000_000


def _layer_without_facts(q: torch.Tensor, k: torch.Tensor) -> see.Layer:
    return see.Layer("layer", 0, (1, 1, q.shape[1], k.shape[1]), 0, {}, {}, q=q[None], k=k[None])


def test_weights_of_another_library_are_explored(tmp_path: Path) -> None:
    q, k = torch.randn(2, 2, 3, 6, 8)
    words = ["a", "b", "c", "a", "b", "d"]
    given = regard.weights(q, k, k, mask=Causal())
    (trace,) = explore.weights((given, given.flip(1)), words, sample=1, title="Given").traces
    assert_close(torch.tensor(trace.rows(1, 0, [5, 2])), given[1, 2, [5, 2]], atol=1e-6)
    assert_close(torch.tensor(trace.tile(0, 1, range(2, 5), range(1, 4))), given[1, 1, 2:5, 1:4], atol=1e-6)
    assert_close(torch.tensor(trace.facts(0).mass[0]), given[1], atol=1e-6)
    assert trace.facts(0).max[0].shape == (3, 6, 6)
    page = explore.weights(given.numpy(), words).save(tmp_path / "page.html").read_text(encoding="utf-8")
    assert data_of(page)["traces"][0]["keys"] == words
    others = [word.upper() for word in words]
    page = explore.weights(given, words, key_tokens=others).save(tmp_path / "page.html").read_text("utf-8")
    (shown,) = data_of(page)["traces"]
    assert (shown["queries"], shown["keys"]) == (words, others)
    with pytest.raises(TypeError, match=r"weights: expected a recording .* outputs.attentions, got int 3"):
        explore.weights(3)
