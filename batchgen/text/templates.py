"""The job's own Jinja templates: `prompt.system`, `prompt.user`, `prompt.assistant_prefix`.

Used by the prompt renderer. The chat template of a model is not one of these; see `chat_template.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jinja2 import StrictUndefined, TemplateSyntaxError, UndefinedError, meta

from batchgen.text.sandbox import LimitedEnvironment, TemplateLimit
from batchgen.types import ErrorClass, RowFailure, UsageError


class _NullValue(Exception):
    """An expression of a template is null; it would read as the word None."""


class _BinaryValue(Exception):
    """An expression of a template is bytes; it would read as a Python literal."""


class _NoNumber(Exception):
    """An expression of a template is NaN or an infinity."""


def _text_only(value: Any) -> Any:
    if value is None:
        raise _NullValue
    if isinstance(value, bytes):
        raise _BinaryValue
    if isinstance(value, float) and not math.isfinite(value):
        raise _NoNumber
    return value


_ENVIRONMENT = LimitedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True, finalize=_text_only)
_ENVIRONMENT.limit_filters()


class JobTemplate:
    """One template of the job file.

    Args:
        name: the setting, such as `prompt.user`; messages begin with it.
        source: Jinja, in the sandbox; every column is a variable, and one that a row lacks is an error.

    Raises:
        UsageError: the source is not valid Jinja.
    """

    def __init__(self, name: str, source: str) -> None:
        self.name = name
        try:
            tree = _ENVIRONMENT.parse(source)
            self._template = _ENVIRONMENT.from_string(source)
            # Jinja copies it for every rendering, and would build it from a chain of dicts each time.
            self._template.globals = dict(_ENVIRONMENT.globals)
            self.columns = frozenset(meta.find_undeclared_variables(tree)) - frozenset(_ENVIRONMENT.globals)
        except TemplateSyntaxError as error:
            said = (error.message or "").rstrip(".")
            raise UsageError(
                f"{name}: line {error.lineno} of the template: {said}; correct it there"
            ) from error

    def render(self, columns: Mapping[str, Any]) -> str:
        """The text for one row.

        Raises:
            RowFailure: `missing_column`, `null_prompt` (a null would read "None"), `number_out_of_range`,
                or `template`.
        """
        _ENVIRONMENT.meter.begin()
        try:
            return self._template.render(columns)
        except UndefinedError as error:
            raise RowFailure(ErrorClass.MISSING_COLUMN, self._undefined(columns, error)) from error
        except _NullValue as error:
            nulls = sorted(name for name in self.columns if name in columns and columns[name] is None)
            what = f"column {', '.join(map(repr, nulls))} is null" if nulls else "an expression is null"
            raise RowFailure(
                ErrorClass.NULL_PROMPT,
                f"{self.name}: {what}; write {{{{ column or '' }}}} where that is meant",
            ) from error
        except _BinaryValue as error:
            binary = sorted(name for name in self.columns if isinstance(columns.get(name), bytes))
            what = f"column {', '.join(map(repr, binary))} holds" if binary else "an expression gives"
            raise RowFailure(
                ErrorClass.TEMPLATE,
                f"{self.name}: {what} bytes, not text; write {{{{ column.decode() }}}} if they are UTF-8",
            ) from error
        except _NoNumber as error:
            raise RowFailure(
                ErrorClass.NUMBER_OUT_OF_RANGE,
                f"{self.name}: a value is NaN or an infinity; correct the row, or do not write it out",
            ) from error
        except TemplateLimit as error:
            raise RowFailure(ErrorClass.TEMPLATE, f"{self.name}: {error}") from error
        except Exception as error:
            raise RowFailure(ErrorClass.TEMPLATE, f"{self.name}: {type(error).__name__}: {error}") from error

    def _undefined(self, columns: Mapping[str, Any], error: UndefinedError) -> str:
        reason = str(error)
        missing = [name for name in sorted(self.columns) if name not in columns and f"'{name}'" in reason]
        if missing:
            return f"{self.name}: the row has no column {missing[0]!r}"
        return f"{self.name}: {reason}"
