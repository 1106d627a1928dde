"""`batchgen.map`: a model over a `datasets` data set, resumable, one output for every row, in order."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from batchgen.api.answers import Lazily, StreamAnswers, answers
from batchgen.api.arguments import new_columns, own_folder, split_folder
from batchgen.api.check_output import check_is_folder
from batchgen.api.job import Job, JobResult
from batchgen.api.spool import ID, Spool, map_folder, new_workplace, spool_dataset, spool_stream
from batchgen.job.python_values import plain_values
from batchgen.text.prompt_spec import spec_from_sections
from batchgen.types import DriftError, StoppedError, UsageError

if TYPE_CHECKING:
    import datasets

    from batchgen.job.run_options import Launcher

DataT = TypeVar("DataT")
_SECTIONS = ("run", "engine")
_OUT = "out"


def map(
    dataset: DataT,
    *,
    model: str | os.PathLike[str] | Mapping[str, Any],
    prompt: str | Mapping[str, Any] | None = None,
    output_column: str = "generated_text",
    error_column: str | None = None,
    sampling: Mapping[str, Any] | None = None,
    resume: bool = True,
    output: str | os.PathLike[str] | None = None,
    launch: Launcher | None = None,
    **sections: Mapping[str, Any],
) -> DataT:
    """Run a model over every row of a data set and add its answers as a column.

    A row that cannot be answered has None there and the reason in the error column; it never ends the call.
    The call is a job like any other: killed and repeated, it goes on where it was and ends with the same
    answers. What it keeps for that lies under batchgen's cache folder, or in `output`.

    Args:
        dataset: a `datasets.Dataset`, `IterableDataset`, or a dict of either: each split is one job,
            kept in a folder of its name in `output`. An `IterableDataset` is run as a whole when the result
            is first iterated; it must give the same rows each time, and end (see its `take`).
        model: hub id, folder or GGUF file, or the `model` section of a job file.
        prompt: Jinja template of the user turn over the columns, or the `prompt` section of a job file;
            None: a column `messages` or `prompt`.
        output_column: gets the answers.
        error_column: gets `<class>: <message>` for rows without an answer, else None; by default
            `<output_column>_error`.
        sampling: the `sampling` section of a job file.
        resume: whether an earlier, equal call is continued; False computes everything anew.
        output: a folder to keep the job in; it belongs to this call alone.
        launch: starts a worker process; None: one of this machine.
        sections: `run` and `engine` sections of a job file.

    Returns:
        A data set of the same kind, length and order with two more columns.

    Raises:
        UsageError: lists every fault of the call.
        StoppedError: a signal ended the run; the same call continues it.
        BatchgenError: what else ended it.

    Example:
        >>> out = bg.map(ds, model="…", prompt="Summarise: {{ body }}", output_column="summary",
        ...              sampling={"max_tokens": 64})
    """
    import datasets

    for name in sections.keys() - set(_SECTIONS):
        raise UsageError(f"map: {name!r} is not an argument; beside those named there are run and engine")
    values = {
        "model": model,
        "prompt": {"user": prompt} if isinstance(prompt, str) else prompt,
        "sampling": sampling,
        **sections,
    }
    call = _Call(
        plain_values({key: value for key, value in values.items() if value is not None}),
        new_columns(output_column, error_column),
        resume,
        None if output is None else own_folder("map: output", output),
        launch,
    )
    if isinstance(dataset, datasets.DatasetDict | datasets.IterableDatasetDict):
        calls = {split: call.of_split(split) for split in dataset}
        return cast(DataT, type(dataset)({split: calls[split].over(part) for split, part in dataset.items()}))
    return cast(DataT, call.over(dataset))


class _Call:
    """One call of `map`, before it meets a data set."""

    def __init__(
        self,
        values: dict[str, Any],
        columns: tuple[str, str],
        resume: bool,
        output: Path | None,
        launch: Launcher | None,
    ) -> None:
        self._values = values
        self._columns = columns
        self._resume = resume
        self._output = output
        self._launch = launch

    def of_split(self, split: str) -> _Call:
        """The same call for one split, in a folder of its own."""
        output = None if self._output is None else split_folder(self._output, split)
        return _Call(self._values, self._columns, self._resume, output, self._launch)

    def over(self, dataset: Any) -> Any:
        import datasets

        if isinstance(dataset, datasets.Dataset):
            return self._over_dataset(dataset)
        if isinstance(dataset, datasets.IterableDataset):
            return self._over_stream(dataset)
        raise UsageError(
            f"map: {type(dataset).__name__} is not a datasets.Dataset or IterableDataset; "
            "make one, such as with datasets.Dataset.from_list"
        )

    def _over_dataset(self, dataset: datasets.Dataset) -> datasets.Dataset:
        import datasets

        needed = self._needed(dataset.column_names)
        with new_workplace(self._output) as workplace:
            result = self._run(spool_dataset(dataset, needed, workplace))
        if not len(dataset):
            # Which `concatenate_datasets` leaves out, columns and all.
            return dataset.add_column(self._columns[0], []).add_column(self._columns[1], [])
        return datasets.concatenate_datasets([dataset, answers(result, self._columns)], axis=1)

    def _over_stream(self, dataset: datasets.IterableDataset) -> datasets.IterableDataset:
        """The job runs when the first row is asked for; by then the stream's columns are known."""

        def run(names: list[str]) -> StreamAnswers:
            needed = self._needed(names)
            with new_workplace(self._output) as workplace:
                spool = spool_stream(dataset, needed, workplace)
                result = self._run(spool)
            return StreamAnswers(answers(result, self._columns), needed, spool.kept_in(self._folder(spool)))

        return dataset.map(Lazily(run), with_indices=True)

    def _needed(self, names: list[str]) -> list[str]:
        """The columns that the job reads, in the data set's order.

        Raises:
            UsageError: one is missing, a new column's name is taken, or the call's folder can be none.
        """
        if self._output is not None:
            check_is_folder(self._output / _OUT, "map: output")
        for argument, column in zip(("output_column", "error_column"), self._columns, strict=True):
            if column in names:
                raise UsageError(
                    f"map: the data set has a column {column!r} already; choose another {argument}"
                )
        spec = Job({**self._values, "input": "input", "output": "output"}).spec
        prompt = spec_from_sections(spec.prompt.model_dump(), spec.sampling.model_dump(), spec.task)
        wanted = {*prompt.bind(names).required_columns(), spec.run.priority}
        return [name for name in names if name in wanted]

    def _folder(self, spool: Spool) -> Path:
        return self._output or map_folder(self._values, spool)

    def _run(self, spool: Spool) -> JobResult:
        folder = self._folder(spool)
        job = Job(
            {
                **self._values,
                "input": {"path": str(spool.keep(folder)), "id": ID, "columns": []},
                "output": {"path": str(folder / _OUT), "include": []},
            }
        )
        try:
            result = job.run(overwrite=not self._resume, launch=self._launch)
        except DriftError:
            if self._output is not None:
                raise
            # Ours alone, and what it holds is of a model that has changed since.
            result = job.run(overwrite=True, launch=self._launch)
        if result.exit_code == StoppedError.exit_code:
            raise StoppedError(f"map: {result.reason.replace('command', 'call')}")
        return result
