"""`input.where`: what is said of a wrong expression, what a right one selects, and that formats agree."""

from __future__ import annotations

import json
import operator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.data.source import open_input
from batchgen.data.where import Where
from batchgen.types import RowFailure, UsageError

WRONG = [
    ("", "expected a column, a number, a text in quotes or `(`, at character 1:"),
    ("a >", "expected a column, a number, a text in quotes or `(`, at character 4:\n  a >\n     ^"),
    ("a > 1 1", "expected an operator, `and`, `or` or the end, at character 7:\n  a > 1 1\n        ^"),
    ("a = null", "nothing is = null; write `is null` or `is not null`"),
    ("1 < a < 3", "comparisons do not chain; join two with `and`, at character 7:"),
    ("a is 3", "expected `null`"),
    ("a not 3", "expected `in`"),
    ("a in ()", "expected a number, a text in quotes, true or false"),
    ("a in (1, 'x')", "a list of numbers cannot hold a text, at character 10:"),
    ("a in (-'x')", "expected a number"),
    ("a = 'x", "a text without its closing quote, at character 5:\n  a = 'x\n      ^"),
    ("`a", "a column name without its closing backquote"),
    ("a ; b", "';' means nothing here, at character 3:"),
    ("lenght(a) = 1", "no function 'lenght'; did you mean length?"),
    ("frobnicate(a)", "no function 'frobnicate'; there are abs, coalesce"),
    ("lower(a, b) = 'x'", "lower takes 1 argument, not 2"),
    ("a.3 = 1", "expected an operator"),
    ("(a = 1", "expected ')'"),
    ("a = 1e999", "the number is too large"),
    ("a = 1 and\nb == = 2", "at character 16:\n  b == = 2\n       ^"),
    ("(" * 60 + "a" + ")" * 60, "nested deeper than 50 levels"),
    ("+".join(["a"] * 60) + " > 1", "more than 50 terms in a row"),
    ("__import__('os')", "no function '__import__'"),
    ("x" * 10_001, "10,001 characters are more than the 10,000 allowed"),
]


