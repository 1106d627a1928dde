"""Which input columns go through to the output, and as what. `plan_output` decides once; the sink applies it.

    input    output   what a column becomes
    Parquet  Parquet  the same Arrow type, field metadata and values, bytes untouched; only texts and bytes
                      that are views inside other types become plain ones
    Parquet  JSONL    the JSON of `arrow_values`: all digits, ISO times, base64 bytes, NaN as null
    JSONL    JSONL    the value as it was, digits of numbers included
    JSONL    Parquet  string, int64, double or bool where all non-null values of the first 1,000 rows agree;
                      all else, and whatever does not fit later, as members of one JSON text column `extra`

An integer of up to 53 bits agrees with double. A number that a double cannot hold (more than 17 digits, or
so small that it becomes 0) agrees with none. Each choice is JSON-able, to be pinned in the manifest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol, cast

import pyarrow as pa

from batchgen.data.declared_values import DeclaredColumn
from batchgen.data.exact_json import ExactFloat, encode
from batchgen.data.row import Row
from batchgen.data.table_reader import ArrowRow
from batchgen.types import DriftError

_EXACT_INT = 2**53
_DECLARED = "declared "
_DOUBLE_DIGITS = 17


class ColumnPassthrough(Protocol):
    """For Parquet output: the Arrow fields, and the arrays of one row group."""

    def fields(self) -> list[pa.Field]: ...

    def arrays(self, rows: Sequence[Row]) -> list[pa.ChunkedArray | pa.Array]: ...

    def to_json(self) -> dict[str, Any]: ...


class MemberPassthrough(Protocol):
    """For JSONL output: the members of one record, as `exact_json.encode` takes them."""

    def members(self, row: Row) -> Mapping[str, Any]: ...

    def to_json(self) -> dict[str, Any]: ...


Passthrough = ColumnPassthrough | MemberPassthrough


@dataclass(frozen=True, slots=True)
class NoPassthrough:
    """A format without columns of the user's."""

    def members(self, row: Row) -> Mapping[str, Any]:
        return {}

    def to_json(self) -> dict[str, Any]:
        return {"kind": "none"}


@dataclass(frozen=True, slots=True)
class AsTheyAre:
    """Members of records that were an output once, for `export`. `selected`: only these; None for all."""

    selected: Collection[str] | None = None

    def members(self, row: Row) -> Mapping[str, Any]:
        if self.selected is None:
            return row.values
        return {name: value for name, value in row.values.items() if name in self.selected}

    def to_json(self) -> dict[str, Any]:
        return {"kind": "as they are", "selected": _listed(self.selected)}


@dataclass(frozen=True, slots=True)
class ArrowPassthrough:
    """Columns of Parquet input, by their own types."""

    schema: pa.Schema

    def fields(self) -> list[pa.Field]:
        return list(self.schema)

    def arrays(self, rows: Sequence[Row]) -> list[pa.ChunkedArray | pa.Array]:
        slices = list(_slices(rows))
        return [_column([batch.column(field.name) for batch in slices], field.type) for field in self.schema]

    def members(self, row: Row) -> Mapping[str, Any]:
        values = cast(ArrowRow, row.values)
        return {name: values.full(name) for name in self.schema.names}

    def to_json(self) -> dict[str, Any]:
        return {"kind": "arrow", "columns": [[field.name, str(field.type)] for field in self.schema]}


@dataclass(frozen=True, slots=True)
class TypedPassthrough:
    """JSONL input to Parquet: typed columns, and `extra` for the rest.

    Args:
        kinds: column to "string", "int64", "double" or "bool", or "declared " and a type of `input.schema`.
        extra: name of the JSON text column.
        selected: only these go through; None for all.
        omitted: these never do.
    """

    kinds: Mapping[str, str]
    extra: str
    selected: Collection[str] | None
    omitted: Collection[str]

    def fields(self) -> list[pa.Field]:
        typed = [pa.field(name, _kind(kind).arrow) for name, kind in self.kinds.items()]
        return [*typed, pa.field(self.extra, pa.string())]

    def arrays(self, rows: Sequence[Row]) -> list[pa.ChunkedArray | pa.Array]:
        members = [row.values for row in rows]
        columns: list[pa.ChunkedArray | pa.Array] = []
        all_fit = True
        for name, key in self.kinds.items():
            column, fits = _kind(key).array([values.get(name) for values in members])
            columns.append(column)
            all_fit = all_fit and fits
        expected = frozenset((*self.kinds, *self.omitted))
        rests = [None if all_fit and expected.issuperset(row.values) else self._rest(row) for row in rows]
        columns.append(pa.array(rests, pa.string()))
        return columns

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "typed",
            "columns": [[name, kind] for name, kind in self.kinds.items()],
            "extra": self.extra,
            "selected": _listed(self.selected),
            "omitted": sorted(self.omitted),
        }

    def _rest(self, row: Row) -> str | None:
        rest = {
            name: value
            for name, value in _going_through(row, self.selected, self.omitted).items()
            if name not in self.kinds or not (value is None or _kind(self.kinds[name]).fits(value))
        }
        return encode(rest) if rest else None


