"""The answers of a job as the columns that `map` adds."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchgen.api.job import JobResult
from batchgen.api.spool import stream_line
from batchgen.job.files import storage
from batchgen.job.folder import JobFolder
from batchgen.job.manifest import require_manifest
from batchgen.types import InputError

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa


def answers(result: JobResult, columns: tuple[str, str]) -> datasets.Dataset:
    """Answer and error of every row, in order, as a data set that lies on disk.

    Of several samples, or turns, the answer is a list.

    Args:
        result: of a run that is complete.
        columns: what the two are called.
    """
    import datasets
    import pyarrow as pa

    path = result.folder.parent / "answers.arrow"
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    plan = require_manifest(JobFolder(result.folder)).output_plan
    text = pa.list_(pa.string()) if plan.get("samples") or plan.get("dialogues") else pa.string()
    schema = pa.schema([(columns[0], text), (columns[1], pa.string())])
    with storage(path), pa.OSFile(str(temporary), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for batch in result.batches(["generated_text", "error"]):
            texts, errors = batch.columns
            writer.write_batch(pa.record_batch([texts.cast(text), _sentences(errors)], schema=schema))
    os.replace(temporary, path)
    return datasets.Dataset.from_file(str(path))


def _sentences(errors: pa.StructArray) -> pa.Array:
    import pyarrow as pa

    found = errors.to_pylist()
    return pa.array([e and f"{e['class']}: {e['message']}" for e in found], pa.string())


class StreamAnswers:
    """Adds answers to the rows of a stream, and checks that they are the rows that were answered.

    Args:
        found: from `answers`.
        columns: that the job read.
        copy: the job's input, as `spool_stream` wrote it.
    """

    def __init__(self, found: datasets.Dataset, columns: list[str], copy: Path) -> None:
        self._found = found
        self._columns = columns
        self._copy = copy
        self._next = 0
        self._offset = 0

    def __call__(self, row: Mapping[str, Any], number: int) -> dict[str, Any]:
        if number >= len(self._found) or stream_line(number, row, self._columns) != self._line(number):
            raise InputError(
                f"map: row {number} of the stream is not the row that was answered; a stream must give the "
                "same rows each time it is read (shuffle it with a fixed seed, or make a Dataset of it)"
            )
        return dict(self._found[number])

    def _line(self, number: int) -> str:
        """A line of the copy; rows come in order, so that it is the next one."""
        if number < self._next:
            self._next = self._offset = 0
        # Opened for each row, because nobody says when the stream is read no more.
        with self._copy.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                self._next += 1
                self._offset += len(line)
                if self._next > number:
                    return line.decode(errors="surrogatepass")
        return ""


class Lazily:
    """Runs a job when the first row of a stream passes by, then adds its answers.

    Args:
        run: from the names of the stream's columns to what adds answers.
    """

    def __init__(self, run: Callable[[list[str]], StreamAnswers]) -> None:
        self._run = run
        self._answers: StreamAnswers | None = None

    def __call__(self, row: Mapping[str, Any], number: int) -> dict[str, Any]:
        if self._answers is None:
            self._answers = self._run(list(row))
        return self._answers(row, number)
