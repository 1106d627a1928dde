"""`batchgen bench`: how fast, of what the machine can do, and beside other engines."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from batchgen.cli.options import SET

if TYPE_CHECKING:
    from batchgen.bench.contest import Contestant, Rules
    from batchgen.bench.installed import Peer
    from batchgen.bench.workloads import Workload

WORKLOADS = ("shared-prefix", "unique", "single", "long", "prefill", "decode", "all")
REPEATS_BESIDE_OTHERS = 3
FAULTS = 8


@click.command(
    "bench", short_help="Speed on standard rows or a job's, of what the machine can do; beside others."
)
@click.argument("job", required=False, type=click.Path(path_type=Path))
@click.option("--model", metavar="MODEL", help="Hub id, folder or GGUF file; in place of a JOB.")
@click.option(
    "--workload",
    "names",
    multiple=True,
    type=click.Choice(WORKLOADS),
    help="Standard rows to measure; may be repeated. With a JOB: its model and engine on these rows.  "
    "[default: the job's rows, else all: the first three]",
)
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Measure only the first N rows.")
@click.option("--scenario", type=click.Choice(["offline"]), default="offline", show_default=True)
@click.option(
    "--peers", "beside", is_flag=True, help="Run the other engines that `make peers` installed, too."
)
@click.option("--peer", "chosen", multiple=True, metavar="NAME", help="Only this one; may be repeated.")
@click.option(
    "--variant",
    "variants",
    multiple=True,
    metavar="KEY=VALUE",
    help="Run batchgen once more with this setting, beside itself; may be repeated.",
)
@click.option(
    "--repeats",
    type=click.IntRange(min=1),
    metavar="N",
    help=f"Rounds; contestants take turns.  [default: 1, beside others {REPEATS_BESIDE_OTHERS}]",
)
@click.option(
    "--min-duration",
    type=click.FloatRange(min=0),
    default=0,
    metavar="SECONDS",
    help="More rounds, until batchgen was measured for as long.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=3600,
    show_default=True,
    metavar="SECONDS",
    help="A run that takes longer has failed.",
)
@click.option(
    "--kernels",
    is_flag=True,
    help="Each kernel by itself, of what this device can do, at the shapes of --model, else of a dummy.",
)
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path), metavar="FILE", help="Write all figures."
)
@SET
def command(
    job: Path | None,
    model: str | None,
    names: tuple[str, ...],
    limit: int | None,
    scenario: str,
    beside: bool,
    chosen: tuple[str, ...],
    variants: tuple[str, ...],
    repeats: int | None,
    min_duration: float,
    timeout: float,
    kernels: bool,
    json_file: Path | None,
    sets: tuple[str, ...],
) -> int:
    """Measure a job, or a model on standard rows. Writes no output folder.

    Each run is a process of its own; loading and a warm-up are left out of its time. Prints tokens per
    second, the share of what the machine can do at this model's shapes, where the time of a step goes, and
    how far greedy output agrees with transformers in float32 where that is known. Ends with 8 if another
    engine failed.
    """
    from batchgen.bench.contest import Rules

    if kernels:
        if job is not None:
            raise click.UsageError("--kernels measures no rows; give no JOB, or --model for its shapes")
        return _kernels(model, json_file)
    if (job is None) == (model is None):
        raise click.UsageError("give a JOB, or --model and no JOB")
    peers, missing = _peers(beside, chosen)
    rows = list(_workloads(names, limit, has_job=job is not None))
    if peers and None in rows:
        raise click.UsageError(
            "--peers: other engines run the standard rows, not a job's; choose some with --workload"
        )
    rules = Rules(
        threads=_threads(),
        repeats=repeats or (REPEATS_BESIDE_OTHERS if beside or chosen or variants else 1),
        min_duration=min_duration,
        timeout=timeout,
    )
    if json_file is not None:
        _check_writable(json_file)
    limited = [*sets, *([f"input.limit={limit}"] if limit is not None and None in rows else [])]
    with _job_file(job, model) as file:
        contestants = _contestants(file, limited, variants, own=None in rows) + [
            peer.contestant(_peers_root()) for peer in peers
        ]
        report = _report(rows, contestants, rules, missing)
    _print(report)
    if json_file is not None:
        _write(json_file, report)
    return FAULTS if _has_failed(report) else 0


def _kernels(model: str | None, json_file: Path | None) -> int:
    from batchgen.bench.environment import environment
    from batchgen.bench.kernels import lines, measured_here

    if json_file is not None:
        _check_writable(json_file)
    figures = measured_here(model, lambda line: click.echo(line, err=True))
    for line in lines(figures):
        click.echo(line)
    if json_file is not None:
        _write(json_file, {**environment(_threads()), **figures})
    return 0


def _workloads(names: Sequence[str], limit: int | None, *, has_job: bool) -> Iterator[Workload | None]:
    """What to measure; None for the job's own rows."""
    from batchgen.bench import workloads

    if not names and has_job:
        yield None
        return
    chosen: dict[str, None] = {}
    for name in names or ("all",):
        chosen.update(dict.fromkeys({"all": workloads.STANDARD, "long": workloads.LONG}.get(name, (name,))))
    for name in chosen:
        yield workloads.load_workload(name, limit)