@dataclass(frozen=True, slots=True)
class VerbatimPassthrough:
    """JSONL input to JSONL output: members as they were.

    Args:
        reserved: our own names; a row that has one of them later than the first 1,000 rows keeps it
            inside the object `extra`.
    """

    extra: str
    reserved: Collection[str]
    selected: Collection[str] | None
    omitted: Collection[str]
    _taken: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_taken", frozenset((self.extra, *self.reserved)))

    def members(self, row: Row) -> Mapping[str, Any]:
        taken, values = self._taken, _going_through(row, self.selected, self.omitted)
        if taken.isdisjoint(values):
            return values
        members = {name: value for name, value in values.items() if name not in taken}
        members[self.extra] = {name: value for name, value in values.items() if name in taken}
        return members

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "verbatim",
            "extra": self.extra,
            "reserved": sorted(self.reserved),
            "selected": _listed(self.selected),
            "omitted": sorted(self.omitted),
        }


def declared_kinds(
    kinds: Mapping[str, str], declared: Mapping[str, str], names: Collection[str]
) -> dict[str, str]:
    """`kinds`, with those of `names` that `input.schema` declares as it says, wherever they were seen."""
    going = {name: f"{_DECLARED}{type_}" for name, type_ in declared.items() if name in names}
    return {**{name: going.get(name, kind) for name, kind in kinds.items()}, **going}


def decide_kinds(rows: Iterable[Row], names: Collection[str]) -> dict[str, str]:
    """The kind of each of `names` on which all non-null values of `rows` agree, in order of first appearance.

    Columns without a common kind, or without any value, are left out.
    """
    candidates: dict[str, list[str]] = {}
    for row in rows:
        for name, value in row.values.items():
            if name in names and value is not None:
                kinds = candidates.get(name, list(_KINDS))
                candidates[name] = [kind for kind in kinds if _KINDS[kind].fits(value)]
    return {name: kinds[0] for name, kinds in candidates.items() if kinds}


def passthrough_from_json(data: Mapping[str, Any], schema: pa.Schema | None) -> Passthrough:
    """Rebuilds a pinned choice; `schema` is that of Parquet input.

    Raises:
        DriftError: the Parquet schema no longer has the pinned columns.
    """
    if data["kind"] == "none":
        return NoPassthrough()
    if data["kind"] == "arrow":
        return _pinned_arrow(data, schema)
    if data["kind"] == "typed":
        kinds = dict(data["columns"])
        return TypedPassthrough(kinds, data["extra"], data["selected"], data["omitted"])
    return VerbatimPassthrough(data["extra"], data["reserved"], data["selected"], data["omitted"])


def arrow_passthrough(schema: pa.Schema, names: Iterable[str]) -> ArrowPassthrough:
    """Columns `names` of `schema`, without what belongs to their file alone, which are field ids."""
    return ArrowPassthrough(pa.schema([_bare(schema.field(name)) for name in names]))


def _pinned_arrow(data: Mapping[str, Any], schema: pa.Schema | None) -> ArrowPassthrough:
    names = [name for name, _ in data["columns"]]
    types = dict(data["columns"])
    found = {} if schema is None else {field.name: str(_writable(field.type)) for field in schema}
    for name in names:
        if found.get(name) != types[name]:
            raise DriftError(
                f"input.path: column {name!r} was {types[name]} when the job began and is now "
                f"{found.get(name, 'missing')}; restore the input, choose another output.path, or start over "
                "with --overwrite"
            )
    return arrow_passthrough(schema or pa.schema([]), names)


def _bare(field: pa.Field) -> pa.Field:
    kept = {key: value for key, value in (field.metadata or {}).items() if key != b"PARQUET:field_id"}
    return field.with_type(_writable(field.type)).with_metadata(kept or None)


