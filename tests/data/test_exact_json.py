"""JSON in and out without losing a digit, and every trap of the parsers decided on purpose."""

import json
import math
import pickle
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.data.exact_json import MAX_DEPTH, ExactFloat, LineDecoder, encode
from batchgen.types import RowFailure


def decode(line: str | bytes, replace: bool = False):
    data = line.encode() if isinstance(line, str) else line
    return LineDecoder(replace).decode(data)


def error_class(line: str | bytes) -> str:
    with pytest.raises(RowFailure) as caught:
        decode(line)
    return caught.value.error.error_class.value


@pytest.mark.parametrize(
    "number",
    ["123456789012345678901234567890", "18446744073709551616", "1.50", "1E5", "0.1234567890123456789012",
     "1e-999", "-0.0", "0.10000000000000001", "7", "-12", "9" * 4300],
)  # fmt: skip
def test_numbers_keep_every_digit(number: str) -> None:
    values = decode(f'{{"n": {number}}}').values
    assert encode(values) == f'{{"n": {number}}}'


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"a": 1, "b": {"c": 1, "d": 2, "c": 3}}', "the key 'c' occurs twice in one object"),
        ('{"a": [NaN]}', "NaN is no JSON number; write null"),
        ('{"a": -Infinity}', "-Infinity is no JSON number"),
        ('{"a": "x\ty"}', "a control character stands in a string"),
        ('{"a": 1} {"a": 2}', "text follows the end"),
    ],
)
def test_strict_json(line: str, problem: str) -> None:
    with pytest.raises(RowFailure, match=problem) as caught:
        LineDecoder(False, strict=True).decode(line.encode())
    assert caught.value.error.error_class.value == "invalid_json"
    assert LineDecoder(False, strict=True).decode(b'{"a": "x\\ty", "b": 1e5}').notes == ()


def test_a_float_is_a_float_whatever_its_text() -> None:
    value = decode('{"n": 1.50}').values["n"]
    assert value == 1.5
    assert f"{value}" == "1.5"
    assert pickle.loads(pickle.dumps(value)).text == "1.50"
    assert type(decode('{"n": 1.5}').values["n"]) is float


@pytest.mark.parametrize("number", ["1e999", "-1e400", "1" * 5000, "-" + "1" * 5000, "1" * 400 + ".5"])
def test_numbers_beyond_range(number: str) -> None:
    assert error_class(f'{{"n": {number}}}') == "number_out_of_range"


def test_number_message_is_short() -> None:
    with pytest.raises(RowFailure, match=r"11111111111111111111\.\.\. of 5,000 characters"):
        decode(f'{{"n": {"1" * 5000}}}')


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity"])
def test_not_a_number_becomes_null_with_a_note(text: str) -> None:
    decoded = decode(f'{{"a": 1.5, "score": {text}, "deep": {{"x": [0.5, {text}]}}}}')
    assert decoded.values == {"a": 1.5, "score": None, "deep": {"x": [0.5, None]}}
    assert decoded.notes == ("nan_replaced",)
    assert decoded.nonfinite == ("score", "deep")


@pytest.mark.parametrize(
    "line",
    ["[" * 3000, '{"a": ' * 3000, "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "", "{", '{"a": 1} x',
     "nul", '{"a": 01}', '{"a": .5}', "{'a': 1}", '{"a": "\\v"}', '{"a": 1,}', "\v", "\xa0{}"],
)  # fmt: skip
def test_invalid_json(line: str) -> None:
    assert error_class(line) == "invalid_json"


@pytest.mark.parametrize("line", ["[1]", "1", "null", "true", '"text"', "1.5", "NaN"])
def test_only_objects_are_rows(line: str) -> None:
    with pytest.raises(RowFailure, match="not an object"):
        decode(line)


def test_deepest_allowed_nesting_survives_a_round_trip() -> None:
    line = '{"a": ' + "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1) + "}"
    assert encode(decode(line).values) == line


def test_brackets_in_strings_are_not_nesting() -> None:
    text = '[[{"\\' * 500
    assert decode(json.dumps({"a": text})).values == {"a": text}


def test_depth_check_is_linear_on_unclosed_quotes() -> None:
    line = b'{"a": "' + b'\\"[' * 200_000
    assert error_class(line) == "invalid_json"


def test_duplicate_keys_last_wins_with_a_note() -> None:
    decoded = decode('{"a": 1, "b": {"x": 1, "x": 2}, "a": 3}')
    assert decoded.values == {"a": 3, "b": {"x": 2}}
    assert decoded.notes == ("duplicate_key",)


def test_raw_control_characters_are_accepted_with_a_note() -> None:
    decoded = decode('{"a": "x\v\f\ty", "n": NaN}')
    assert decoded.values == {"a": "x\v\f\ty", "n": None}
    assert set(decoded.notes) == {"control_character", "nan_replaced"}


def test_lone_surrogate_by_policy() -> None:
    assert error_class(r'{"a": "ok \ud83d"}') == "invalid_unicode"
    assert error_class(r'{"\udc00": 1}') == "invalid_unicode"
    assert error_class(r'{"a": [{"b": "\ude00\ud83d"}]}') == "invalid_unicode"
    replaced = decode(r'{"a": "ok \ud83d", "b": "\ud83d\ude00"}', replace=True)
    assert replaced.values == {"a": "ok \ufffd", "b": "\U0001f600"}
    assert replaced.notes == ("invalid_unicode_replaced",)


def test_escaped_pair_and_escaped_backslash_are_fine() -> None:
    decoded = decode(r'{"a": "\ud83d\ude00", "b": "\\ud83d"}')
    assert decoded.values == {"a": "\U0001f600", "b": "\\ud83d"}
    assert decoded.notes == ()


def test_invalid_utf8_by_policy() -> None:
    line = b'{"a": "\xff"}'
    with pytest.raises(RowFailure, match="byte 0xff at byte 7 of the line"):
        decode(line)
    assert error_class(b'{"a": "\xed\xa0\xbd"}') == "invalid_unicode"
    assert decode(line, replace=True).values == {"a": "\ufffd"}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (math.nan, "null"),
        ([1.0, math.inf], "[1.0, null]"),
        ({"x": {"y": -math.inf, "z": [math.nan]}}, '{"x": {"y": null, "z": [null]}}'),
        (Decimal("12.340"), "12.340"),
        (Decimal("1E+3"), "1E+3"),
        (Decimal("NaN"), "null"),
        (b"\x00\xff", '"AP8="'),
        ([True, None, 1, "é"], '[true, null, 1, "é"]'),
        ("a\u2028b\u2029c\x85d\ud800e\n", '"a\\u2028b\\u2029c\\u0085d\ufffde\\n"'),
        ({"k\u2028": ExactFloat("1.0e0")}, '{"k\\u2028": 1.0e0}'),
    ],
)
def test_only_strict_json_is_written(value: object, text: str) -> None:
    assert encode(value) == text
    json.loads(text, parse_constant=pytest.fail)


def test_what_has_no_json_form_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="set"):
        encode({"a": {1}})


_LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)
_VALUES = st.recursive(
    _LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8
)


@settings(max_examples=60)
@given(st.dictionaries(st.text(), _VALUES, max_size=5))
def test_any_object_round_trips_on_one_line(values: dict) -> None:
    text = encode(values)
    assert len(text.splitlines()) == 1
    assert decode(text).values == values
    assert json.loads(text) == values


@given(st.decimals(allow_nan=False, allow_infinity=False, places=5))
def test_any_decimal_keeps_its_digits(value: Decimal) -> None:
    line = f'{{"n": {value}}}'
    assert encode(decode(line).values) == line
