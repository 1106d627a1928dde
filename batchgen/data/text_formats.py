"""Opens a text file of any format as a reader of rows. For `InputSet`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from batchgen.data.byte_stream import ByteStream, open_stream
from batchgen.data.csv_records import CsvDecoder, CsvRecords, read_header
from batchgen.data.exact_json import Decoded, LineDecoder
from batchgen.data.identity import RowIdentity
from batchgen.data.input_file import InputFile
from batchgen.data.json_array import JsonArrayRecords
from batchgen.data.jsonl_records import JsonlRecords
from batchgen.data.line_reader import LineReader
from batchgen.data.openai_batch import ID_COLUMN, unwrap
from batchgen.data.text_reader import Decode, Record, RecordSource, RefusedRecord, TextReader
from batchgen.types import RowFailure, UsageError

if TYPE_CHECKING:
    from batchgen.data.source import InputSet


def check_headers(files: Sequence[InputFile]) -> tuple[str, ...] | None:
    """The columns of CSV files, which all have the same; None where any file is of another format.

    Raises:
        UsageError: a header that is not valid, or that names other columns than the first.
        InputError: a file has none.
    """
    headers = [(file, read_header(file)) for file in files if file.format == "csv"]
    for file, header in headers:
        first_file, first = headers[0]
        different = set(header.names) ^ set(first.names)
        if different:
            raise UsageError(
                f"input.path: {file.path} and {first_file.path} do not have the same columns: "
                f"{min(different)!r} is in one of them only; all CSV files of a job need the same, so "
                "add the column or rename it"
            )
    return headers[0][1].names if headers and len(headers) == len(files) else None


def check_endpoint(inputs: InputSet) -> None:
    """Refuses an OpenAI batch whose first request is for an endpoint that is not served.

    Raises:
        UsageError: names the file, the line and the endpoint.
    """
    for row in inputs.window():
        if row.error is not None and row.error.message.startswith(f"{row.file} line {row.line}: url "):
            raise UsageError(f"input.path: {row.error.message}")
        return


def open_text(
    file: InputFile,
    identity: RowIdentity,
    *,
    replace_invalid: bool,
    strict_json: bool,
    keep_truncated: bool,
    max_record_bytes: int,
    note: Callable[[str], None],
) -> TextReader:
    """A reader at the beginning of the file.

    Args:
        file: of a text format.
        identity: makes the row's id.
        replace_invalid: policy for invalid UTF-8 and lone surrogates.
        strict_json: what JSON forbids is an error row, not a note.
        keep_truncated: a cut file ends there instead of raising.
        max_record_bytes: longer records are error rows.
        note: called with a sentence about the file, for the report.

    Raises:
        UsageError, InputError: the file cannot be opened, or has no valid CSV header.
    """
    decode: Decode
    records: RecordSource
    if file.format == "csv":
        header = read_header(file)
        decode = CsvDecoder(header.names, replace_invalid)
        stream = open_stream(file)
        records = CsvRecords(LineReader(stream, max_record_bytes), header, max_record_bytes)
    else:
        decode = _json(file.format, replace_invalid, strict_json)
        stream = open_stream(file)
        records = _json_records(file, stream, max_record_bytes)
    return TextReader(
        file,
        identity,
        stream=stream,
        records=records,
        decode=decode,
        keep_truncated=keep_truncated,
        note=note,
    )


def _json_records(file: InputFile, stream: ByteStream, max_record_bytes: int) -> RecordSource:
    if file.format == "json":
        return JsonArrayRecords(stream, file.path, max_record_bytes)
    return JsonlRecords(LineReader(stream, max_record_bytes), max_record_bytes)


def _json(format: str, replace_invalid: bool, strict: bool) -> Decode:
    decoder = LineDecoder(replace_invalid, strict=strict, unit="record" if format == "json" else "line")

    def plain(record: Record) -> Decoded:
        assert record.data is not None
        return decoder.decode(record.data)

    def batch(record: Record) -> Decoded:
        decoded = plain(record)
        try:
            return unwrap(decoded)
        except RowFailure as failure:
            custom_id = decoded.values.get(ID_COLUMN)
            if not isinstance(custom_id, str):
                raise
            raise RefusedRecord(failure, custom_id) from None

    return batch if format == "openai_batch" else plain
