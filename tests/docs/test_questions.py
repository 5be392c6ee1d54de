"""Runs the blocks and commands of docs/questions.md and compares the printed text with the page."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from typing import NamedTuple

import pytest

from support import HAVE_CORE, ROOT
from support.processes import python

FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
PERCENTAGE = re.compile(r"[\d.]+%")
NUMBER = re.compile(r"(?<![A-Za-z_.\d])\d+(?:,\d{3})*(?:\.\d+)?(?![A-Za-z_\d])")
RESULT = re.compile(r"^\*\*(?:Result\.|结果。)\*\*(.+?)\n(?:\n|\Z)", re.M | re.S)
LINK = re.compile(r"\]\([^)]+\)")


class Question(NamedTuple):
    """A section of the page: `code` in Python or shell, and the text that it prints."""

    title: str
    answer: str
    language: str
    code: str
    printed: str
    result: str


def question(section: str) -> Question:
    (language, code), (text, printed) = FENCE.findall(section)
    assert text == "text"
    title, answer = section[: section.index("```")].split("\n", 1)
    (result,) = RESULT.findall(section + "\n")
    return Question(title, answer, language, code, printed, result)


def read(page: str) -> tuple[str, list[Question]]:
    """Returns the imports at the beginning of a page, and its questions."""
    head, *sections = re.split(r"^## ", (ROOT / page).read_text(encoding="utf-8"), flags=re.M)
    ((_, imports),) = FENCE.findall(head)
    return imports, [question(section) for section in sections]


def unprinted(q: Question) -> list[str]:
    """Returns the numbers of the result that the printed text does not have."""
    return [number for number in NUMBER.findall(q.result) if number not in NUMBER.findall(q.printed)]


IMPORTS, QUESTIONS = read("docs/questions.md")
OTHERS = read("docs/zh/questions.md")[1]
BLOCKS = [q for q in QUESTIONS if q.language == "python"]
COMMANDS = [q for q in QUESTIONS if q.language == "sh"]
needs_core = pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built")


@needs_core
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("q", BLOCKS, ids=[q.title for q in BLOCKS])
def test_blocks_print_the_text_of_the_page(q: Question) -> None:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(IMPORTS + q.code, q.title, "exec"), {"__name__": "__main__"})
    assert output.getvalue() == q.printed


def printed_alike(line: str, other: str) -> bool:
    """Returns whether two lines are equal, except for percentages that differ by at most 2 points."""
    if PERCENTAGE.split(line) != PERCENTAGE.split(other):
        return False
    pairs = zip(PERCENTAGE.findall(line), PERCENTAGE.findall(other), strict=True)
    return all(abs(float(a[:-1]) - float(b[:-1])) <= 2 for a, b in pairs)


@needs_core
@pytest.mark.parametrize("q", COMMANDS, ids=[q.title for q in COMMANDS])
def test_commands_print_the_text_of_the_page(q: Question) -> None:
    """The page may omit lines of the output.

    Percentages of trained models depend on the instruction set and may differ by 2 points.
    """
    program, script, *arguments = shlex.split(q.code)
    assert program == "python"
    child = python(str(ROOT / script), *arguments, OMP_NUM_THREADS="1")
    assert child.returncode == 0, child.stderr
    assert q.printed
    for line in q.printed.splitlines():
        assert any(printed_alike(line, other) for other in child.stdout.splitlines()), line


@pytest.mark.parametrize("q", QUESTIONS + OTHERS, ids=[q.title for q in QUESTIONS + OTHERS])
def test_a_result_has_only_printed_numbers(q: Question) -> None:
    assert q.title[-1] in "?？"
    assert LINK.search(q.answer)
    assert NUMBER.search(q.result)
    assert not unprinted(q)


def test_pages_print_the_same() -> None:
    assert [(q.language, q.code, q.printed) for q in OTHERS] == [
        (q.language, q.code, q.printed) for q in QUESTIONS
    ]


def test_a_wrong_number_is_found() -> None:
    section = "Why?\n[x](y)\n```sh\nz\n```\n```text\nn = 1,024: 0.50, 20%\n```\n\n**Result.** {}\n"
    assert unprinted(question(section.format("0.50 and 20 % of 1,024."))) == []
    assert unprinted(question(section.format("0.5, 2 and 24."))) == ["0.5", "2", "24"]
