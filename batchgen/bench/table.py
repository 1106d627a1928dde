"""What a contest found, for a person to read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from batchgen.bench.parts import ALL, DECODING, MIXED, PARTS, PROMPTS
from batchgen.grammar import counted

_STEPS = {PROMPTS: "of prompts", MIXED: "of little of prompts", DECODING: "that only decode"}
_WHOLE = {ALL: "the time", PROMPTS: "a step of prompts", DECODING: "a step that only decodes"}
_SHARED = 0.95
"""Of the bytes that rows read, those that are counted once; above, they share nothing worth telling."""
_BUSY = 0.05
"""Share of the processors' time that others may use before a run is doubted."""


def lines(report: Mapping[str, Any]) -> Iterator[str]:
    """All of a report; see `docs/bench.md`."""
    machine = report["machine"]
    yield f"$ {report['command']}"
    yield (
        f"{report['when']}, {machine['cpu']}, {counted(machine['threads'], 'thread')} of "
        f"{counted(machine['cores'], 'core')}, {machine['instructions']}"
    )
    yield ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    for missing in report["missing"]:
        yield f"not here: {missing['name']} ({missing['reason']}); {missing['remedy']}"
    for workload in report["workloads"]:
        yield ""
        yield from _workload(workload, machine["threads"])
    yield from _cliffs(report["workloads"])


def _workload(workload: Mapping[str, Any], threads: int) -> Iterator[str]:
    yield (
        f"{workload['name']}: {counted(workload['rows'], 'row')}, "
        f"{counted(workload['prompt_tokens'], 'prompt token')}, "
        f"{counted(workload['output_tokens'], 'output token')}"
    )
    contestants = workload["contestants"]
    yield from _columns([_HEAD, *(_row(contestant) for contestant in contestants)])
    for contestant in contestants:
        yield from _doubts(contestant, threads)
    for contestant in contestants:
        if contestant["is_ours"]:
            yield from _details(contestant)


_HEAD = (
    *("", "weights", "load s", "run s", "prompt/s", "output/s", "total/s", "ours is (min-max)"),
    *("as reference", "share", "perplexity"),
)


def _row(contestant: Mapping[str, Any]) -> tuple[str, ...]:
    name, median = contestant["name"], contestant["median"]
    if median is None:
        return (name, contestant["precision"] or "", *[""] * (len(_HEAD) - 2))
    ratio = contestant["ours_over_it"]
    first = next(run for run in contestant["runs"] if "error" not in run)
    agreed, perplexity = first["agreement"], first["perplexity"]
    return (
        name,
        contestant["precision"] or "",
        f"{median['load_seconds']:.1f}",
        f"{median['seconds']:.1f}",
        f"{median['prompt_rate']:,.0f}",
        f"{median['output_rate']:,.1f}",
        f"{median['total_rate']:,.0f}",
        "" if ratio is None else f"{ratio['median']:.2f}x ({ratio['min']:.2f}-{ratio['max']:.2f})",
        "" if agreed is None else f"{agreed['exact']} of {agreed['rows']}",
        "" if agreed is None else f"{agreed['share']:.1%}",
        "" if perplexity is None else f"{perplexity:.4f}",
    )


def _columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            row[0].ljust(widths[0]),
            *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True) if w),
        ]
        yield "  " + "  ".join(cells).rstrip()


def _doubts(contestant: Mapping[str, Any], threads: int) -> Iterator[str]:
    for run in contestant["runs"]:
        place = f"  {contestant['name']}, round {run['round'] + 1}"
        if "error" in run:
            yield f"{place} failed: {run['error']}"
        elif (busy := run["others_seconds"]) is not None and busy > _BUSY * threads * run["seconds"]:
            share = busy / (threads * run["seconds"])
            yield f"{place}: other processes had {share:.0%} of the time; measure on an idle machine"


