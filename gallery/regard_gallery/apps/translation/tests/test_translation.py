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
    """Returns a small model with sharpened logits, so that beams differ."""
    torch.manual_seed(0)
    model = Translator(WORDS, Blocks(16, 2, 2, dropout=0.1)).eval()
    model.words.weight.data *= 3
    return model


def log_probs_after(model: Translator, source: list[int], target: tuple[int, ...]) -> Tensor:
    """Returns the log probabilities after START and each target token, (len(target) + 1, WORDS).

    The whole target is read in one call, without a cache.
    """
    with torch.no_grad():
        return F.log_softmax(model(sentences([source]), sentences([[START, *target]])), -1)


def score(model: Translator, source: list[int], target: tuple[int, ...]) -> float:
    log_probs = log_probs_after(model, source, target)
    return sum(float(row[token]) for row, token in zip(log_probs, (*target, END), strict=True))


def search(model: Translator, width: int, **options: Any) -> list[Written]:
    with torch.no_grad():
        return model.translate(sentences(SOURCE), width=width, **options)


# Beam search


@pytest.mark.parametrize("packed", [True, False])
def test_one_beam_equals_greedy_search_without_a_cache(packed: bool) -> None:
    model = translator()
    model.packed = packed
    for source, hypothesis in zip(SOURCE, search(model, 1, longest=9), strict=True):
        target: tuple[int, ...] = ()
        while len(target) < 8:
            token = int(log_probs_after(model, source, target)[-1].argmax())
            if token == END:
                break
            target += (token,)
        assert hypothesis.tokens == list(target)


@pytest.mark.parametrize("width", [1, 3, 8])
def test_scores_are_log_probabilities_without_a_cache(width: int) -> None:
    model = translator()
    for source, hypothesis in zip(SOURCE, search(model, width, longest=6), strict=True):
        assert hypothesis.score == pytest.approx(score(model, source, tuple(hypothesis.tokens)), abs=1e-4)


@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_beams_for_all_sequences_find_the_best_one(penalty: float) -> None:
    """With enough beams for all sequences, search finds the best. One beam finds none better."""
    model, longest = translator(), 3
    others = [token for token in range(WORDS) if token != END]
    targets = [t for n in range(longest) for t in itertools.product(others, repeat=n)]
    exhaustive = search(model, WORDS**2, longest=longest, penalty=penalty)
    for source, best, greedy in zip(SOURCE, exhaustive, search(model, 1, longest=longest), strict=True):
        scores = {t: score(model, source, t) / (len(t) + 1) ** penalty for t in targets}
        assert tuple(best.tokens) == max(targets, key=lambda t: scores[t])
        assert scores[tuple(greedy.tokens)] <= scores[tuple(best.tokens)] + 1e-6


def test_a_beam_that_starts_lower_can_win() -> None:
    """One beam finds "a, end" (probability 0.6 * 0.4). Two beams find "b, end" (0.4 * 1.0)."""
    end, a, b = 0, 1, 2
    after = torch.tensor([[0.0, 0.6, 0.4], [0.4, 0.3, 0.3], [1.0, 0.0, 0.0]]).log()

    def step(tokens: Tensor, parents: Tensor) -> Tensor:
        return after[torch.where(tokens == 9, 0, tokens)]

    def best(width: int) -> list[Written]:
        return beam_search(step, 1, start=9, end=end, width=width, longest=4)

    assert best(1)[0].tokens == [a]
    assert best(2) == [Written([b], pytest.approx(torch.tensor(0.4).log().item()))]


def test_search_stops_at_the_longest_length() -> None:
    def never_end(tokens: Tensor, parents: Tensor) -> Tensor:
        return torch.tensor([-50.0, -1.0, -2.0]).expand(len(tokens), -1)

    hypotheses = beam_search(never_end, 2, start=9, end=0, width=2, longest=4)
    assert hypotheses == [Written([1, 1, 1], -53.0)] * 2
    with pytest.raises(ValueError, match="width: expected an integer from 1"):
        beam_search(never_end, 2, start=9, end=0, width=0, longest=4)


# The model


def test_padding_and_packing_change_nothing() -> None:
    model, target = translator(), [[START, 2], [START, 3, 4, 5], [START]]
    together = model(sentences(SOURCE), sentences(target))
    assert together.shape == (7, WORDS)
    alone = [
        model(sentences([source]), sentences([prefix])) for source, prefix in zip(SOURCE, target, strict=True)
    ]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-5, rtol=1e-5)
    model.packed = False
    torch.testing.assert_close(model(sentences(SOURCE), sentences(target)), together, atol=1e-5, rtol=1e-5)


def test_target_tokens_do_not_attend_to_later_ones() -> None:
    model = translator()
    before = log_probs_after(model, SOURCE[0], (3, 4, 5))
    after = log_probs_after(model, SOURCE[0], (3, 4, 6))
    torch.testing.assert_close(before[:3], after[:3])
    assert (before[3] - after[3]).abs().max() > 1e-3
    assert (before - log_probs_after(model, SOURCE[1], (3, 4, 5))).abs().max() > 1e-3


def test_real_marks_tokens_that_are_not_padding() -> None:
    padded = sentences([[5, 4], [3]])
    assert padded.real.tolist() == [[True, True], [True, False]]
    assert isinstance(padded, Sentences)


# The data


def write_archive(path: Path, lines: str) -> None:
    with ZipFile(path, "w") as file:
        file.writestr("fra.txt", lines)


