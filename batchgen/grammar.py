"""Numbers of things in sentences. Used wherever users are told how many."""

from __future__ import annotations


def counted(number: int, thing: str) -> str:
    """`1 row`, `0 rows`, `1,000 rows`."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def how_many(number: int, thing: str) -> str:
    """`no rows`, `1 row`, `1,000 rows`: where a person would not say that there are 0 of them."""
    return f"no {thing}s" if number == 0 else counted(number, thing)


def each_of(number: int, thing: str) -> str:
    """`no row needs`, `its only row has`, `all 1,000 rows have`: of what each of them should have."""
    if number == 0:
        return f"no {thing} needs"
    return f"its only {thing} has" if number == 1 else f"all {counted(number, thing)} have"


def agreeing(number: int, one: str, many: str) -> str:
    """The word that goes with so many, such as `has` or `have`."""
    return one if number == 1 else many
