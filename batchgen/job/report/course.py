"""The course of a job over its working time: rates and levels in a bounded number of equal stretches.

Attempts follow one another without the pauses between them. Samples of any number go in, at most
`MOST_STRETCHES` come out: where they do not suffice, stretches become twice as long.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

MOST_STRETCHES = 160
FIRST_SECONDS = 1.0
_COUNTERS = ("prompt_tokens", "cached_tokens", "output_tokens", "preemptions")
_FLOWS = (*_COUNTERS, "rows")
_LEVELS = ("running", "waiting", "pool_share")


@dataclass(slots=True)
class Stretch:
    """What happened in it: `flows` are sums, `levels` integrals over the `seconds` that were seen."""

    seconds: float = 0.0
    flows: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_FLOWS, 0.0))
    levels: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_LEVELS, 0.0))

    def add(self, seconds: float, flows: Mapping[str, float], levels: Mapping[str, float]) -> None:
        """Add a piece of time."""
        self.seconds += seconds
        for name in _FLOWS:
            self.flows[name] += flows[name]
        for name in _LEVELS:
            self.levels[name] += levels[name]


class Course:
    """Collects samples of one attempt after the other."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.boundaries: list[tuple[int, float]] = []
        self._width = FIRST_SECONDS
        self._stretches: list[Stretch] = []

    def add_attempt(self, number: int, samples: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """Append an attempt; returns its last sample, None where there is none.

        Args:
            number: of the attempt.
            samples: in time, as `run_stats.read_times` gives them.
        """
        begin = self.seconds
        self.boundaries.append((number, begin))
        last: Mapping[str, Any] | None = None
        for sample in samples:
            if last is not None and sample["seconds"] > last["seconds"]:
                self._add(begin, last, sample)
            last = sample
        if last is not None:
            self.seconds = begin + last["seconds"]
        return last

    def points(self) -> list[dict[str, float | None]]:
        """One for each stretch: its middle in seconds of working time, and what went on; None if unseen."""
        return [self._point(number, stretch) for number, stretch in enumerate(self._stretches)]

    def _point(self, number: int, stretch: Stretch) -> dict[str, float | None]:
        at = min((number + 0.5) * self._width, self.seconds)
        if stretch.seconds <= 0:
            return {"seconds": at, **dict.fromkeys((*_RATES, "prefix_hit_share", *_LEVELS))}
        prompt = stretch.flows["prompt_tokens"]
        return {
            "seconds": at,
            **{rate: stretch.flows[flow] / stretch.seconds for rate, flow in _RATES.items()},
            "prefix_hit_share": stretch.flows["cached_tokens"] / prompt if prompt > 0 else None,
            **{name: stretch.levels[name] / stretch.seconds for name in _LEVELS},
        }

    def _add(self, begin: float, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        """Spread what happened between two samples evenly over the stretches that they touch."""
        first, last = begin + before["seconds"], begin + after["seconds"]
        self._make_room(last)
        # Tokens of a worker that has ended may be missing for a moment.
        flows = {name: max(0.0, float(after[name] - before[name])) for name in _COUNTERS}
        flows["rows"] = max(0, rows_run(after) - rows_run(before))
        total = after["pool_total"]
        levels = {
            "running": float(after["running"]),
            "waiting": float(after["waiting"]),
            "pool_share": after["pool_used"] / total if total else 0.0,
        }
        number = int(first / self._width)
        while number * self._width < last:
            seconds = min(last, (number + 1) * self._width) - max(first, number * self._width)
            share = seconds / (last - first)
            self._stretches[number].add(
                seconds,
                {name: share * value for name, value in flows.items()},
                {name: seconds * value for name, value in levels.items()},
            )
            number += 1

    def _make_room(self, seconds: float) -> None:
        while seconds > MOST_STRETCHES * self._width:
            self._halve()
        while len(self._stretches) * self._width < seconds:
            self._stretches.append(Stretch())

    def _halve(self) -> None:
        self._width *= 2
        wide = []
        for number in range(0, len(self._stretches), 2):
            stretch = self._stretches[number]
            for other in self._stretches[number + 1 : number + 2]:
                stretch.add(other.seconds, other.flows, other.levels)
            wide.append(stretch)
        self._stretches = wide


_RATES = {
    "prompt_tokens_per_second": "prompt_tokens",
    "output_tokens_per_second": "output_tokens",
    "rows_per_second": "rows",
    "preemptions_per_second": "preemptions",
}


def rows_run(sample: Mapping[str, Any]) -> int:
    """Rows that an attempt has run so far; none where it left no sample."""
    return int(sample["rows_done"] - sample["rows_before"]) if sample else 0
