"""Numbers of things in sentences."""

from batchgen.grammar import agreeing, counted, each_of


def test_one_is_not_many() -> None:
    assert [counted(n, "row") for n in (0, 1, 2, 1000)] == ["0 rows", "1 row", "2 rows", "1,000 rows"]
    assert [each_of(n, "row") for n in (1, 2)] == ["its only row has", "all 2 rows have"]
    assert [agreeing(n, "is", "are") for n in (0, 1, 2)] == ["are", "is", "are"]
