"""`batchgen plan`: what a job will do, without a GPU and without weights."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from batchgen.cli.options import AS_JSON, JOB, SET, human_size, print_json
from batchgen.grammar import agreeing, counted

if TYPE_CHECKING:
    from batchgen.api.check_report import Report
    from batchgen.api.checks import Prepared
    from batchgen.data.row import Row
    from batchgen.data.source import InputSet
    from batchgen.job.fingerprints import Fingerprints
    from batchgen.job.plan_folder import FolderOutlook
    from batchgen.job.plan_rows import Everything, Sample
    from batchgen.job.plan_tokens import TokenCounter
    from batchgen.job.selection import Selection
    from batchgen.job.spec.job import JobSpec
    from batchgen.text.prompt import PromptRenderer
    from batchgen.text.task_request import TaskRequests

READ = 100_000
RESULTS = {
    "loglikelihood": "{scored} are scored; nothing is generated",
    "perplexity": "{scored} are scored; nothing is generated",
    "embed": "a vector for each row; nothing is generated",
    "classify": "a score for each label of each row; nothing is generated",
}
"""What comes of a row with tasks that generate nothing."""
SAMPLE = 2_000


@click.command("plan", short_help="What a job will do: rows, tokens, faults, disk, a resume; no weights.")
@JOB
@click.option("--full", is_flag=True, help="Read and tokenize every row; minutes on large inputs.")
@click.option(
    "--sample",
    type=click.IntRange(min=1),
    default=SAMPLE,
    show_default=True,
    metavar="N",
    help=f"Tokenize N rows, taken evenly from the first {READ:,}.",
)
@SET
@AS_JSON
def command(job: Path, full: bool, sample: int, sets: tuple[str, ...], as_json: bool) -> int:
    """Show what a job will do before it costs anything.

    Rows and tokens, what would fail and why, prompts that are too long, rows that occur twice, shared
    beginnings, disk, and what `run` would do with what the output folder holds. The exit code is what `run`
    would end with before it loads weights: 0, 2, 3, 4 or 5.
    """
    from batchgen.api import checks
    from batchgen.api.check_output import check_output_writable
    from batchgen.api.check_report import Report
    from batchgen.job.load import load_job

    spec = load_job(job, sets)
    report = Report()
    with closing(checks.check_job(spec, report, rows_for_ids=checks.ROWS_FOR_IDS)) as found:
        if found.inputs is None or found.prompt is None or found.source is None:
            report.raise_faults()
        with report.check("output", "path"):
            check_output_writable(spec)
        plan = _plan(spec, found, report, None if full else sample)
    plan["bits"] = _bits(spec)
    _judge(spec, plan, report)
    plan |= {
        "faults": [report.sentence(fault) for fault in report.faults],
        "notes": [*spec.notes, *report.notes],
        "exit_code": report.exit_code,
    }
    if as_json:
        print_json(plan)
    else:
        _print(plan)
    return report.exit_code


def _bits(spec: JobSpec) -> dict[str, Any]:
    """What is promised about them."""
    from batchgen.devices import likely_kind
    from batchgen.promise import promise, resolve_dtypes

    device = likely_kind(spec.engine.device)
    dtype, kv_dtype = resolve_dtypes(spec.model.dtype, spec.engine.kv_cache_dtype, device)
    asked = spec.engine.deterministic
    return {
        "device": device,
        "dtype": dtype,
        "quantization": spec.model.quantization,
        "kv_cache_dtype": kv_dtype,
        "deterministic": asked,
        "promise": promise(device, dtype, kv_dtype, asked).sentence,
    }


def _judge(spec: JobSpec, plan: Mapping[str, Any], report: Report) -> None:
    """What would stop `run` besides what the checks have found."""
    from batchgen.types import DriftError, UsageError

    ids = plan["duplicates"]["ids"]
    if ids["rows"] and spec.input.duplicate_ids == "error" and not report.faults:
        example = ids["examples"][0]
        report.faults.append(
            UsageError(
                f"input.id: ids must be distinct, but {counted(ids['rows'], 'row')} "
                f"{agreeing(ids['rows'], 'has', 'have')} the id of an earlier one, "
                f"as row {example['row']:,} has that of row {example['equals_row']:,}; remove them, name "
                "another column in input.id, or set input.duplicate_ids: suffix or keep_first"
            )
        )
    if plan["resume"]["would"] == "refuse":
        report.faults.append(
            DriftError(
                f"output.path: {spec.output.path} belongs to a job that differs from this one; undo what is "
                "shown above, choose another output.path, or see what `run` says of --accept-drift"
            )
        )


def _plan(spec: JobSpec, found: Prepared, report: Report, sample: int | None) -> dict[str, Any]:
    from batchgen.api.check_model import check_model
    from batchgen.api.check_prompt import check_prompt
    from batchgen.api.job_model import find_pooling, load_tokenizer
    from batchgen.job.plan import Outlook, make_plan
    from batchgen.job.plan_rows import scan_rows
    from batchgen.job.plan_tokens import NO_LIMIT
    from batchgen.job.selection import Selection
    from batchgen.text.prompt import PromptRenderer
    from batchgen.text.task_request import TaskRequests
    from batchgen.types import Task

    assert found.inputs is not None
    assert found.prompt is not None
    assert found.source is not None
    tokenizer = load_tokenizer(found.tokenizer_source or found.source)
    before = len(report.faults)
    check_prompt(spec, found.prompt, tokenizer, report)
    if len(report.faults) > before:
        # Every row would fail to render; there is nothing to count.
        report.raise_faults()
    check_model(spec, found.source, report, here=False)
    folder = _folder(spec, found, report)
    longest = _max_model_len(spec, found, folder)
    pooling = find_pooling(spec, found.source)
    requests = TaskRequests(Task(spec.task), tokenizer, longest or NO_LIMIT, pooling)
    renderer = PromptRenderer(found.prompt, tokenizer)
    counter, sampler = _tokenizing(spec, renderer, requests, longest, sample)
    columns = sorted(found.prompt.required_columns())
    selection = Selection.of(spec.input.rows, spec.input.limit)
    reading = _Reading(found.inputs, selection)
    scan = scan_rows(reading.rows(), columns, None if sample is None else READ, sampler)
    end = found.inputs.num_rows()
    if end is None and folder is not None:
        end = folder.rows_input
    # How many rows an expression lets through is not known before they are read.
    known = None if spec.input.where is not None else selection.most_rows(end)
    existing = next(path for path in (spec.output_folder, *spec.output_folder.parents) if path.exists())
    return make_plan(
        Outlook(
            scan=scan,
            tokens=counter.scan,
            full=sample is None,
            rows_known=known if end is not None else None,
            rows_guessed=reading.guess(end),
            folder=folder,
            max_model_len=longest,
            overflow=spec.prompt.overflow,
            dialogues=spec.sampling.turns is not None,
            task=Task(spec.task),
            result_bytes=_result_bytes(spec, found),
            bytes_free=shutil.disk_usage(existing).free,
            min_free_disk=spec.run.min_free_disk,
        )
    )


def _result_bytes(spec: JobSpec, found: Prepared) -> int:
    """Of the vector of each row, where there is one."""
    from batchgen.models.pooling import embedding_size
    from batchgen.types import Task

    assert found.source is not None
    if spec.task != Task.EMBED:
        return 0
    return 4 * (embedding_size(found.source.tokenizer_folder()) or 0)


def _tokenizing(
    spec: JobSpec,
    renderer: PromptRenderer,
    requests: TaskRequests,
    longest: int | None,
    sample: int | None,
) -> tuple[TokenCounter, Everything | Sample]:
    from batchgen.job.plan_rows import Everything, Sample
    from batchgen.job.plan_tokens import TokenCounter
    from batchgen.sampling.overrides import RowSampling

    sampling = RowSampling(spec.sampling.model_dump(), {}, renderer.spec.per_row)
    cut = spec.prompt.overflow.startswith("truncate")
    dialogues = renderer.spec.turns is not None
    counter = TokenCounter(renderer, requests, sampling.of_row, longest, cut=cut, dialogues=dialogues)
    return counter, Everything(counter.take) if sample is None else Sample(sample, counter.take)


class _Reading:
    """The rows of a selection, and how far reading them came."""

    def __init__(self, inputs: InputSet, selection: Selection) -> None:
        self._inputs = inputs
        self._selection = selection
        self._last: Row | None = None
        self._selected = 0

    def rows(self) -> Iterator[Row]:
        """Those that would run, in input order."""
        selection = self._selection
        for row in self._inputs.rows():
            if selection.stop is not None and row.ordinal >= selection.stop:
                return
            self._last = row
            if row.selected and row.ordinal >= selection.first:
                self._selected += 1
                yield row
                if self._selected == selection.limit:
                    return

    def guess(self, end: int | None) -> int | None:
        """Rows of the selection, if what follows is like what was read; None where nothing tells.

        Args:
            end: rows of the input; None where only their bytes tell.
        """
        if self._last is None:
            return None
        ordinal = self._last.ordinal + 1
        end = self._end(ordinal) if end is None else end
        if end is None or ordinal <= self._selection.first:
            return None
        share = self._selected / (ordinal - self._selection.first)
        stop = end if self._selection.stop is None else min(end, self._selection.stop)
        rows = round(share * max(0, stop - self._selection.first))
        return rows if self._selection.limit is None else min(rows, self._selection.limit)

    def _end(self, ordinal: int) -> int | None:
        """Rows of the input, by the bytes of those that were read; compression hides them."""
        assert self._last is not None
        files = self._inputs.files
        if any(file.compression != "none" for file in files):
            return None
        place = self._last.next_position
        read = sum(file.size for file in files[: place.file_index]) + place.offset
        return round(ordinal * sum(file.size for file in files) / read) if read else None


def _folder(spec: JobSpec, found: Prepared, report: Report) -> FolderOutlook | None:
    """What the output folder holds; of one in an object store, by a copy."""
    from batchgen.job.plan_folder import look_at_folder
    from batchgen.types import UsageError

    if spec.output_url is not None:
        from batchgen.job.remote import fetched

        try:
            with fetched(spec.output_url) as copy:
                return look_at_folder(copy, _fingerprints(spec, found, report))
        except UsageError:
            return None
    if not (spec.output_folder / "manifest.json").exists():
        return None
    return look_at_folder(spec.output_folder, _fingerprints(spec, found, report))


def _fingerprints(spec: JobSpec, found: Prepared, report: Report) -> Fingerprints | None:
    """Of the job; None where its weights are not here to be compared."""
    from batchgen.api.job_model import model_files
    from batchgen.job.fingerprints import fingerprint
    from batchgen.types import UsageError

    assert found.inputs is not None
    assert found.source is not None
    try:
        return fingerprint(
            spec, model_files(found.source, found.tokenizer_source), found.inputs.fingerprint()
        )
    except UsageError as error:
        report.notes.append(f"the job was not compared with the output folder's: {error}")
        return None


def _max_model_len(spec: JobSpec, found: Prepared, folder: FolderOutlook | None) -> int | None:
    """Pinned, asked for, or what the model was made for; the engine may find less memory than that."""
    from batchgen.models.source import declared_context_length

    if folder is not None and folder.max_model_len is not None:
        return folder.max_model_len
    if spec.model.max_model_len is not None:
        return spec.model.max_model_len
    assert found.source is not None
    return declared_context_length(found.source.tokenizer_folder())


def _print(plan: Mapping[str, Any]) -> None:
    from batchgen.text.terminal import safe_line

    for line in _lines(plan):
        click.echo(safe_line(line))


def _lines(plan: Mapping[str, Any]) -> Iterator[str]:
    rows, tokens, disk = plan["rows"], plan["tokens"], plan["disk"]
    about = "" if rows["exact"] else "about "
    yield f"rows      {about}{_number(rows['total'])}; {rows['read']:,} read, {rows['tokenized']:,} tokenized"
    about = "" if tokens["exact"] else "about "
    if tokens["prompt_at_least"]:
        # Later turns hold the answers before them, which nobody knows yet.
        about += "at least "
    lengths = tokens["prompt_lengths"]
    generates = plan["task"] == "generate"
    yield (
        f"{'prompts' if generates else 'texts  '}   {about}{_tokens(tokens['prompt'])} in all; a row has "
        f"{lengths['mean']:,.0f} in the mean, {lengths['p50']:,.0f} in the median, "
        f"{lengths['max']:,.0f} at most"
    )
    yield f"outputs   {_outputs(plan)}"
    if tokens["shared_prefix_share"] is not None:
        share = f"{tokens['shared_prefix_share']:.0%}"
        yield f"prefixes  {share} of prompt tokens are in beginnings that prompts share"
    yield from _finding_lines(plan)
    bits = plan["bits"]
    products = f", products in {bits['quantization']}" if bits["quantization"] else ""
    settings = f"{bits['device']}, {bits['dtype']}{products}, KV cache in {bits['kv_cache_dtype']}"
    yield f"bits      {settings}: {bits['promise']}"
    yield f"disk      {human_size(disk['needed'])} needed ({disk['basis']}), {human_size(disk['free'])} free"
    yield from _resume_lines(plan)
    for fault in plan["faults"]:
        yield f"fault     {fault}"
    for warning in plan["warnings"]:
        yield f"warning   {warning}"
    for note in plan["notes"]:
        yield f"note      {note}"


def _outputs(plan: Mapping[str, Any]) -> str:
    """What comes of the rows, by the job's task."""
    tokens = plan["tokens"]
    if plan["task"] in RESULTS:
        return RESULTS[plan["task"]].format(scored=_tokens(tokens["scored"]))
    expected = tokens["output_expected"]
    return f"at most {_tokens(tokens['output_at_most'])}" + (
        "" if expected is None else f", {_number(expected)} if they are as long as those that are done"
    )