def _slices(rows: Sequence[Row]) -> Iterable[pa.RecordBatch]:
    """The rows as slices of the batches they came from; neighbours are one slice."""
    start = 0
    for end in range(1, len(rows) + 1):
        if end < len(rows):
            here, before = cast(ArrowRow, rows[end].values), cast(ArrowRow, rows[end - 1].values)
            if here.batch is before.batch and here.index == before.index + 1:
                continue
        first = cast(ArrowRow, rows[start].values)
        yield first.batch.batch.slice(first.index, end - start)
        start = end


def _column(slices: list[pa.Array], type_: pa.DataType) -> pa.ChunkedArray:
    return pa.chunked_array([part if part.type == type_ else part.cast(type_) for part in slices], type=type_)


def _writable(type_: pa.DataType) -> pa.DataType:
    """The type itself, with plain texts and bytes for views inside it, which Arrow does not write."""
    if pa.types.is_struct(type_):
        return pa.struct([_writable_field(type_.field(i)) for i in range(type_.num_fields)])
    if pa.types.is_map(type_):
        key, item = _writable_field(type_.key_field), _writable_field(type_.item_field)
        return pa.map_(key, item, type_.keys_sorted)
    if pa.types.is_list(type_):
        return pa.list_(_writable_field(type_.value_field))
    if pa.types.is_large_list(type_):
        return pa.large_list(_writable_field(type_.value_field))
    if pa.types.is_fixed_size_list(type_):
        return pa.list_(_writable_field(type_.value_field), type_.list_size)
    return type_


def _writable_field(field: pa.Field) -> pa.Field:
    if pa.types.is_string_view(field.type):
        return field.with_type(pa.string())
    if pa.types.is_binary_view(field.type):
        return field.with_type(pa.binary())
    return field.with_type(_writable(field.type))


def _going_through(row: Row, selected: Collection[str] | None, omitted: Collection[str]) -> dict[str, Any]:
    return {
        name: value
        for name, value in row.values.items()
        if name not in omitted and (selected is None or name in selected)
    }


def _listed(names: Collection[str] | None) -> list[str] | None:
    return None if names is None else list(names)


@dataclass(frozen=True, slots=True)
class _Kind:
    arrow: pa.DataType
    plain: type
    fits: Callable[[Any], bool]

    def array(self, values: Sequence[Any]) -> tuple[pa.Array, bool]:
        """The column of what fits, null for the rest, and whether all did."""
        # Mostly all values are of one plain type, which Arrow converts at once.
        if {self.plain, type(None)}.issuperset(map(type, values)):
            with contextlib.suppress(OverflowError, pa.ArrowInvalid):
                return pa.array(values, self.arrow), True
        fitting = [value if self.fits(value) else None for value in values]
        return pa.array(fitting, self.arrow), fitting == values


def _is_int64(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def _is_double(value: Any) -> bool:
    if isinstance(value, ExactFloat):
        digits = value.text.lower().partition("e")[0].translate(_NOT_DIGITS).lstrip("0")
        return len(digits) <= _DOUBLE_DIGITS and (value != 0.0 or not digits)
    return isinstance(value, float) or (_is_int64(value) and abs(value) <= _EXACT_INT)


_NOT_DIGITS = str.maketrans("", "", "-+.")

# In order of preference: integers fit double too.
_KINDS = {
    "bool": _Kind(pa.bool_(), bool, lambda value: isinstance(value, bool)),
    "int64": _Kind(pa.int64(), int, _is_int64),
    "double": _Kind(pa.float64(), float, _is_double),
    "string": _Kind(pa.string(), str, lambda value: isinstance(value, str)),
}


@dataclass(frozen=True, slots=True)
class _DeclaredKind:
    """A column of a declared type; what does not fit is null here, and its row has said so."""

    arrow: pa.DataType
    column: DeclaredColumn

    def fits(self, value: Any) -> bool:
        return self.column.fits(value)

    def array(self, values: Sequence[Any]) -> tuple[pa.Array, bool]:
        held, all_fit = [], True
        for value in values:
            fits = value is None or self.column.fits(value)
            held.append(self.column.value(value) if fits else None)
            all_fit = all_fit and fits
        return pa.array(held, self.arrow), all_fit


@lru_cache(maxsize=1024)
def _kind(key: str) -> _Kind | _DeclaredKind:
    if not key.startswith(_DECLARED):
        return _KINDS[key]
    column = DeclaredColumn("", key.removeprefix(_DECLARED))
    return _DeclaredKind(column.type.arrow(), column)
