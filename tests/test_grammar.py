"""Numbers of things in sentences."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import batchgen
from batchgen.grammar import agreeing, counted, each_of, how_many

PACKAGE = Path(batchgen.__file__).parent
THINGS = re.compile(
    " (?!become|names no )([a-z]+ )?(arguments|attempts|blocks|bytes|calls|characters|columns|digits|errors|"
    "faults|fields|files|ids|layers|lines|names|objects|parts|prompts|records|requests|rows|samples|segments|sequences|"
    r"threads|times|tokens|turns|weights|workers)\b(?!/s)"
)
A_CONSTANT = re.compile("[A-Z_]+")
NO_COUNT = re.compile(
    r"agreeing\(|counted\(|what$|folder$|files\[|model\.__name__|config\.model_type|', '\.join"
)
NEVER_ONE = {
    "_convictions": "the last of several",
    "_max_bytes": "a limit of megabytes",
    "budget.step": "megabytes",
    "len(continuation)": "more than a whole context",
    "len(faults)": "one fault has a sentence of its own",
    "len(text)": "only of long ones",
    "length": "more than a limit",
    "most": "a limit, or the larger of two numbers",
    "num_usable": "for developers",
    "sampling.n": "2 or more",
    "total": "as in 1/1 rows",
}


def test_one_is_not_many() -> None:
    assert [counted(n, "row") for n in (0, 1, 2, 1000)] == ["0 rows", "1 row", "2 rows", "1,000 rows"]
    assert [how_many(n, "row") for n in (0, 1, 1000)] == ["no rows", "1 row", "1,000 rows"]
    assert [each_of(n, "row") for n in (0, 1, 2)] == ["no row needs", "its only row has", "all 2 rows have"]
    assert [agreeing(n, "is", "are") for n in (0, 1, 2)] == ["are", "is", "are"]


def test_no_sentence_counts_one_as_many() -> None:
    """A number before a plural goes through `counted`, unless it cannot be 1."""
    wrong = [
        f"{path.name}:{line}: {{{number}}}{words}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line, number, words in numbers_before_plurals(ast.parse(path.read_text()))
        if not number.endswith(tuple(NEVER_ONE))
    ]
    assert not wrong, "\n".join(["use batchgen.grammar.counted:", *wrong])


def numbers_before_plurals(module: ast.Module) -> Iterator[tuple[int, str, str]]:
    for text in ast.walk(module):
        if not isinstance(text, ast.JoinedStr):
            continue
        for number, words in zip(text.values, text.values[1:], strict=False):
            if isinstance(number, ast.FormattedValue) and isinstance(words, ast.Constant):
                source, plural = ast.unparse(number.value), THINGS.match(str(words.value))
                if plural and not A_CONSTANT.fullmatch(source) and not NO_COUNT.search(source):
                    yield text.lineno, source, plural[0]
