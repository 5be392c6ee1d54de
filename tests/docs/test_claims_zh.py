"""Checks docs/zh/claims.md: every claim is there, with the recorded verdict and numbers."""

from __future__ import annotations

from collections import Counter

import pytest

from support.scripts import load_script
from support.texts import NUMBER

pytest.importorskip("regard_gallery")

from regard_gallery.claims import GROUPS, NAMES, records
from regard_gallery.claims.finding import VERDICTS

ZH = load_script("tools/docs/claims_zh.py")
TEXTS, RECORDS = ZH.texts(), records.read()
NUMBER_ONE = {"verdict": "right", "claim": "2 heads", "measured": "7 MB", "correct": "8"}


def test_every_claim_has_a_chinese_text() -> None:
    assert {*TEXTS["claims"]} == {*NAMES}
    assert list(TEXTS["groups"]) == list(GROUPS)
    assert tuple(TEXTS["verdicts"]) == VERDICTS
    assert len({*TEXTS["verdicts"].values()}) == len(VERDICTS)


def test_the_page_is_written_from_the_record() -> None:
    _, begin, rest = ZH.PAGE.read_text(encoding="utf-8").partition(ZH.BEGIN)
    assert begin
    assert rest.partition(records.END)[0] == f"\n{ZH.tables(RECORDS)}\n"


@pytest.mark.parametrize("name", NAMES)
def test_verdict_and_numbers_are_those_of_the_record(name: str) -> None:
    page, record = ZH.PAGE.read_text(encoding="utf-8"), RECORDS[name]
    (row,) = (line for line in page.splitlines() if line.startswith(f"| [`{name}`]"))
    _, claim, verdict, measured, correct = row.strip("| ").split(" | ")
    assert verdict == f"**{TEXTS['verdicts'][record['verdict']]}**"
    for field, text in (("claim", claim), ("measured", measured), ("correct", correct)):
        assert Counter(NUMBER.findall(text)) == Counter(NUMBER.findall(record[field])), field


def test_values_and_verdicts_are_put_into_the_text() -> None:
    english, chinese = "{verdict}: {n} of {all}", "{all} 个中的 {n} 个：{verdict}"
    text = ZH.translated("place", "wrong: 3 of 1,024", english, chinese, TEXTS["verdicts"])
    assert text == "1,024 个中的 3 个：错误"


@pytest.mark.parametrize(
    ("name", "field", "old", "new", "chinese"),
    [
        ("decomposition", "correct", "easier with 4 heads", "harder with 4 heads", "4 个头更难"),
        ("linformer_kernel", "correct", "raise", "pass", "个词元不会报错"),
        ("without_softmax", "measured", "loss higher", "loss lower", "损失低 "),
        ("without_softmax", "measured", "loss higher", "loss not measurably different,", "没有可测的差别"),
    ],
)
def test_other_outcomes_have_chinese_words(name: str, field: str, old: str, new: str, chinese: str) -> None:
    assert old in RECORDS[name][field]
    changed = {**RECORDS[name], field: RECORDS[name][field].replace(old, new)}
    assert chinese in ZH.translate({name: changed})[name][field]


def test_a_claim_without_a_text_raises() -> None:
    with pytest.raises(ValueError, match=r"expected a text for every claim, got none for \{'another'.*7 MB"):
        ZH.translate({"another": NUMBER_ONE})


def test_a_text_that_does_not_fit_the_record_raises() -> None:
    changed = {**RECORDS["parameters"], "correct": "3 d^2"}
    with pytest.raises(
        ValueError, match=r"claims\.parameters\.correct: expected a pattern that fits '3 d\^2'"
    ):
        ZH.translate({"parameters": changed})


def test_words_in_the_place_of_numbers_raise() -> None:
    with pytest.raises(ValueError, match=r"place: expected numbers for the names, got \['nothing'\]"):
        ZH.translated("place", "takes nothing", "takes {memory}", "占用 {memory}", {})