def test_pairs_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "fra-eng.zip"
    monkeypatch.setattr(translation, "PLACES", (str(path),))
    with pytest.raises(FileNotFoundError, match="this brings it: make data"):
        translation.tatoeba()
    long = " ".join("nine" for _ in range(9))
    write_archive(
        path, f"Go.\tVa\u202f!\tCC\nGo.\tVa !\tCC\nIt's me.\tC\u2019est moi.\tCC\n{long}\tneuf\tCC\n"
    )
    assert translation.tatoeba() == [("Go.", "Va !"), ("It's me.", "C'est moi.")]
    write_archive(path, "Go.\n")
    with pytest.raises(ValueError, match=r"not enough values to unpack .*; `make data` brings it"):
        translation.tatoeba()
    path.write_bytes(b"no")
    with pytest.raises(ValueError, match="File is not a zip file"):
        translation.tatoeba()


def test_clean_and_bare() -> None:
    assert clean("Va\u202f\u00a0!  E\u0301") == "Va ! \u00c9"
    assert bare("C'est  Ça, non ?") == bare("c'est ça non!") == "cestçanon"


def test_held_out_sentences_are_not_in_training() -> None:
    pairs = [
        ("Go.", "Va !"),
        ("Go!", "Allez !"),
        ("Leave.", "Allez."),
        ("Run.", "Cours !"),
        ("Sit.", "Assis."),
    ]
    for seed in range(8):
        held, training = hold_out(pairs, 2, seed)
        assert len(held) == 2
        held_texts = {bare(text) for sentence in held for text in (sentence.source, *sentence.references)}
        assert all(
            bare(source) not in held_texts and bare(target) not in held_texts for source, target in training
        )
        removed = [pair for pair in pairs if pair not in training]
        assert all({bare(pair[0]), bare(pair[1])} & held_texts for pair in removed)
        for sentence in held:
            assert sentence.references == [target for source, target in pairs if source == sentence.source]


def real_app(seed: int = 0) -> translation.App:
    if not any(Path(place).exists() for place in translation.PLACES):
        pytest.skip("`make data` brings it")
    pytest.importorskip("tokenizers")
    return translation.App(quick=True, seed=seed)


def test_the_splits_of_tatoeba_are_disjoint() -> None:
    app, other = real_app(0), real_app(1)
    held_texts = {
        bare(t) for sentence in (*app.tested, *app.validated) for t in (sentence.source, *sentence.references)
    }
    assert not held_texts & {bare(text) for pair in app.trained for text in pair}
    sources = [sentence.source for sentence in (*app.tested, *app.validated)]
    assert len(set(sources)) == len(sources) == 20
    assert sources != [sentence.source for sentence in (*other.tested, *other.validated)]


def test_tokens_decode_to_the_text() -> None:
    app = real_app()
    for text in ("Ça va ?", "L'œuf zébré, 12 €."):
        (tokens,) = app._tokens([text])
        assert app.text(tokens) == text
        assert [app.text(word) for word in by_word(app.tokenizer, tokens)] == text.split()


def test_alignment_rows_are_shares_of_the_english_words() -> None:
    app = real_app()
    torch.manual_seed(0)
    model = app.model().eval()
    (target,) = app._tokens(["Ça va bien !"])
    alignment, english, french = app.alignment(model, "I feel extraordinarily well.", target)
    assert english == ["I", "feel", "extraordinarily", "well.", "(end)"]
    assert french == ["Ça", "va", "bien", "!", "(end)"]
    assert alignment.shape == (5, 5)
    torch.testing.assert_close(alignment.sum(1), torch.ones(5))
    (english_tokens,) = app._tokens(["I feel extraordinarily well."])
    assert len(english_tokens) > 4  # a word of several tokens gets the sum of their weights
    assert alignment.mean(0)[2] > alignment.mean(0)[0]


# The lexicon


def slow_lexicon(pairs: list[tuple[str, str]], rounds: int) -> dict[str, str]:
    """Computes the lexicon of IBM model 1 with dictionaries, as the paper defines it."""
    tokenised = [(["", *source.split()], target.split()) for source, target in pairs]
    probability = {(a, b): 1.0 for source, target in tokenised for a in source for b in target}
    for _ in range(rounds):
        expected = dict.fromkeys(probability, 0.0)
        for source, target in tokenised:
            for b in target:
                total = sum(probability[a, b] for a in source)
                for a in source:
                    expected[a, b] += probability[a, b] / total
        total_of = {
            a: sum(n for (word_of_pair, _), n in expected.items() if word_of_pair == a)
            for a, _ in probability
        }
        probability = {(a, b): n / total_of[a] for (a, b), n in expected.items()}
    words = {a for a, _ in probability if a}
    return {word: max((n, b) for (a, b), n in probability.items() if a == word)[1] for word in words}


def test_the_lexicon_equals_ibm_model_1() -> None:
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
    translations = {"the": "le", "book": "livre", "a": "l'", "friend": "ami"}
    assert word_by_word(translations, "The Book, the zebra.") == "Le livre, le zebra."
    assert word_by_word(translations, "a friend!") == "L'ami !"


def test_the_lexicon_capitalises_names() -> None:
    pairs = [("I see Mary.", "Je vois Marie."), ("Mary sees.", "Marie voit."), ("I see.", "Je vois.")]
    translations = lexicon(pairs)
    assert translations["mary"] == "Marie"
    assert translations["i"] in ("je", "vois")  # capitals at the start of sentences do not count
