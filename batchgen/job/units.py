"""Durations, sizes and addresses as people write them: `20s`, `1h30m`, `4GB`. Used by job files' models."""

from __future__ import annotations

import math
import re
from typing import Any

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {
    "": 1,
    "B": 1,
    **{f"{p}B": 1000**n for n, p in enumerate("KMGT", start=1)},
    **{f"{p}iB": 1024**n for n, p in enumerate("KMGT", start=1)},
}
_NUMBER = r"\d+(?:\.\d+)?"
_DURATION = re.compile(rf"(?:{_NUMBER}(?:ms|min|s|m|h|d))+")
_DURATION_PART = re.compile(rf"({_NUMBER})(ms|min|s|m|h|d)")
_CLOCK = re.compile(r"(\d+):([0-5]\d):([0-5]\d)")
_ADDRESS = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9._-]+)):(?P<port>\d{1,5})")
_SIZE = re.compile(rf"({_NUMBER}) ?([KMGT]?i?B|)", re.IGNORECASE)


def parse_duration(value: Any) -> float:
    """Seconds of `20s`, `1h30m`, `500ms`, `12:30:00`, or a number of seconds.

    Raises:
        ValueError: it is none of these.
    """
    if isinstance(value, bool):
        raise ValueError("not a duration")
    if isinstance(value, int | float):
        return _finite(float(value))
    text = str(value).replace(" ", "")
    if clock := _CLOCK.fullmatch(text):
        hours, minutes, seconds = map(int, clock.groups())
        return float(hours * 3600 + minutes * 60 + seconds)
    if not _DURATION.fullmatch(text):
        raise ValueError("not a duration")
    return _finite(sum(float(n) * _SECONDS[unit] for n, unit in _DURATION_PART.findall(text)))


def parse_size(value: Any) -> int:
    """Bytes of `4GB` (powers of 1000), `4GiB` (powers of 1024), or a whole number of bytes.

    Raises:
        ValueError: it is none of these.
    """
    if isinstance(value, bool):
        raise ValueError("not a size")
    if isinstance(value, int):
        return value
    match = _SIZE.fullmatch(str(value).strip())
    if match is None:
        raise ValueError("not a size")
    unit = next(name for name in _BYTES if name.lower() == match[2].lower())
    return int(_finite(float(match[1])) * _BYTES[unit])


def parse_share(value: Any) -> int | float:
    """A count as an int, or a share as a float from 0 to 1: `5`, `0.05`, `5%`.

    Raises:
        ValueError: it is none of these.
    """
    if isinstance(value, str) and re.fullmatch(rf"{_NUMBER} ?%", value):
        value = float(value.rstrip("% ")) / 100
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("neither a count nor a share")
    if value < 0 or (isinstance(value, float) and not value <= 1):
        raise ValueError("out of range")
    return value


def _finite(number: float) -> float:
    if not math.isfinite(number):
        raise ValueError("out of range")
    return number


def parse_address(value: Any) -> Any:
    """`host:port` of the same, `[::1]:9400`, or a port alone, which means this machine only.

    Raises:
        ValueError: it is none of these.
    """
    if value is None:
        return None
    text = str(value).strip()
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError("not an address")
    if text.removeprefix(":").isdecimal():
        text = f"127.0.0.1:{text.removeprefix(':')}"
    host, port = split_address(text)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(text: str) -> tuple[str, int]:
    """Host and port of `host:port`; an IPv6 host stands in brackets.

    Raises:
        ValueError: it is not an address.
    """
    found = _ADDRESS.fullmatch(text)
    if found is None or int(found["port"]) > 65535:
        raise ValueError("not an address")
    return found["six"] or found["host"], int(found["port"])
