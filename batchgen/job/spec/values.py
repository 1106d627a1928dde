"""The types of values that several sections of a job file have, and how they are spelled there."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from batchgen.job.units import parse_address, parse_duration, parse_share, parse_size

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def as_tuple(value: Any) -> Any:
    """A list as what a frozen model holds; anything else as it is, for the type to refuse."""
    return tuple(value) if isinstance(value, list) else value


def dtype_name(value: Any) -> Any:
    """The full name of a data type that has a short one; anything else as it is, for the type to refuse."""
    return _DTYPES.get(value, value) if isinstance(value, str) else value


def _positive(value: float) -> float:
    if not value > 0:
        raise ValueError("must be above 0")
    return value


def _not_negative(value: float) -> float:
    if value < 0:
        raise ValueError("must be 0 or more")
    return value


def distinct(value: tuple[str, ...]) -> tuple[str, ...]:
    """Raises ValueError if a text occurs twice."""
    if len(set(value)) != len(value):
        raise ValueError("given twice")
    return value


Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[tuple[Text, ...], BeforeValidator(as_tuple)]
TokenIds = Annotated[tuple[Annotated[int, Field(ge=0, lt=2**62)], ...], BeforeValidator(as_tuple)]
# Keys of a map are strings in YAML and JSON alike.
TokenId = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,17})$")]
# What a job file may hold where something else is kept; the schema for editors is made from these.
Duration = BeforeValidator(
    parse_duration, json_schema_input_type=float | Annotated[str, Field(pattern=r"\d")]
)
Size = BeforeValidator(parse_size, json_schema_input_type=int | Annotated[str, Field(pattern=r"^\s*\d")])
Share = BeforeValidator(parse_share, json_schema_input_type=float | Annotated[str, Field(pattern=r"\d ?%$")])
_Port = Annotated[int, Field(ge=0, le=65535)]
Address = Annotated[
    str,
    BeforeValidator(parse_address, json_schema_input_type=_Port | Annotated[str, Field(pattern=r"\d\s*$")]),
]
Seconds = Annotated[float, Duration, AfterValidator(_not_negative)]
PositiveSeconds = Annotated[float, Duration, AfterValidator(_positive)]
Bytes = Annotated[int, Size, AfterValidator(_not_negative)]
PositiveBytes = Annotated[int, Size, AfterValidator(_positive)]
Count = Annotated[int, Field(ge=1, lt=2**62)]
Auto = Literal["auto"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16", "fp32", "bf16", "fp16"]
KVDtypeName = DtypeName | Literal["int8", "fp8"]
COUNT = "a whole number of 1 or more"
DURATION = "a duration such as 20s, 5m or 1h30m, or seconds"
