"""What the sections of a job file have in common. Their models are made of it."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict


@dataclass(frozen=True, slots=True)
class Rule:
    """What a key allows, in words, and which values a later version will allow."""

    allowed: str
    later: Container[Any] = ()


class Section(BaseModel):
    """Base of the sections: frozen, no unknown keys, no silent conversion of types."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True
    )