def _details(contestant: Mapping[str, Any]) -> Iterator[str]:
    """Of the run whose time is the median of all."""
    runs = sorted(contestant["runs"], key=lambda run: run["seconds"])
    details = runs[(len(runs) - 1) // 2]["details"]
    yield f"  {contestant['name']}, of {details['seconds']:.1f} s:"
    yield from _work(details)
    if details["alone"] is not None:
        alone = details["alone"]
        yield (
            f"    one row alone: {alone['tokens_per_second']:.1f} tokens/s after the first, "
            f"{alone['bytes_per_token'] / 1e6:,.0f} MB of weights and cache read for each: "
            f"{alone['bandwidth_share']:.0%} of the {details['bandwidth'] / 1e9:.1f} GB/s measured"
        )
    yield from steps(details["utilisation"], details["host"], details["seconds"])
    yield (
        f"    {counted(details['steps'], 'step')}, {counted(details['computed_tokens'], 'token')} computed, "
        f"{details['cached_tokens']:,} from the cache ({details['hit_share']:.1%} of prompt tokens), "
        f"{details['empty_slots']:.1%} of its slots held without a token"
        + (f", {counted(details['preemptions'], 'preemption')}" if details["preemptions"] else "")
    )
    if details["followed"] is not None:
        share = details["followed"] / details["steps"]
        yield f"    the next step was launched before the tokens of a step were known: {share:.0%} of them"
    if details["preparing_seconds"] is not None:
        yield f"    before that, reading, rendering and tokenizing rows: {details['preparing_seconds']:.2f} s"
    if details["failed"]:
        failed = ", ".join(f"{name} {count:,}" for name, count in details["failed"].items())
        yield f"    rows that failed: {failed}"
    yield f"    time: {_shares(details['parts'], details['seconds'])}"


def steps(used: Mapping[str, Any], host: Mapping[str, float | None], seconds: float) -> Iterator[str]:
    """What steps use of the device; `used` as `utilisation` gives it, `host` by kind of step."""
    rate, bandwidth = used["product_rate"], used["bandwidth"]
    if used["flop"] is not None:
        yield (
            f"    {used['flop'] / 1e9:,.0f} GFLOP computed: {used['flop_share']:.1%} of the "
            f"{rate / 1e9:,.1f} GFLOP/s that the fastest products reach in {used['dtype']}"
        )
    for kind, told in _STEPS.items():
        if (found := used["kinds"][kind]) is None:
            continue
        each = found["seconds"] / found["steps"]
        line = (
            f"    {counted(found['steps'], 'step')} {told}, {found['seconds'] / seconds:.0%} of the time, "
            f"{each * 1e3:,.2f} ms each: {counted(round(found['tokens']), 'token')} of "
            f"{counted(round(found['rows']), 'row')} in the mean"
        )
        if found["flop"] is not None and kind != DECODING:
            line += (
                f", {found['flop'] / found['seconds'] / 1e9:,.1f} GFLOP/s, {found['flop_share']:.1%} of that"
            )
        elif found["bytes"] is not None:
            line += _reading(found, bandwidth)
        yield line
    for kind, share in host.items():
        known = "not known" if share is None else f"{share:.1%}"
        yield f"    the device waits for the host: {known} of {_WHOLE[kind]}"


def _reading(found: Mapping[str, Any], bandwidth: float) -> str:
    share, read, distinct = found["bandwidth_share"], found["bytes"], found["distinct_bytes"]
    line = (
        f", {read / 1e9:,.2f} GB of weights, keys and values read, {share:.1%} of the "
        f"{bandwidth / 1e9:,.1f} GB/s measured"
    )
    if distinct < _SHARED * read:
        line += f" ({share * distinct / read:.1%} if what rows share is read once)"
    return line


def _work(details: Mapping[str, Any]) -> Iterator[str]:
    work = details["work"]
    if work is None:
        yield "    operations are not counted for a model of this kind"
        return
    need, rate = work["needed"], work["flop_per_second"]
    apart = work["without_sharing"]["total"]
    share = need["attention"] / need["total"]
    yield (
        f"    {need['total'] / 1e9:,.0f} GFLOP needed, {share:.0%} of it attention"
        + (f" ({apart / 1e9:,.0f} if nothing were shared)" if apart > need["total"] else "")
        + f": {rate / 1e9:.1f} GFLOP/s, {rate / work['product_rate']:.0%} of the "
        f"{work['product_rate'] / 1e9:.1f} GFLOP/s that products of these shapes reach in {work['dtype']}"
    )
    for product in work["rates"]:
        kind, inputs, outputs = (product["product"][n] for n in ("kind", "in_features", "out_features"))
        ours = "-" if product["ours"] is None else f"{product['ours']:.0f}"
        yield (
            f"      {kind:8} {product['rows']:4} x {inputs} x {outputs}: "
            f"{ours} GFLOP/s ours, {product['torch']:.0f} torch"
        )


def _shares(parts: Mapping[str, float], seconds: float) -> str:
    known = [(name, parts[name]) for name in PARTS if name in parts]
    known += sorted((item for item in parts.items() if item[0] not in PARTS), key=lambda item: -item[1])
    outside = max(0.0, seconds - sum(parts.values()))
    return ", ".join(f"{name} {spent / seconds:.1%}" for name, spent in [*known, ("outside", outside)])


def _cliffs(workloads: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """How speed falls with length, and how much of that is attention's own work."""
    found = {workload["name"]: workload for workload in workloads}
    for short, long, rate in (
        ("prompts-500", "prompts-8000", "prompt_rate"),
        ("outputs-128", "outputs-2048", "output_rate"),
    ):
        if short in found and long in found:
            yield ""
            yield from _cliff(found[short], found[long], rate)


def _cliff(short: Mapping[str, Any], long: Mapping[str, Any], rate: str) -> Iterator[str]:
    for a, b in zip(short["contestants"], long["contestants"], strict=True):
        if a["median"] is None or b["median"] is None:
            continue
        kept = b["median"][rate] / a["median"][rate]
        line = f"{a['name']}: {long['name']} keeps {kept:.0%} of the speed of {short['name']}"
        each = [_flop_per_token(workload, contestant) for workload, contestant in ((short, a), (long, b))]
        if all(each):
            line += f"; by operations alone it would be {each[0] / each[1]:.0%}"
        yield line


def _flop_per_token(workload: Mapping[str, Any], contestant: Mapping[str, Any]) -> float:
    details = contestant["runs"][0].get("details")
    if not details or details["work"] is None:
        return 0.0
    need = details["work"]["needed"]
    return float(need["total"]) / float(need["tokens"])
