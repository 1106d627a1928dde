"""Arrow values as Python: every type that Parquet can hold, and hashes that do not depend on pyarrow."""

import datetime
from decimal import Decimal

import pyarrow as pa
import pytest

from batchgen.data.arrow_values import drop_null_fields, to_python, unsupported_type, values_digest

UTC_US = pa.timestamp("us", "UTC")
PARIS_MS = pa.timestamp("ms", "Europe/Paris")
TENSOR = pa.ExtensionArray.from_storage(
    pa.fixed_shape_tensor(pa.int8(), [2]), pa.array([[1, 2], [3, 4]], pa.list_(pa.int8(), 2))
)
DICTIONARY = pa.array(["a", None, "b"]).dictionary_encode()


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (pa.nulls(2), [None, None]),
        (pa.array([True, None]), [True, None]),
        (pa.array([2**64 - 1], pa.uint64()), [2**64 - 1]),
        (pa.array([1.5, None], pa.float16()), [1.5, None]),
        (pa.array([0.1], pa.float32()), [0.10000000149011612]),
        (pa.array(["x"], pa.large_string()), ["x"]),
        (pa.array(["x"], pa.string_view()), ["x"]),
        (pa.array([b"\xff"], pa.binary(1)), [b"\xff"]),
        (pa.array([Decimal("12.340")]), [Decimal("12.340")]),
        (pa.array([Decimal("1.0")], pa.decimal256(70, 3)), [Decimal("1.000")]),
        (pa.array([0, -1, 2932897], pa.date32()), ["1970-01-01", "1969-12-31", "10000-01-01"]),
        (pa.array([86_400_000], pa.date64()), ["1970-01-02"]),
        (pa.array([3661], pa.time32("s")), ["01:01:01"]),
        (pa.array([1], pa.time32("ms")), ["00:00:00.001"]),
        (pa.array([86_399_999_999_999], pa.time64("ns")), ["23:59:59.999999999"]),
        (pa.array([1, None], pa.timestamp("ns")), ["1970-01-01T00:00:00.000000001", None]),
        (pa.array([-1], UTC_US), ["1969-12-31T23:59:59.999999Z"]),
        (pa.array([0], PARIS_MS), ["1970-01-01T00:00:00.000Z"]),
        (pa.array([253402300800], pa.timestamp("s")), ["10000-01-01T00:00:00"]),
        (pa.array([-1500, 1], pa.duration("ms")), ["-PT1.500S", "PT0.001S"]),
        (pa.array([90], pa.duration("s")), ["PT90S"]),
        (pa.array([[1], None, [], [2, None]]), [[1], None, [], [2, None]]),
        (pa.array([["a"]], pa.large_list(pa.string())), [["a"]]),
        (pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int8(), 2)), [[1, 2], None, [3, 4]]),
        (pa.array([{"a": 1, "b": None}, None]), [{"a": 1, "b": None}, None]),
        (pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int8())), [{"k": 1}, None, {}]),
        (pa.array([[(1, "x")]], pa.map_(pa.int8(), pa.string())), [[[1, "x"]]]),
        (pa.array([[("k", 1), ("k", 2)]], pa.map_(pa.string(), pa.int8())), [[["k", 1], ["k", 2]]]),
        (DICTIONARY, ["a", None, "b"]),
        (TENSOR, [[1, 2], [3, 4]]),
        (pa.array([[{"t": datetime.date(2024, 1, 1)}]]), [[{"t": "2024-01-01"}]]),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "",
)
def test_each_type(array: pa.Array, expected: list) -> None:
    assert unsupported_type(array.type) is None
    assert to_python(array) == expected
    for start in range(len(array)):
        assert to_python(array.slice(start, 1)) == expected[start : start + 1]


@pytest.mark.parametrize(
    "type_", [pa.month_day_nano_interval(), pa.list_(pa.month_day_nano_interval()), pa.list_view(pa.int8())]
)
def test_types_without_a_meaning_here_say_so(type_: pa.DataType) -> None:
    assert "is not supported" in (unsupported_type(type_) or "")


def test_digests_are_pinned() -> None:
    # Recorded indexes hold such digests: a change here makes every existing job unresumable.
    values = [None, True, -1, 2**64 - 1, 0.1, "é", b"\xff", Decimal("1.20"), [1], {"a": None}]
    assert values_digest(values).hex() == "cc463421fec4f839d4f688cc87985b23"


@pytest.mark.parametrize("other", [[1.0], ["1"], [b"1"], [True], [[1]], [None], [Decimal(1)], [1, None]])
def test_digests_tell_types_apart(other: list) -> None:
    assert values_digest([1]) != values_digest(other)


def test_null_fields_are_dropped_at_every_depth_but_not_list_items() -> None:
    value = {"a": None, "b": [None, {"c": None, "d": 0}], "e": {"f": None}}
    assert drop_null_fields(value) == {"b": [None, {"d": 0}], "e": {}}
