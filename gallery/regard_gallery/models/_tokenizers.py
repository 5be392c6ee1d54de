"""Builds tokenizers. Converts the exceptions of the package `tokenizers` to ValueErrors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def read_tokenizer(path: Path) -> Any:
    """Returns the tokenizer in a file tokenizer.json."""
    from tokenizers import Tokenizer

    with _faults(path.name):
        return Tokenizer.from_file(str(path))


def byte_level(words: list[str], merges: list[str], *, control: list[str], **options: Any) -> Any:
    """Returns a Transformers tokenizer with byte-level BPE. Each digit is a token, as in SmolLM2.

    `control` lists the special tokens. `options` are passed to `PreTrainedTokenizerFast`.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    with _faults("the tokenizer"):
        pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
        tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, pairs))
    rules = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(rules)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, normalized=False) for word in control])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **options
    )


def trained(texts: Iterable[str], size: int, *, control: list[str], first_space: bool = True) -> Any:
    """Returns a byte-level BPE tokenizer with `size` tokens, trained on `texts`.

    The first tokens are the special tokens `control`. A word includes the space before it. With
    `first_space`, a space is added before the first word of a text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=first_space)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=control, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def by_word(tokenizer: Any, tokens: Iterable[int]) -> list[list[int]]:
    """Groups byte-level tokens into words. A token that begins with a space begins a word."""
    groups: list[list[int]] = []
    for token in tokens:
        if groups and not (tokenizer.id_to_token(token) or "").startswith("Ġ"):
            groups[-1].append(token)
        else:
            groups.append([token])
    return groups


@contextmanager
def _faults(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ValueError(f"{what}: expected a sound tokenizer: {error}") from None
