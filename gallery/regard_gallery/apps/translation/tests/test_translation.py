"""English to French: the split, the lexicon, the model and beam search."""

from __future__ import annotations

import itertools
from pathlib import Path
from random import Random
from typing import Any
from zipfile import ZipFile

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regard_gallery.apps import translation
from regard_gallery.apps._parts.blocks import Blocks
from regard_gallery.apps.translation import bare, clean, hold_out
from regard_gallery.apps.translation.baseline import lexicon, word_by_word
from regard_gallery.apps.translation.beam import Written, beam_search
from regard_gallery.apps.translation.model import END, START, Sentences, Translator, sentences
from regard_gallery.models._tokenizers import by_word

WORDS = 7
SOURCE = [[4, 2, 6, END], [3, END], [5, 5, 2, 6, 3, END]]


def translator() -> Translator:
    """Its scores are made sharper, so that beams differ."""
    torch.manual_seed(0)
    model = Translator(WORDS, Blocks(16, 2, 2, dropout=0.1)).eval()
    model.words.weight.data *= 3
    return model


def log_chances(model: Translator, source: list[int], target: tuple[int, ...]) -> Tensor:
    """Of the token after each of START and the target, (len(target) + 1, WORDS); nothing is cached."""
    with torch.no_grad():
        return F.log_softmax(model(sentences([source]), sentences([[START, *target]])), -1)


def score(model: Translator, source: list[int], target: tuple[int, ...]) -> float:
    chances = log_chances(model, source, target)
    return sum(float(row[token]) for row, token in zip(chances, (*target, END), strict=True))


def search(model: Translator, width: int, **options: Any) -> list[Written]:
    with torch.no_grad():
        return model.translate(sentences(SOURCE), width=width, **options)


# Beam search


@pytest.mark.parametrize("packed", [True, False])
def test_one_beam_is_greedy_without_a_cache(packed: bool) -> None:
    model = translator()
    model.packed = packed
    for source, found in zip(SOURCE, search(model, 1, longest=9), strict=True):
        target: tuple[int, ...] = ()
        while len(target) < 8:
            token = int(log_chances(model, source, target)[-1].argmax())
            if token == END:
                break
            target += (token,)
        assert found.tokens == list(target)


@pytest.mark.parametrize("width", [1, 3, 8])
def test_the_score_is_the_log_chance_without_a_cache(width: int) -> None:
    model = translator()
    for source, found in zip(SOURCE, search(model, width, longest=6), strict=True):
        assert found.score == pytest.approx(score(model, source, tuple(found.tokens)), abs=1e-4)


@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_beams_for_all_sequences_find_the_best_one(penalty: float) -> None:
    """And fewer beams find none that is better."""
    model, longest = translator(), 3
    others = [token for token in range(WORDS) if token != END]
    targets = [t for n in range(longest) for t in itertools.product(others, repeat=n)]
    found = search(model, WORDS**2, longest=longest, penalty=penalty)
    for source, best, greedy in zip(SOURCE, found, search(model, 1, longest=longest), strict=True):
        scores = {t: score(model, source, t) / (len(t) + 1) ** penalty for t in targets}
        assert tuple(best.tokens) == max(targets, key=lambda t: scores[t])
        assert scores[tuple(greedy.tokens)] <= scores[tuple(best.tokens)] + 1e-6


def test_a_beam_that_is_behind_at_first_wins() -> None:
    """Greedy takes a (0.6), after which nothing is likely; b (0.4) ends for sure."""
    end, a, b = 0, 1, 2
    after = torch.tensor([[0.0, 0.6, 0.4], [0.4, 0.3, 0.3], [1.0, 0.0, 0.0]]).log()

    def step(tokens: Tensor, parents: Tensor) -> Tensor:
        return after[torch.where(tokens == 9, 0, tokens)]

    def best(width: int) -> list[Written]:
        return beam_search(step, 1, start=9, end=end, width=width, longest=4)

    assert best(1)[0].tokens == [a]
    assert best(2) == [Written([b], pytest.approx(torch.tensor(0.4).log().item()))]


