"""A histogram of positive numbers that takes any number of values in bounded memory, and can be added up.

Bins are equally wide on a logarithmic scale, eight to a doubling, so that lengths of 3 and of 30,000 tokens
and times of a millisecond and of an hour are told equally well: a quantile is right within 5 %. Made for
each part when it is committed and while rows finish; the report adds them up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

PER_DOUBLING = 8
LEAST = 1e-6
"""Zero and what is smaller are counted by themselves."""


@dataclass(slots=True)
class Histogram:
    """Counts by bin. Bin b holds values from 2**(b/8) up to 2**((b+1)/8).

    Args:
        bins: bin to count.
        zeros: values below `LEAST`.
        total: sum of all values.
        largest: of all values.
    """

    bins: dict[int, int] = field(default_factory=dict)
    zeros: int = 0
    total: float = 0.0
    largest: float = 0.0

    @property
    def count(self) -> int:
        """Values so far."""
        return self.zeros + sum(self.bins.values())

    @property
    def mean(self) -> float:
        """Of all values; 0 for none."""
        return self.total / self.count if self.count else 0.0

    def add(self, values: Iterable[float]) -> None:
        """Count values, none of them negative."""
        array = np.fromiter(values, dtype=np.float64)
        if not array.size:
            return
        positive = array[array >= LEAST]
        self.zeros += int(array.size - positive.size)
        self.total += float(array.sum())
        self.largest = max(self.largest, float(array.max()))
        # A little above the edge, so that 2**k falls into the bin that begins with it.
        numbers = np.floor(np.log2(positive) * PER_DOUBLING + 1e-9).astype(np.int64)
        for number, count in zip(*np.unique(numbers, return_counts=True), strict=True):
            self.bins[int(number)] = self.bins.get(int(number), 0) + int(count)

    def merge(self, other: Histogram) -> None:
        """Add the values of another one."""
        for number, count in other.bins.items():
            self.bins[number] = self.bins.get(number, 0) + count
        self.zeros += other.zeros
        self.total += other.total
        self.largest = max(self.largest, other.largest)

    def quantile(self, share: float) -> float:
        """The value that `share` of all values do not exceed, within 5 %; 0 for none."""
        wanted = share * self.count
        seen = self.zeros
        if wanted <= seen or not self.bins:
            return 0.0
        for number in sorted(self.bins):
            seen += self.bins[number]
            if seen >= wanted:
                break
        return min(2 ** ((number + 0.5) / PER_DOUBLING), self.largest)

    def bars(self, per_doubling: int) -> list[tuple[float, float, int]]:
        """(from, up to, count) of wider bins without a gap, for a picture; zeros are left out.

        Args:
            per_doubling: bars to a doubling; divides 8.
        """
        if not self.bins:
            return []
        wide = PER_DOUBLING // per_doubling
        counts: dict[int, int] = {}
        for number, count in self.bins.items():
            counts[number // wide] = counts.get(number // wide, 0) + count
        first, last = min(counts), max(counts)
        return [
            (2 ** (bar / per_doubling), 2 ** ((bar + 1) / per_doubling), counts.get(bar, 0))
            for bar in range(first, last + 1)
        ]

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_json` reads them back."""
        bins = {str(number): count for number, count in sorted(self.bins.items())}
        return {"bins": bins, "zeros": self.zeros, "total": self.total, "largest": self.largest}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Histogram:
        """From `to_json`. Raises ValueError, KeyError or TypeError for anything else."""
        bins = {int(number): int(count) for number, count in data["bins"].items()}
        total, largest = float(data["total"]), float(data["largest"])
        if not (math.isfinite(total) and math.isfinite(largest)):
            raise ValueError("not a histogram")
        return cls(bins, int(data["zeros"]), total, largest)

    def describe(self) -> dict[str, float]:
        """What people ask of a distribution."""
        return {
            "count": self.count,
            "mean": self.mean,
            "p50": self.quantile(0.5),
            "p90": self.quantile(0.9),
            "p99": self.quantile(0.99),
            "max": self.largest,
        }