def _finding_lines(plan: Mapping[str, Any]) -> Iterator[str]:
    long = plan["too_long"]
    if long["max_model_len"] is None:
        yield "context   its length is not known without the weights"
    else:
        yield (
            f"context   {counted(long['max_model_len'], 'token')}; {long['found']:,} of "
            f"{counted(long['among_rows'], 'prompt')} {agreeing(long['found'], 'is', 'are')} too long"
            + (f" and {long['they']}" if long["found"] else "")
        )
    for example in long["examples"]:
        yield f"          row {example['row']:,} has {counted(example['tokens'], 'token')}"
    for error in plan["errors"]:
        yield (
            f"error     {error['class']}: {error['found']:,} of {counted(error['among_rows'], 'row')}, "
            f"about {_number(error['estimated'])} in all"
        )
        for example in error["examples"]:
            yield f"          row {example['row']:,}: {example['message']}"
    among = plan["duplicates"]["among_rows"]
    for key, name in (("ids", "the id"), ("prompts", "the prompt")):
        found = plan["duplicates"][key]
        pairs = ", ".join(f"row {e['row']:,} as row {e['equals_row']:,}" for e in found["examples"])
        yield (
            f"twice     {found['rows']:,} of {counted(among, 'row')} "
            f"{agreeing(found['rows'], 'has', 'have')} {name} of an earlier one"
            + (f": {pairs}" if pairs else "")
        )
    control = plan["control_tokens"]
    if control["tokens"]:
        yield (
            f"control   {counted(control['tokens'], 'control token')} in the text of "
            f"{counted(control['rows'], 'row')}"
        )
    for note, count in plan["input_notes"].items():
        yield f"input     {note}: {counted(count, 'row')}"


def _resume_lines(plan: Mapping[str, Any]) -> Iterator[str]:
    from batchgen.api.progress import clock

    resume, left = plan["resume"], _number(plan["rows"]["left"])
    sentence = {
        "start": "would start the job: the output folder holds none",
        "continue": f"would continue: {counted(resume['rows_done'], 'row')} done, {left} left",
        "do nothing": "would do nothing: every row is done",
        "wait": "would wait for the run that owns the folder, and refuse if it lives",
        "refuse": "would refuse: the folder belongs to a job that differs from this one",
    }
    yield f"run       {sentence[resume['would']]}"
    for difference in resume["differences"]:
        for line in difference.split("\n"):
            yield f"          {line.strip()}"
    if plan["seconds"] is not None:
        yield f"time      about {clock(plan['seconds'])} at the speed of earlier attempts"


def _number(value: float | None) -> str:
    return "an unknown number of" if value is None else f"{value:,}"


def _tokens(number: int | None) -> str:
    return "an unknown number of tokens" if number is None else counted(number, "token")
