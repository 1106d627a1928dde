"""What can be wrong with a job before any weights are loaded. Called by `validate`, `run` and `show`.

Each check looks at one thing and says what it found; all are run, so that everything is reported at once.
`run` leaves out those that need the tokenizer, because its process stays small.
"""

from __future__ import annotations

import difflib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchgen.grammar import agreeing, counted
from batchgen.types import BatchgenError, InputError, StorageError, Task, UsageError

if TYPE_CHECKING:
    from batchgen.data.row import Row
    from batchgen.data.source import InputSet
    from batchgen.job.faults import Fault, KeyPath
    from batchgen.job.fingerprints import ModelFiles
    from batchgen.job.selection import Selection
    from batchgen.job.spec import JobSpec
    from batchgen.models.source import ModelSource
    from batchgen.text.prompt import PromptRenderer
    from batchgen.text.prompt_spec import PromptSpec
    from batchgen.text.tokenizer import Tokenizer

ROWS_FOR_IDS = 100_000
ROWS_TO_RENDER = 100
# Where the rows of an OpenAI batch file carry what its lines say of sampling.
BATCH_SAMPLING = "sampling"
# What a sentence is about, whichever check came upon it.
_ABOUT: dict[type, tuple[str, ...]] = {InputError: ("input", "path"), StorageError: ("output", "path")}


@dataclass(slots=True)
class Report:
    """What the checks found.

    Args:
        faults: in the order of the checks.
        notes: sentences that do not stop the job.
        facts: what a program may want to know of the input.
        spec: the job, once it is known; says where in its files the key of a fault stands.
    """

    faults: list[BatchgenError] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    spec: JobSpec | None = None
    _keys: dict[int, KeyPath] = field(default_factory=dict)

    @contextmanager
    def check(self, *key: str) -> Iterator[None]:
        """Collect what the body raises instead of stopping; a sentence that names no key is about `key`.

        A damaged file stops each check that reads it, and is one fault.
        """
        try:
            yield
        except BatchgenError as error:
            if str(error) not in map(str, self.faults):
                self.faults.append(error)
                self._keys[id(error)] = _ABOUT.get(type(error), key)

    def located(self, fault: BatchgenError) -> list[Fault]:
        """The fault, or each of a job file's, with its place: where the key stands that it begins with."""
        from batchgen.job.faults import Fault, JobFileError, Origin, named_key

        if isinstance(fault, JobFileError):
            return list(fault.faults)
        key = named_key(str(fault)) or self._keys.get(id(fault), ())
        place = self.spec.place(key) if self.spec else None
        return [Fault(place or Origin(""), str(fault), key if place else ())]

    def sentence(self, fault: BatchgenError) -> str:
        """A fault as a sentence that begins with its place, if it has one."""
        from batchgen.job.faults import JobFileError

        if isinstance(fault, JobFileError):
            return str(fault)
        (located,) = self.located(fault)
        return str(located) if located.origin.source else located.message

    @property
    def exit_code(self) -> int:
        """0 or the smallest code: what the user must fix comes before what the machine lacks."""
        return min((fault.exit_code for fault in self.faults), default=0)

    def raise_faults(self) -> None:
        """Raise what was found as one error with `exit_code`."""
        if self.faults:
            worst = next(f for f in self.faults if f.exit_code == self.exit_code)
            others = [f for f in self.faults if f is not worst]
            raise type(worst)("\n".join(map(self.sentence, [worst, *others]))) from worst


@dataclass(slots=True)
class Prepared:
    """What the checks opened on the way; None where that failed. Close it."""

    inputs: InputSet | None = None
    prompt: PromptSpec | None = None
    source: ModelSource | None = None
    tokenizer_source: ModelSource | None = None

    def close(self) -> None:
        """Close the input's files."""
        if self.inputs is not None:
            self.inputs.close()


def check_job(spec: JobSpec, report: Report, *, rows_for_ids: int, resume: bool = True) -> Prepared:
    """Every check that needs no tokenizer.

    Args:
        spec: the job; what has a fault in it is not looked at.
        report: gets faults, notes and facts.
        rows_for_ids: how many rows to look at for ids that occur twice, where a column holds them.
        resume: whether what the output folder holds will be continued.
    """
    report.spec = spec
    found = Prepared()
    if spec.sound("input.path", "input.format"):
        with report.check("input", "path"):
            found.inputs = open_job_input(spec)
    if found.inputs is not None:
        _check_input(spec, report, found, rows_for_ids)
    if spec.sound("model.path", "model.revision"):
        with report.check("model", "path"):
            found.source = find_model(
                spec, recorded_commit(spec) if resume and spec.sound("output.path") else None
            )
            found.source.check_weights()
    if spec.sound("model.tokenizer"):
        with report.check("model", "tokenizer"):
            found.tokenizer_source = find_tokenizer(spec)
    if spec.sound("output.path"):
        with report.check("output", "path"):
            _check_output_is_folder(spec)
            if spec.output_url is not None:
                _check_store(spec.output_url)
    if spec.sound("output") and spec.output.push_to_hub is not None:
        from batchgen.job.push import require_token

        with report.check("output", "push_to_hub"):
            require_token()
    return found


