"""Start measured runs and gather what they found. For the `bench` verb.

Every run, ours too, is a process of its own, and contestants take turns: A B C, A B C, … A machine whose
speed drifts then slows all of them, and a ratio is always of two runs of the same round.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchgen.bench.accuracy import agreement, perplexity
from batchgen.bench.workloads import REFERENCE_SHAPE, Workload, warmup_rows, windows, write_rows
from batchgen.dist.handle import worker_environment
from batchgen.grammar import counted
from batchgen.types import BatchgenError, EngineError

FORMAT = 1
EOS = 2
"""Of the references' model."""
_LINES = 3
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Contestant:
    """What is run against others.

    Args:
        name: for the table.
        command: the beginning of its command line; what `peers/harness.py` takes follows.
        model: file or folder; empty where `options` say it.
        precision: what its weights are computed in; None where the run itself tells.
        options: of its script.
        environment: set besides that of this process.
        is_ours: whether it is batchgen, without which there is no result.
        shared_only: whether to leave it out where rows have no prefix in common.
    """

    name: str
    command: Sequence[str]
    model: str = ""
    precision: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    is_ours: bool = False
    shared_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How a contest is run.

    Args:
        threads: for each contestant.
        repeats: rounds, at least.
        min_duration: seconds that ours is measured in all, at least; more rounds follow until it is.
        timeout: seconds after which a run has failed, loading included.
        score: whether the first round also scores real text.
    """

    threads: int
    repeats: int = 1
    min_duration: float = 0.0
    timeout: float = 3600.0
    score: bool = True


class RunFailed(Exception):
    """A run gave no result; says why, with the exit code of a batchgen that told it."""

    def __init__(self, message: str, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def ours(name: str, job: Path, sets: Sequence[str], *, own: bool) -> Contestant:
    """batchgen's engine as a job describes it; `own` for the job's rows in place of a workload's."""
    options = {"job": str(job), "sets": list(sets), "own": own}
    command = [sys.executable, "-m", "batchgen.bench.ours"]
    return Contestant(name, command, options=options, environment=worker_environment(), is_ours=True)


def contest(
    workload: Workload | None, contestants: Sequence[Contestant], rules: Rules, say: Say = lambda _: None
) -> dict[str, Any]:
    """Measure contestants on a workload, ours first.

    Args:
        workload: None for the rows of the job that ours is told of.
        contestants: the first is ours, to which the others are compared.
        rules: how often and how long.
        say: told of each run.

    Returns:
        What `docs/bench.md` describes under `workloads`.

    Raises:
        BatchgenError: ours gave no result.
    """
    name = "job" if workload is None else workload.name
    taking_part = [c for c in contestants if not c.shared_only or name == "shared-prefix"]
    runs: dict[str, list[dict[str, Any]]] = {c.name: [] for c in taking_part}
    with _files(workload) as files:
        while _goes_on(runs[taking_part[0].name], rules):
            number = len(runs[taking_part[0].name])
            for contestant in taking_part:
                given = files if number == 0 and rules.score else {**files, "windows": None}
                found = _attempt(contestant, given, rules, workload)
                runs[contestant.name].append({"round": number, **found})
                say(_said(name, number, contestant, found))
    return _gathered(name, workload, taking_part, runs)


def _goes_on(runs: Sequence[Mapping[str, Any]], rules: Rules) -> bool:
    return len(runs) < rules.repeats or sum(run["seconds"] for run in runs) < rules.min_duration


@contextmanager
def _files(workload: Workload | None) -> Iterator[dict[str, Path | None]]:
    with tempfile.TemporaryDirectory(prefix="batchgen-bench-") as name:
        folder = Path(name)
        texts = folder / "windows.json"
        texts.write_text(json.dumps(windows()))
        yield {
            "rows": write_rows(folder / "rows.json", workload.rows if workload else []),
            "warmup": write_rows(folder / "warmup.json", warmup_rows()),
            # Scoring is in tokens of the workloads' model.
            "windows": None if workload is None else texts,
        }


def _attempt(
    contestant: Contestant, files: Mapping[str, Path | None], rules: Rules, workload: Workload | None
) -> dict[str, Any]:
    """A run's figures, or `{"error": …}` of a contestant that is not ours."""
    try:
        return _figures(_run(contestant, files, rules), workload)
    except RunFailed as failure:
        if contestant.is_ours:
            raise _error(failure) from None
        return {"error": str(failure)}


def _error(failure: RunFailed) -> BatchgenError:
    kinds = (kind for kind in _subclasses(BatchgenError) if kind.exit_code == failure.exit_code)
    return next(kinds, EngineError)(str(failure))


def _subclasses(kind: type[BatchgenError]) -> Iterator[type[BatchgenError]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _run(contestant: Contestant, files: Mapping[str, Path | None], rules: Rules) -> dict[str, Any]:
    """One process.

    Raises:
        RunFailed: it gave no result, or not in time.
    """
    command = [*contestant.command, "--threads", str(rules.threads), "--model", contestant.model]
    for option, file in files.items():
        command += [] if file is None else [f"--{option}", str(file)]
    command += ["--options", json.dumps(dict(contestant.options))]
    environment = {**os.environ, **contestant.environment}
    with tempfile.TemporaryFile() as errors:
        try:
            # In a session of its own, so that what it started ends with it.
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, env=environment, start_new_session=True
            )
        except OSError as error:
            raise RunFailed(f"{contestant.command[0]} cannot be started: {error.strerror}") from error
        try:
            output, _ = process.communicate(timeout=rules.timeout)
        except subprocess.TimeoutExpired:
            raise RunFailed(
                f"no result after {rules.timeout:,.0f} s; allow more with --timeout, or take fewer rows with "
                "--limit"
            ) from None
        finally:
            _end(process)
        errors.seek(0)
        return _result(output, process.returncode, errors.read())