def _peers(beside: bool, chosen: Sequence[str]) -> tuple[list[Peer], list[dict[str, str]]]:
    """Those to run, and what to say of those that are not there."""
    from batchgen.bench.installed import PEERS, REMEDY
    from batchgen.types import UsageError

    known = {peer.name: peer for peer in PEERS}
    for name in chosen:
        if name not in known:
            raise UsageError(f"--peer {name}: there is none of this name; use {', '.join(known)}")
    wanted = [known[name] for name in chosen] if chosen else list(PEERS) if beside else []
    root, there, missing = _peers_root(), [], []
    for peer in wanted:
        reason = peer.missing(root)
        if reason is None:
            there.append(peer)
        elif chosen:
            raise UsageError(f"--peer {peer.name}: it is not installed ({reason}); {REMEDY}")
        else:
            missing.append({"name": peer.name, "reason": reason, "remedy": REMEDY})
    return there, missing


def _peers_root() -> Path:
    from batchgen.bench.installed import peers_folder

    return peers_folder()


def _threads() -> int:
    import os

    return len(os.sched_getaffinity(0))


@contextmanager
def _job_file(job: Path | None, model: str | None) -> Iterator[Path]:
    """The job, or one of a single prompt that lends its model and engine."""
    if job is not None:
        yield job
        return
    assert model is not None
    path = Path(model).expanduser()
    place = str(path.absolute()) if path.exists() else model
    with tempfile.TemporaryDirectory(prefix="batchgen-bench-") as name:
        folder = Path(name)
        (folder / "prompts.jsonl").write_text('{"prompt": "one"}\n')
        # JSON is YAML.
        values = {
            "model": place,
            "input": "prompts.jsonl",
            "output": "out/",
            "prompt": {"mode": "completion"},
        }
        (folder / "job.yaml").write_text(json.dumps(values))
        yield folder / "job.yaml"


def _contestants(file: Path, sets: Sequence[str], variants: Sequence[str], *, own: bool) -> list[Contestant]:
    """batchgen, and its variants; a job with a fault is refused here, before anything is started."""
    from batchgen.bench.contest import ours
    from batchgen.job.load import load_job

    found = []
    for variant in (None, *variants):
        settings = [*sets, *([] if variant is None else [variant])]
        load_job(file, settings)
        name = "batchgen" if variant is None else f"batchgen {variant}"
        found.append(ours(name, file.absolute(), settings, own=own))
    return found


def _report(
    rows: Sequence[Workload | None],
    contestants: Sequence[Contestant],
    rules: Rules,
    missing: list[dict[str, str]],
) -> dict[str, Any]:
    from batchgen.bench.contest import contest
    from batchgen.bench.environment import environment

    measured = [
        contest(workload, contestants, rules, lambda line: click.echo(line, err=True)) for workload in rows
    ]
    return {**environment(rules.threads), "missing": missing, "workloads": measured}


def _has_failed(report: dict[str, Any]) -> bool:
    contestants = (c for workload in report["workloads"] for c in workload["contestants"])
    return any("error" in run for c in contestants for run in c["runs"])


def _print(report: dict[str, Any]) -> None:
    from batchgen.bench.table import lines
    from batchgen.text.terminal import safe_line

    for line in lines(report):
        click.echo(safe_line(line))


def _check_writable(file: Path) -> None:
    """Raises UsageError before anything is measured that could then not be kept."""
    from batchgen.types import UsageError

    if not file.absolute().parent.is_dir():
        raise UsageError(f"--json {file}: there is no folder {file.absolute().parent}; make it first")


def _write(file: Path, report: dict[str, Any]) -> None:
    from batchgen.job.files import atomic_write

    atomic_write(file, json.dumps(report, indent=1, allow_nan=False).encode() + b"\n")
