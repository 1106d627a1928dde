"""A row's own sampling (`sampling.per_row`): a dict of overrides over the job's section, checked key by key.

The worker's intake resolves each row; `show` prints the result. A fault is that row's `invalid_param`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any, NoReturn, get_type_hints

from batchgen.json_problem import read_json
from batchgen.sampling.resolve import resolve_sampling
from batchgen.types import ErrorClass, RowFailure, SamplingParams, UsageError

# What a job may say of sampling in all its versions, but a row of it may not, or not in this one.
_ONLY_OF_A_JOB = frozenset({"per_row", "turns", "reasoning"})
_NOT_SAMPLING = frozenset({"per_row", "turns"})
_LATER = frozenset({"structured"})
_LIBRARY_ONLY = "logits_processors"
_WORDS = {
    float: "a number",
    int: "a whole number",
    int | None: "a whole number",
    bool: "true or false",
    tuple[str, ...]: "a list of non-empty strings",
    tuple[int, ...]: "a list of token ids of 0 or more",
    Mapping[int, float]: "a map from token ids to numbers from -100 to 100",
}
_KEPT = 1024
_MOST_DIGITS = 19


class RowSampling:
    """How each row of a job is decoded.

    Args:
        section: the job's `sampling` keys; null where the user left them.
        defaults: from `generation_defaults`, or empty.
        column: that holds a row's overrides (`sampling.per_row`); None where rows have none.

    Raises:
        UsageError: a value of the section is not allowed.
    """

    def __init__(self, section: Mapping[str, Any], defaults: Mapping[str, Any], column: str | None) -> None:
        self._types = get_type_hints(SamplingParams)
        for key in (_LIBRARY_ONLY, "reasoning"):
            del self._types[key]
        self._section = {key: value for key, value in section.items() if key not in _NOT_SAMPLING}
        self._defaults = defaults
        self._column = column
        self.of_job = resolve_sampling(self._section, defaults)
        self._known: dict[str, SamplingParams] = {}

    def of_row(self, columns: Mapping[str, Any]) -> SamplingParams:
        """The job's sampling with the row's overrides; a null override is the job's value.

        Args:
            columns: of the row; a dict of overrides, the same as JSON text, or null.

        Raises:
            RowFailure: `invalid_param`; names the column, the key, its value and what is allowed.
        """
        value = None if self._column is None else columns.get(self._column)
        if isinstance(value, str):
            value = self._parse(value) if value.strip() else None
        if value is None:
            return self.of_job
        if not isinstance(value, Mapping):
            what = "NaN or an infinity" if _is_no_number(value) else type(value).__name__
            self._refuse(f" holds {what}, not an object of overrides such as {{temperature: 0.5}}")
        overrides = {key: item for key, item in value.items() if item is not None}
        known = repr(sorted(overrides.items()))
        if known not in self._known:
            if len(self._known) >= _KEPT:
                self._known.clear()
            self._known[known] = self._resolve(overrides)
        return self._known[known]

    def _resolve(self, overrides: Mapping[str, Any]) -> SamplingParams:
        checked = {key: self._checked(key, value) for key, value in overrides.items()}
        n = checked.get("n", self.of_job.n)
        if self.of_job.n == 1 and n != 1:
            self._refuse(
                f": n: {n} is not allowed, because rows have lists of answers only in a job whose sampling.n "
                "is above 1; use 1, or set that"
            )
        try:
            return resolve_sampling({**self._section, **checked}, self._defaults)
        except UsageError as error:
            self._refuse(f": {str(error).removeprefix('sampling.')}")

    def _checked(self, key: str, value: Any) -> Any:
        kind = self._types.get(key)
        if kind is None:
            self._refuse(f": {self._unknown(key)}")
        if kind is float and _is_number(value):
            return float(value)
        if kind in (int, int | None) and _is_number(value) and math.isfinite(value) and value == int(value):
            return int(value)
        if kind is bool and isinstance(value, bool):
            return value
        if kind == tuple[str, ...] and isinstance(value, str):
            return (value,)
        if kind == tuple[str, ...] and _is_list(value, str):
            return tuple(value)
        if kind == tuple[int, ...] and _is_list(value, int):
            return tuple(value)
        if kind == Mapping[int, float] and _is_bias(value):
            # A column of structs has every row's keys in each, null where a row does not have them.
            return {int(token): float(bias) for token, bias in value.items() if bias is not None}
        if kind in _WORDS:
            self._refuse(f": {key}: {value!r} is not allowed; use {_WORDS[kind]}")
        return value

    def _unknown(self, key: str) -> str:
        known = list(self._types)
        if key in _ONLY_OF_A_JOB:
            return f"{key} is the job's to set, not a row's; remove it"
        if key in _LATER:
            return f"{key} is not available in this version; remove it"
        close = difflib.get_close_matches(str(key), known, n=1)
        remedy = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
        return f"{key!r} is not a known key; {remedy}"

    def _parse(self, text: str) -> Any:
        try:
            # A value that is not finite is refused with the name of its key.
            return read_json(text, constants=True)
        except ValueError as error:
            self._refuse(f" should hold an object of overrides as JSON, but: {error}")

    def _refuse(self, what: str) -> NoReturn:
        raise RowFailure(ErrorClass.INVALID_PARAM, f"column {self._column!r}{what}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_no_number(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _is_bias(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        (str(token).isdecimal() and len(str(token)) < _MOST_DIGITS) and (bias is None or _is_number(bias))
        for token, bias in value.items()
    )


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list | tuple) and all(type(item) is kind for item in value)