def _end(process: subprocess.Popen[bytes]) -> None:
    """Leave nothing of a run behind."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _result(output: bytes, code: int, errors: bytes) -> dict[str, Any]:
    lines = output.decode(errors="replace").splitlines()
    try:
        result = json.loads(lines[-1])
    except (IndexError, ValueError):
        said = " / ".join(errors.decode(errors="replace").strip().splitlines()[-_LINES:])
        raise RunFailed(f"it ended with {code} and without a result: {said or 'nothing was said'}") from None
    if "error" in result:
        raise RunFailed(result["error"], result["exit_code"])
    return dict(result)


def _figures(result: dict[str, Any], workload: Workload | None) -> dict[str, Any]:
    """Rates of a run, and how its outputs agree with the references."""
    outputs, details = result["outputs"], result.get("details")
    if workload is None:
        prompt, new = result["details"]["prompt_tokens"], result["details"]["output_tokens"]
    else:
        _check(outputs, workload)
        prompt, new = sum(len(r.prompt_ids) for r in workload.rows), sum(map(len, outputs))
    seconds = result["seconds"]
    score = result.get("negative_logprob")
    return {
        "version": result["version"],
        "seconds": seconds,
        "load_seconds": result["load_seconds"],
        "prompt_tokens": prompt,
        "output_tokens": new,
        "prompt_rate": prompt / seconds,
        "output_rate": new / seconds,
        "total_rate": (prompt + new) / seconds,
        "peak_memory": result["peak_memory"],
        "others_seconds": result["others_seconds"],
        "agreement": _agreement(outputs, workload, details),
        "perplexity": None if score is None else perplexity(*score),
        "details": details,
    }


def _check(outputs: Sequence[Sequence[int]], workload: Workload) -> None:
    """A run that does less than was asked of it is not fast but wrong."""
    wanted = [row.max_new_tokens for row in workload.rows]
    if list(map(len, outputs)) != wanted:
        number = next(
            (i for i, (o, n) in enumerate(zip(outputs, wanted, strict=False)) if len(o) != n), len(outputs)
        )
        got = len(outputs[number]) if number < len(outputs) else 0
        raise RunFailed(f"row {number} has {counted(got, 'token')} of {wanted[number]} that were asked for")


def _agreement(
    outputs: list[list[int]], workload: Workload | None, details: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    if workload is None or (details is not None and details["shape"] != REFERENCE_SHAPE):
        return None
    found = agreement(outputs, [row.reference for row in workload.rows], EOS)
    return None if found is None else {"rows": found.rows, "exact": found.exact, "share": found.share}


def _gathered(
    name: str,
    workload: Workload | None,
    contestants: Sequence[Contestant],
    runs: Mapping[str, list[dict[str, Any]]],
) -> dict[str, Any]:
    first = runs[contestants[0].name]
    rows = len(workload.rows) if workload else first[0]["details"]["rows"]
    return {
        "name": name,
        "rows": rows,
        "prompt_tokens": first[0]["prompt_tokens"],
        "output_tokens": first[0]["output_tokens"],
        "contestants": [
            {
                "name": c.name,
                "is_ours": c.is_ours,
                "precision": c.precision or _precision(runs[c.name]),
                "runs": runs[c.name],
                "median": medians(runs[c.name]),
                "ours_over_it": None if i == 0 else ratio(first, runs[c.name]),
            }
            for i, c in enumerate(contestants)
        ],
    }


def _precision(runs: Sequence[Mapping[str, Any]]) -> str | None:
    for run in runs:
        if run.get("details"):
            facts = run["details"]["facts"]
            return str(facts.get("quantization") or facts.get("dtype"))
    return None


def medians(runs: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    """Of the runs that gave a result; None if none did."""
    good = [run for run in runs if "error" not in run]
    names = ("seconds", "load_seconds", "prompt_rate", "output_rate", "total_rate")
    return {name: statistics.median(run[name] for run in good) for name in names} if good else None


def ratio(
    ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]
) -> dict[str, float | int] | None:
    """How many times as fast ours was, in rounds in which both gave a result; None where there is none."""
    pairs = zip(ours, theirs, strict=True)
    found = [a["total_rate"] / b["total_rate"] for a, b in pairs if "error" not in a and "error" not in b]
    if not found:
        return None
    return {"median": statistics.median(found), "min": min(found), "max": max(found), "rounds": len(found)}


def _said(name: str, number: int, contestant: Contestant, found: Mapping[str, Any]) -> str:
    begin = f"{name}, round {number + 1}, {contestant.name}: "
    if "error" in found:
        return f"{begin}{found['error']}"
    return begin + f"{found['total_rate']:,.0f} tokens/s in {found['seconds']:,.1f} s"
