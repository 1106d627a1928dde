"""A job's input, opened, and its prompt bound to the columns. For the checks and verbs that read rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchgen.types import InputError, UsageError

if TYPE_CHECKING:
    from batchgen.data.row import Row
    from batchgen.data.source import InputSet
    from batchgen.job.spec.job import JobSpec
    from batchgen.text.prompt_spec import PromptSpec

# Where the rows of an OpenAI batch file carry what its lines say of sampling.
BATCH_SAMPLING = "sampling"


def open_job_input(spec: JobSpec) -> InputSet:
    """The rows of a job.

    Raises:
        UsageError, InputError: as `batchgen.data.source.open_input`.
    """
    from batchgen.data.source import open_input
    from batchgen.job.folder import JobFolder

    return open_input(
        spec.input.path,
        format=spec.input.format,
        id_column=None if spec.input.id == "auto" else spec.input.id,
        unicode=spec.input.unicode,
        on_truncated=spec.input.on_truncated,
        strict_json=spec.input.strict_json,
        where=spec.input.where,
        schema=spec.input.schema,
        ignore=JobFolder(spec.output_folder).wrote if spec.sound("output.path") else None,
    )


def bind_prompt(spec: JobSpec, inputs: InputSet) -> PromptSpec:
    """The prompt section with its columns checked against the input's.

    Raises:
        UsageError: a column that the prompt needs is not there.
        InputError: of the first rows none can be read.
    """
    from batchgen.text.prompt_spec import spec_from_sections

    sampling = spec.sampling.model_dump()
    if inputs.format == "openai_batch" and sampling["per_row"] is None:
        sampling["per_row"] = BATCH_SAMPLING
    prompt = spec_from_sections(spec.prompt.model_dump(), sampling, spec.task)
    try:
        return prompt.bind(inputs.columns())
    except UsageError:
        if not inputs.columns():
            _explain_no_columns(inputs)
        raise


def _explain_no_columns(inputs: InputSet) -> None:
    """Raises UsageError where there are no rows, and InputError where none can be read."""
    first = next(inputs.window(), None)
    if first is None:
        raise UsageError(
            "input.path: the input has no rows, so nothing says which columns it has; give a file with rows"
        )
    if first.error is not None:
        raise InputError(
            "input.path: none of the first rows can be read, so the prompt has no columns "
            f"({placed(first, first.error.message)}); correct the file, or say in input.format what it is"
        )


def placed(row: Row, message: str) -> str:
    """A message with its row's place, which the messages of some readers begin with."""
    place = where_of(row)
    return message if message.startswith(place) else f"{place}: {message}"


def where_of(row: Row) -> str:
    return f"{row.file} line {row.line}" if row.line else f"{row.file} row {row.ordinal}"