def _check_input(spec: JobSpec, report: Report, found: Prepared, rows_for_ids: int) -> None:
    assert found.inputs is not None
    if spec.sound("prompt"):
        with report.check("prompt"):
            found.prompt = bind_prompt(spec, found.inputs)
    if spec.sound("input.columns", "output"):
        with report.check("output"):
            report.notes += _check_output_columns(spec, found.inputs)
    if spec.sound("run.priority"):
        with report.check("run", "priority"):
            _check_priority(spec, found.inputs)
    if spec.sound("input"):
        with report.check("input", "path"):
            _check_rows(spec, found.inputs, report, rows_for_ids)


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
            f"({_placed(first, first.error.message)}); correct the file, or say in input.format what it is"
        )


def find_model(spec: JobSpec, commit: str | None = None) -> ModelSource:
    """Where the model lies; fetches no weights.

    Args:
        spec: the job.
        commit: used instead of the job's revision.

    Raises:
        UsageError: nothing is there.
    """
    from batchgen.models.source import find_model

    return find_model(spec.model.path, commit or spec.model.revision, allow_pickle=spec.model.allow_pickle)


def find_tokenizer(spec: JobSpec) -> ModelSource | None:
    """Where the tokenizer lies if it is not the model's own.

    Raises:
        UsageError: nothing is there.
    """
    from batchgen.models.source import find_tokenizer

    return find_tokenizer(spec.model.tokenizer) if spec.model.tokenizer else None


def recorded_commit(spec: JobSpec) -> str | None:
    """The commit at which the output folder's job found this model and revision; a branch may have moved.

    Raises:
        UsageError, StorageError: the folder's manifest cannot be read.
    """
    from batchgen.job.folder import JobFolder
    from batchgen.job.manifest import load_manifest, revision_name

    manifest = load_manifest(JobFolder(spec.output_folder))
    return manifest.commits.get(revision_name(spec.model.path, spec.model.revision)) if manifest else None


def model_files(source: ModelSource, tokenizer_source: ModelSource | None) -> ModelFiles:
    """The files that a job's results depend on.

    Raises:
        UsageError: weights are not all there.
    """
    from batchgen.job.fingerprints import ModelFiles

    tokenizer = source.folder if tokenizer_source is None else _place(tokenizer_source)
    return ModelFiles(source.weight_files(), tokenizer)


def _place(source: ModelSource) -> Path:
    place = source.folder or source.gguf_file
    if place is None:
        raise ValueError("a model source is a folder or a GGUF file")
    return place


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """A model's tokenizer, without any weights.

    Raises:
        UsageError: there is none that loads.
    """
    from batchgen.text.tokenizer import Tokenizer

    return Tokenizer.load(str(source.tokenizer_folder()))


def check_prompt(
    spec: JobSpec, prompt: PromptSpec, tokenizer: Tokenizer, report: Report, inputs: InputSet | None = None
) -> None:
    """Render the job's own roles, and look at what only the tokenizer knows.

    Args:
        spec: the job.
        prompt: its prompt section, bound to the input's columns.
        tokenizer: the model's.
        report: gets faults and notes.
        inputs: whose first rows are tried too.
    """
    from batchgen.text.prompt import PromptRenderer

    with report.check():
        renderer = PromptRenderer(prompt, tokenizer)
        faults = list(renderer.faults())
        report.faults += faults
        report.notes += renderer.notes
        if inputs is not None and not faults:
            _try_rows(spec, renderer, inputs, report)
    for key in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
        for token_id in map(int, getattr(spec.sampling, key)):
            if token_id >= tokenizer.vocab_size:
                report.faults.append(
                    UsageError(
                        f"sampling.{key}: {token_id} is not a token id of this tokenizer; "
                        f"use ids from 0 to {tokenizer.vocab_size - 1}"
                    )
                )