@pytest.mark.parametrize(("text", "message"), WRONG)
def test_a_wrong_expression_is_refused_with_its_place(text: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        Where(text)
    assert str(error.value).startswith("input.where: ")
    assert message in str(error.value)


ROW: dict[str, Any] = {
    "n": 5,
    "big": 2**64 + 1,
    "f": 0.1,
    "nan": float("nan"),
    "price": Decimal("0.10"),
    "text": "Grüße, World",
    "yes": True,
    "none": None,
    "tags": ["news", "sport", 3],
    "meta": {"lang": "de", "deep": {"x": 1}, "a b": 2},
    "when": "2024-05-01T10:00:00.000000Z",
    "odd `name": 1,
    "not a name": 7,
    "digits": " 12.50 ",
}

TRUE = [
    "n = 5",
    "n == 5.0 and n <> 6",
    "n * 2 + 1 = 11 and 7 / 2 = 3.5 and -7 % 3 = 2 and 7 % -3 = -2",
    "2 + 3 * 4 = 14 and (2 + 3) * 4 = 20 and 10 - 3 - 2 = 5 and -n = -5 and --n = 5",
    "big = 18446744073709551617 and big > 18446744073709551616",
    "f = 0.1 and price = 0.1 and price = f and price + f = 0.2 and price % 0.03 = 0.01",
    "nan is null and none is null and n is not null and missing is null",
    "not (none = 1 and n = 6)",
    "none = 1 or n = 5",
    "startswith(text, 'Grü') and endswith(text, 'World') and contains(text, 'e, W')",
    "lower(text) = 'grüße, world' and upper('a') = 'A' and trim('  a ') = 'a'",
    "length(text) = 12 and length(tags) = 3",
    "contains(tags, 'sport') and contains(tags, 3) and not contains(tags, 'x')",
    "meta.lang = 'de' and meta.deep.x = 1 and meta.`a b` = 2 and meta.gone.further is null",
    "when >= '2024-05' and when < '2024-06'",
    "`not a name` = 7",
    "n in (1, 5, -3) and text not in ('a', \"b\") and yes in (true)",
    "NOT n IN (1, 2) AND yes",
    "number(digits) = 12.5 and number(n) = 5",
    "coalesce(none, missing, n) = 5",
    "abs(-3) = 3 and abs(0) = 0",
    "'it''s' = \"it's\"",
    "not not yes",
    "yes = true and yes != false",
]

FALSE_OR_NULL = ["n = 6", "none = 1", "none != 1", "not (none = 1)", "missing > 3", "none in (1)", "nan > 0"]

NO_ANSWER = [
    ("text > 3", "column 'text' is a text, 3 is a number, and `>` cannot compare them"),
    ("n = '5'", "column 'n' is a number, '5' is a text"),
    ("yes < false", "column 'yes' is a boolean, False is a boolean, and `<` cannot compare"),
    ("tags = 'a'", "column 'tags' is a list"),
    ("text + 1 = 2", "`+` needs numbers, and column 'text' is a text"),
    ("yes + 1 = 2", "`+` needs numbers, and column 'yes' is a boolean"),
    ("n and yes", "`and` needs true or false, and column 'n' is a number"),
    ("not n", "`not` needs true or false"),
    ("n", "it gives a number, not true or false"),
    ("lower(n) = 'a'", "lower() takes a text, and column 'n' is a number"),
    ("length(n) = 1", "length() takes a text or a list"),
    ("number(text) = 1", "number() takes a number or a text that spells one"),
    ("n.field = 1", "column 'n' is a number and has no field 'field'"),
    ("text in (1, 2)", "column 'text' is a text, and the list after `in` holds numbers"),
    ("n / 0 = 1", "a division by zero"),
    ("price / 0 = 1", "a division by zero"),
    ("price % 0 = 1", "a division by zero"),
    ("1" + "0" * 400 + " / 3 > 1.5", "a number beyond what can be computed"),
]


@pytest.mark.parametrize("text", TRUE)
def test_true(text: str) -> None:
    assert Where(text).selects(ROW)


@pytest.mark.parametrize("text", FALSE_OR_NULL)
def test_false_or_unknown(text: str) -> None:
    assert not Where(text).selects(ROW)


@pytest.mark.parametrize(("text", "message"), NO_ANSWER)
def test_no_answer_is_an_error_of_the_row(text: str, message: str) -> None:
    with pytest.raises(RowFailure) as failure:
        Where(text).selects(ROW)
    assert message in failure.value.error.message


def test_an_unknown_column_is_named_with_the_nearest(tmp_path: Path) -> None:
    where = Where("score > 1 and\n lnag = 'de'")
    assert where.columns == ("score", "lnag")
    with pytest.raises(UsageError, match=r"no column 'lnag'; did you mean 'lang'\?, at character 16:\n   l"):
        where.require_columns(["score", "lang"])
    where.require_columns([])


NAMES = ("a", "b", "t", "u")
VALUE = {
    "a": st.none() | st.integers(-4, 4),
    "b": st.none() | st.sampled_from([-2.5, -1.0, 0.0, 0.5, 1.0, 3.0]),
    "t": st.none() | st.sampled_from(["", "a", "ab", "Ab", "ba"]),
    "u": st.none() | st.booleans(),
}
ROWS = st.lists(st.fixed_dictionaries(VALUE), min_size=1, max_size=12)
COMPARE = {"=": pc.equal, "!=": pc.not_equal, "<": pc.less, "<=": pc.less_equal, ">": pc.greater}
Pair = tuple[str, Any]
"""An expression as text, and as the same thing in pyarrow."""


def numbers() -> st.SearchStrategy[Pair]:
    leaf = st.sampled_from([("a", pc.field("a")), ("b", pc.field("b"))]) | st.integers(0, 4).map(
        lambda n: (str(n), pc.scalar(float(n)))
    )
    signs = {"+": operator.add, "-": operator.sub, "*": operator.mul}

    def joined(x: Pair, sign: str, y: Pair) -> Pair:
        both = [side[1].cast(pa.float64()) for side in (x, y)]
        return f"({x[0]} {sign} {y[0]})", signs[sign](*both)

    return st.recursive(
        leaf, lambda inner: st.builds(joined, inner, st.sampled_from(sorted(signs)), inner), max_leaves=3
    )


def texts() -> st.SearchStrategy[Pair]:
    leaf = st.just(("t", pc.field("t"))) | st.sampled_from(["", "a", "Ab"]).map(
        lambda s: (f"'{s}'", pc.scalar(s))
    )
    return leaf | leaf.map(lambda x: (f"lower({x[0]})", pc.utf8_lower(x[1])))


def conditions() -> st.SearchStrategy[Pair]:
    def compared(x: Pair, sign: str, y: Pair) -> Pair:
        return f"{x[0]} {sign} {y[0]}", COMPARE[sign](x[1], y[1])

    signs = st.sampled_from(sorted(COMPARE))
    leaf = (
        st.builds(compared, numbers(), signs, numbers())
        | st.builds(compared, texts(), signs, texts())
        | st.sampled_from([*NAMES]).map(lambda n: (f"{n} is null", pc.is_null(pc.field(n))))
        | st.just(("u", pc.field("u")))
        | st.sampled_from(["a", "b"]).map(
            lambda s: (f"startswith(t, '{s}')", pc.starts_with(pc.field("t"), s))
        )
    )

    def more(inner: st.SearchStrategy[Pair]) -> st.SearchStrategy[Pair]:
        both = st.tuples(inner, inner)
        return (
            both.map(lambda p: (f"({p[0][0]} and {p[1][0]})", p[0][1] & p[1][1]))
            | both.map(lambda p: (f"({p[0][0]} or {p[1][0]})", p[0][1] | p[1][1]))
            | inner.map(lambda p: (f"not ({p[0]})", ~p[1]))
        )

    return st.recursive(leaf, more, max_leaves=4)


SCHEMA = pa.schema([("a", pa.int64()), ("b", pa.float64()), ("t", pa.string()), ("u", pa.bool_())])


@settings(max_examples=60, deadline=None)
@given(ROWS, conditions())
def test_it_means_what_the_same_expression_means_to_arrow(rows: list[dict[str, Any]], pair: Pair) -> None:
    text, expression = pair
    numbered = [{**row, "row": i} for i, row in enumerate(rows)]
    table = pa.Table.from_pylist(numbered, SCHEMA.append(pa.field("row", pa.int64())))
    kept = table.filter(expression).column("row").to_pylist()
    where = Where(text)
    assert [i for i, row in enumerate(rows) if where.selects(row)] == kept


@settings(max_examples=15, deadline=None)
@given(rows=ROWS, pair=conditions())
def test_formats_agree(tmp_path_factory: Any, rows: list[dict[str, Any]], pair: Pair) -> None:
    folder = tmp_path_factory.mktemp("where")
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), folder / "in.parquet")
    selected = []
    for name in ("in.jsonl", "in.parquet"):
        with open_input(str(folder / name), where=pair[0]) as inputs:
            selected.append([row.ordinal for row in inputs.rows() if row.selected])
    assert selected[0] == selected[1]


def test_a_row_without_an_answer_stays_and_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"n": 1}\n{"n": "x"}\n{broken\n{"n": 5}\n')
    with open_input(str(path), where="n > 3") as inputs:
        rows = list(inputs.rows())
    assert [row.selected for row in rows] == [False, True, True, True]
    assert rows[1].error is not None
    assert rows[1].error.message.startswith("in.jsonl line 2: input.where: column 'n' is a text")
    assert rows[1].error.error_class == "invalid_param"
    assert rows[2].error is not None
    assert rows[2].error.error_class == "invalid_json"
    assert rows[3].error is None


def test_times_of_parquet_compare_as_text(tmp_path: Path) -> None:
    when = pa.array([1_700_000_000, 1_720_000_000, None], pa.timestamp("s", "UTC"))
    pq.write_table(pa.table({"when": when}), tmp_path / "in.parquet")
    with open_input(str(tmp_path / "in.parquet"), where="when < '2024-01-01'") as inputs:
        assert [row.selected for row in inputs.rows()] == [True, False, False]
