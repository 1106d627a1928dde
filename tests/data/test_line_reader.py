"""Physical lines: split on \\n alone, whatever the chunks, in bounded memory."""

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from batchgen.data.jsonl_records import JsonlRecords
from batchgen.data.line_reader import BLANK, LineReader
from batchgen.data.row import digest
from batchgen.data.text_reader import BOM


class Chunks:
    """A stream of given chunks."""

    def __init__(self, chunks: list[bytes]) -> None:
        self._chunks = [chunk for chunk in chunks if chunk]

    def read_chunk(self) -> bytes:
        return self._chunks.pop(0) if self._chunks else b""

    def seek(self, offset: int) -> None:
        raise AssertionError("not needed here")

    def close(self) -> None: ...


def lines_of(chunks: list[bytes], limit: int = 1 << 30):
    reader = LineReader(Chunks(chunks), limit)
    return list(iter(reader.next, None)), reader.offset


@given(st.lists(st.text(alphabet="ab \t\r\n\v\u2028").map(str.encode)))
def test_lines_do_not_depend_on_chunks(chunks: list[bytes]) -> None:
    data = b"".join(chunks)
    expected = data.split(b"\n")
    if not expected[-1]:
        expected.pop()
    lines, offset = lines_of(chunks)
    assert [line.data for line in lines] == expected
    assert [line.digest for line in lines] == [digest(line) for line in expected]
    assert [line.blank for line in lines] == [not line.strip(BLANK) for line in expected]
    assert offset == len(data)


@given(st.lists(st.text(alphabet="ab \n").map(str.encode)), st.integers(0, 5))
def test_over_long_lines_keep_length_hash_and_place(chunks: list[bytes], limit: int) -> None:
    whole, _ = lines_of(chunks)
    limited, offset = lines_of(chunks, limit)
    assert [(x.length, x.digest, x.blank) for x in limited] == [(x.length, x.digest, x.blank) for x in whole]
    assert [x.data for x in limited] == [x.data if x.length <= limit else None for x in whole]
    assert offset == sum(map(len, chunks))


@given(st.lists(st.text(alphabet="{a \r\n\ufeff").map(str.encode)), st.integers(1, 9))
def test_records_are_lines_that_are_not_blank(chunks: list[bytes], limit: int) -> None:
    records = JsonlRecords(LineReader(Chunks(chunks), limit), limit)
    read = [(r.line, r.data, r.size, r.digest, r.notes) for r in iter(records.next, None)]
    expected = []
    for number, line in enumerate(b"".join(chunks).split(b"\n"), start=1):
        fits, text = len(line) <= limit, line.removesuffix(b"\r")
        has_bom = fits and number == 1 and text.startswith(BOM)
        text = text.removeprefix(BOM) if has_bom else text
        if text.strip(BLANK):
            notes = ("bom_stripped",) if has_bom else ()
            expected.append((number, text if fits else None, len(line), digest(line), notes))
    assert read == expected
    assert records.offset == sum(map(len, chunks))


def test_an_over_long_line_is_not_kept_in_memory() -> None:
    class Endless(Chunks):
        remaining = 200

        def read_chunk(self) -> bytes:
            self.remaining -= 1
            return bytes(500_000) if self.remaining > 0 else b""

    tracemalloc.start()
    line = LineReader(Endless([]), 2_000_000).next()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert line is not None
    assert line.data is None
    assert line.length == 199 * 500_000
    assert peak < 8_000_000