def _try_rows(spec: JobSpec, renderer: PromptRenderer, inputs: InputSet, report: Report) -> None:
    """Render the first rows, and say what would become of those that cannot run."""
    from batchgen.data.prompt_values import prompt_values
    from batchgen.sampling.overrides import RowSampling
    from batchgen.types import RowError, RowFailure

    sampling = RowSampling(spec.sampling.model_dump(), {}, renderer.spec.per_row)
    failed: list[tuple[Row, RowError]] = []
    tried = 0
    readable = (row for row in inputs.window() if row.selected and row.error is None)
    for row in islice(readable, min(spec.input.limit or ROWS_TO_RENDER, ROWS_TO_RENDER)):
        tried += 1
        columns = prompt_values(row, renderer.required_columns())
        try:
            sampled = sampling.of_row(columns)
        except RowFailure as failure:
            failed.append((row, failure.error))
            continue
        explained = renderer.explain(columns, spec.model.max_model_len, sampled)
        if explained.error is not None:
            failed.append((row, explained.error))
    if failed:
        row, error = failed[0]
        report.notes.append(
            f"{len(failed)} of the first {counted(tried, 'row')} cannot run and each becomes a row with "
            f"status {error.status}; {_where(row)}: {error.error_class}: {error.message}"
        )


def check_output_writable(spec: JobSpec) -> None:
    """What `run` will find out by writing: the output folder can be written or made, and has room.

    Raises:
        StorageError: no permission, or less space than `run.min_free_disk`.
    """
    check_output_permission(spec)
    existing = _existing_part(spec.output_folder)
    if not existing.is_dir():
        return
    free = shutil.disk_usage(existing).free
    if free < spec.run.min_free_disk:
        raise StorageError(
            f"output.path: {existing} has {free:,} bytes free and run.min_free_disk asks for "
            f"{spec.run.min_free_disk:,}; free some space or lower run.min_free_disk"
        )


def check_output_permission(spec: JobSpec) -> None:
    """Whether the output folder can be written or made; before weights are fetched or hashed.

    Raises:
        StorageError: no permission.
    """
    existing = _existing_part(spec.output_folder)
    if existing.is_dir() and not os.access(existing, os.W_OK | os.X_OK):
        raise StorageError(
            f"output.path: no permission to write in {existing}; allow it or choose another output.path"
        )


def _existing_part(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if os.path.lexists(path))


def _check_output_is_folder(spec: JobSpec) -> None:
    folder = spec.output_folder
    try:
        folder.stat()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass
    except OSError as error:
        raise UsageError(
            f"output.path: {folder} cannot be a folder ({error.strerror}); choose another"
        ) from error
    existing = _existing_part(folder)
    if existing.is_symlink() and not existing.exists():
        raise UsageError(
            f"output.path: {existing} is a symbolic link to nothing; make the folder it leads to"
        )
    if not existing.is_dir():
        raise UsageError(f"output.path: {existing} is a file; give a folder")


def _check_store(url: str) -> None:
    """Whether the object store's package is there; asks nothing over the network."""
    from batchgen.job.object_store import ObjectStore

    ObjectStore(url)


def _check_output_columns(spec: JobSpec, inputs: InputSet) -> list[str]:
    from batchgen.data.results import plan_output

    plan = plan_output(
        inputs,
        format=spec.output.format,
        columns=spec.input.columns,
        renames=spec.output.columns,
        include=spec.output.include,
        reasoning=spec.sampling.reasoning_column,
        task=Task(spec.task),
    )
    return plan.notes()


def _check_priority(spec: JobSpec, inputs: InputSet) -> None:
    column, columns = spec.run.priority, list(inputs.columns())
    if column is not None and column not in columns:
        raise UsageError(
            f"run.priority: the input has no column {column!r} (it has {', '.join(map(repr, columns))}); "
            "name one of these, or remove run.priority"
        )


@dataclass(slots=True)
class _Scan:
    """What the first rows hold.

    Args:
        read: rows.
        selected: of these, in the selection.
        bad, first_bad: rows that cannot be read.
        unanswered, first_unanswered: rows for which `input.where` has no answer.
        twice: pairs of rows with one id.
    """

    read: int = 0
    selected: int = 0
    bad: int = 0
    first_bad: str = ""
    unanswered: int = 0
    first_unanswered: str = ""
    twice: list[str] = field(default_factory=list)


def _scan(inputs: InputSet, selection: Selection, most: int, *, with_ids: bool) -> _Scan:
    from batchgen.data.where import is_unanswered

    scan = _Scan()
    seen: dict[str, str] = {}
    for row in islice(inputs.rows(), most if selection.stop is None else min(most, selection.stop)):
        scan.read += 1
        if not row.selected or row.ordinal < selection.first:
            continue
        scan.selected += 1
        if row.error is not None and is_unanswered(row.error):
            scan.unanswered += 1
            scan.first_unanswered = scan.first_unanswered or row.error.message
        elif row.error is not None:
            scan.bad += 1
            scan.first_bad = scan.first_bad or _placed(row, row.error.message)
        elif with_ids and row.id in seen:
            scan.twice.append(f"id {row.id!r} is at {seen[row.id]} and at {_where(row)}")
        elif with_ids:
            seen[row.id] = _where(row)
        if scan.selected == selection.limit:
            break
    return scan