def test_every_sequence_ends() -> None:
    def never(tokens: Tensor, parents: Tensor) -> Tensor:
        return torch.tensor([-50.0, -1.0, -2.0]).expand(len(tokens), -1)

    found = beam_search(never, 2, start=9, end=0, width=2, longest=4)
    assert found == [Written([1, 1, 1], -53.0)] * 2
    with pytest.raises(ValueError, match="width: expected an integer from 1"):
        beam_search(never, 2, start=9, end=0, width=0, longest=4)


# The model


def test_padding_and_packing_change_nothing() -> None:
    model, target = translator(), [[START, 2], [START, 3, 4, 5], [START]]
    together = model(sentences(SOURCE), sentences(target))
    assert together.shape == (7, WORDS)
    alone = [model(sentences([own]), sentences([other])) for own, other in zip(SOURCE, target, strict=True)]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-5, rtol=1e-5)
    model.packed = False
    torch.testing.assert_close(model(sentences(SOURCE), sentences(target)), together, atol=1e-5, rtol=1e-5)


def test_the_target_does_not_see_what_follows() -> None:
    model = translator()
    before = log_chances(model, SOURCE[0], (3, 4, 5))
    after = log_chances(model, SOURCE[0], (3, 4, 6))
    torch.testing.assert_close(before[:3], after[:3])
    assert (before[3] - after[3]).abs().max() > 1e-3
    assert (before - log_chances(model, SOURCE[1], (3, 4, 5))).abs().max() > 1e-3


def test_real_tokens() -> None:
    made = sentences([[5, 4], [3]])
    assert made.real.tolist() == [[True, True], [True, False]]
    assert isinstance(made, Sentences)


# The data


def archive(path: Path, lines: str) -> None:
    with ZipFile(path, "w") as made:
        made.writestr("fra.txt", lines)


def test_pairs_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "fra-eng.zip"
    monkeypatch.setattr(translation, "PLACES", (str(place),))
    with pytest.raises(FileNotFoundError, match="this brings it: make data"):
        translation.tatoeba()
    long = " ".join("nine" for _ in range(9))
    archive(place, f"Go.\tVa\u202f!\tCC\nGo.\tVa !\tCC\nIt's me.\tC\u2019est moi.\tCC\n{long}\tneuf\tCC\n")
    assert translation.tatoeba() == [("Go.", "Va !"), ("It's me.", "C'est moi.")]
    archive(place, "Go.\n")
    with pytest.raises(ValueError, match=r"not enough values to unpack .*; `make data` brings it"):
        translation.tatoeba()
    place.write_bytes(b"no")
    with pytest.raises(ValueError, match="File is not a zip file"):
        translation.tatoeba()


def test_clean_and_bare() -> None:
    assert clean("Va\u202f\u00a0!  E\u0301") == "Va ! \u00c9"
    assert bare("C'est  Ça, non ?") == bare("c'est ça non!") == "cestçanon"


def test_what_is_held_out_is_not_in_training() -> None:
    pairs = [
        ("Go.", "Va !"),
        ("Go!", "Allez !"),
        ("Leave.", "Allez."),
        ("Run.", "Cours !"),
        ("Sit.", "Assis."),
    ]
    for seed in range(8):
        held, rest = hold_out(pairs, 2, seed)
        assert len(held) == 2
        closed = {bare(text) for one in held for text in (one.source, *one.references)}
        assert all(bare(source) not in closed and bare(target) not in closed for source, target in rest)
        touched = [pair for pair in pairs if pair not in rest]
        assert all({bare(pair[0]), bare(pair[1])} & closed for pair in touched)
        for one in held:
            assert one.references == [target for source, target in pairs if source == one.source]