def _check_rows(spec: JobSpec, inputs: InputSet, report: Report, most: int) -> None:
    """Look at the first rows: those that are bad, and, where a column holds ids, those that occur twice."""
    from batchgen.data.identity import AUTO_COLUMN
    from batchgen.data.source import WINDOW_ROWS
    from batchgen.job.selection import Selection

    with_ids = inputs.options.id_column is not None or AUTO_COLUMN in inputs.columns()
    selection = Selection.of(spec.input.rows, spec.input.limit)
    scan = _scan(inputs, selection, most if with_ids else min(most, WINDOW_ROWS), with_ids=with_ids)
    report.facts |= {"rows_read": scan.read, "bad_rows": scan.bad, "columns": list(inputs.columns())}
    report.notes += inputs.notes
    report.notes += _undeclared(inputs)
    if not scan.read:
        report.notes.append("the input has no rows")
    if scan.bad and (setting := _stopping_setting(spec)) is not None:
        report.faults.append(
            InputError(
                f"input.path: {scan.bad} of the first {counted(scan.read, 'row')} cannot be read and "
                f"{setting} is set; {scan.first_bad}; correct the row, or let bad rows be recorded "
                "(input.on_bad_row: record, run.fail_fast: false)"
            )
        )
    elif scan.bad:
        report.notes.append(
            f"{scan.bad} of the first {counted(scan.read, 'row')} cannot be read and each becomes an "
            f"error row; {scan.first_bad}"
        )
    if scan.unanswered:
        _judge_unanswered(scan)
        report.notes.append(
            f"input.where has no answer for {scan.unanswered} of the first {counted(scan.read, 'row')}, "
            f"which become error rows; {scan.first_unanswered}"
        )
    elif scan.read > selection.first and not scan.selected:
        report.notes.append(f"none of the first {counted(scan.read, 'row')} is selected by input.where")
    if with_ids and scan.read == most:
        report.notes.append(
            f"only the first {most:,} rows were checked for ids that occur twice; `run` looks at all"
        )
    if scan.twice and spec.input.duplicate_ids != "error":
        fate = "is skipped" if spec.input.duplicate_ids == "keep_first" else "gets a number behind its id"
        report.notes.append(
            f"{len(scan.twice)} of the first {counted(scan.read, 'row')} "
            f"{agreeing(len(scan.twice), 'has', 'have')} the id of an earlier row, and each "
            f"{fate}; {scan.twice[0]}"
        )
    elif scan.twice:
        more = f" and {len(scan.twice) - 3} more" if len(scan.twice) > 3 else ""
        raise UsageError(
            f"input.id: ids must be distinct, but {'; '.join(scan.twice[:3])}{more}; "
            "remove one of each pair, name another column in input.id, or set input.duplicate_ids: suffix or "
            "keep_first"
        )


def _stopping_setting(spec: JobSpec) -> str | None:
    """Because of which setting a bad row ends the run."""
    if spec.input.on_bad_row == "stop":
        return "input.on_bad_row: stop"
    return "run.fail_fast: true" if spec.run.fail_fast else None


def _undeclared(inputs: InputSet) -> Iterator[str]:
    """Columns of `input.schema` that none of the first rows has: rare ones, or misspelled."""
    schema = inputs.options.schema or {}
    seen = {name for row in inputs.window() for name in row.values} if schema else set()
    for name in schema:
        if seen and name not in seen:
            near = difflib.get_close_matches(name, seen - schema.keys(), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            yield f"input.schema: none of the first rows has a column {name!r}{hint}"


def _judge_unanswered(scan: _Scan) -> None:
    """An expression that says nothing of any row is wrong; of a few rows, the rows are."""
    if scan.unanswered + scan.bad == scan.selected == scan.read:
        raise UsageError(
            f"{scan.first_unanswered}; it has no answer for any row that was looked at; correct it"
        )


def _placed(row: Row, message: str) -> str:
    """A message with its row's place, which the messages of some readers begin with."""
    place = _where(row)
    return message if message.startswith(place) else f"{place}: {message}"


def _where(row: Row) -> str:
    return f"{row.file} line {row.line}" if row.line else f"{row.file} row {row.ordinal}"