def real_app(seed: int = 0) -> translation.App:
    if not any(Path(place).exists() for place in translation.PLACES):
        pytest.skip("`make data` brings it")
    pytest.importorskip("tokenizers")
    return translation.App(quick=True, seed=seed)


def test_the_split_of_tatoeba_is_apart() -> None:
    app, other = real_app(0), real_app(1)
    closed = {bare(t) for one in (*app.tested, *app.validated) for t in (one.source, *one.references)}
    assert not closed & {bare(text) for pair in app.trained for text in pair}
    sources = [one.source for one in (*app.tested, *app.validated)]
    assert len(set(sources)) == len(sources) == 20
    assert sources != [one.source for one in (*other.tested, *other.validated)]


def test_tokens_give_the_text_back() -> None:
    app = real_app()
    for text in ("Ça va ?", "L'œuf zébré, 12 €."):
        (tokens,) = app._tokens([text])
        assert app.text(tokens) == text
        assert [app.text(own) for own in by_word(app.tokenizer, tokens)] == text.split()


def test_the_alignment_is_a_share_of_each_english_word() -> None:
    app = real_app()
    torch.manual_seed(0)
    model = app.model().eval()
    (target,) = app._tokens(["Ça va bien !"])
    found, english, french = app.alignment(model, "I feel extraordinarily well.", target)
    assert english == ["I", "feel", "extraordinarily", "well.", "(end)"]
    assert french == ["Ça", "va", "bien", "!", "(end)"]
    assert found.shape == (5, 5)
    torch.testing.assert_close(found.sum(1), torch.ones(5))
    (read,) = app._tokens(["I feel extraordinarily well."])
    assert len(read) > 4  # a word of several tokens gets all that they get
    assert found.mean(0)[2] > found.mean(0)[0]


# The lexicon


def slow_lexicon(pairs: list[tuple[str, str]], rounds: int) -> dict[str, str]:
    """The same as sums over dictionaries, as the paper has it."""
    cut = [(["", *source.split()], target.split()) for source, target in pairs]
    chance = {(a, b): 1.0 for source, target in cut for a in source for b in target}
    for _ in range(rounds):
        expected = dict.fromkeys(chance, 0.0)
        for source, target in cut:
            for b in target:
                total = sum(chance[a, b] for a in source)
                for a in source:
                    expected[a, b] += chance[a, b] / total
        total_of = {a: sum(n for (own, _), n in expected.items() if own == a) for a, _ in chance}
        chance = {(a, b): n / total_of[a] for (a, b), n in expected.items()}
    words = {a for a, _ in chance if a}
    return {word: max((n, b) for (a, b), n in chance.items() if a == word)[1] for word in words}


def test_the_lexicon_is_that_of_model_1() -> None:
    random = Random(0)
    meaning = dict(zip("abcdefgh", "stuvwxyz", strict=True))
    pairs = []
    for _ in range(40):
        source = random.sample(list(meaning), random.randint(2, 5))
        target = [meaning[word] for word in source] + random.sample("mno", 1)
        pairs.append((" ".join(source), " ".join(random.sample(target, len(target)))))
    assert lexicon(pairs, 3) == slow_lexicon(pairs, 3)
    assert lexicon(pairs) == slow_lexicon(pairs, 8) == meaning


def test_words_are_replaced_in_order() -> None:
    known = {"the": "le", "book": "livre", "a": "l'", "friend": "ami"}
    assert word_by_word(known, "The Book, the zebra.") == "Le livre, le zebra."
    assert word_by_word(known, "a friend!") == "L'ami !"


def test_the_lexicon_writes_names_as_sentences_do() -> None:
    pairs = [("I see Mary.", "Je vois Marie."), ("Mary sees.", "Marie voit."), ("I see.", "Je vois.")]
    known = lexicon(pairs)
    assert known["mary"] == "Marie"
    assert known["i"] in ("je", "vois")  # at the beginning alone a capital says nothing
