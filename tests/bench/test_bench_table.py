"""What is printed of a report: every line that only some reports have."""

from __future__ import annotations

from typing import Any

from batchgen.bench.table import lines


def run(number: int, rate: float, **more: Any) -> dict[str, Any]:
    figures = {"seconds": 2.0, "load_seconds": 1.0, "prompt_rate": rate, "output_rate": rate}
    return {
        "round": number,
        **figures,
        "total_rate": 2 * rate,
        "others_seconds": 0.1,
        "agreement": {"rows": 4, "exact": 3, "share": 0.875},
        "perplexity": 21.75,
        "details": None,
        **more,
    }


def details(**more: Any) -> dict[str, Any]:
    return {
        "seconds": 2.0,
        "steps": 7,
        "followed": None,
        "computed_tokens": 100,
        "cached_tokens": 20,
        "preemptions": 0,
        "empty_slots": 0.04,
        "failed": {},
        "preparing_seconds": None,
        "alone": None,
        "bandwidth": 20e9,
        "hit_share": 0.25,
        "utilisation": used(),
        "host": {"all": 0.125},
        "parts": {"qkv": 1.0, "attention": 0.5, "other": 0.1},
        "work": work(300),
        **more,
    }


def used(**kinds: Any) -> dict[str, Any]:
    return {
        "dtype": "float32",
        "product_rate": 500e9,
        "bandwidth": 20e9,
        "flop": 400e9,
        "flop_share": 0.4,
        "kinds": {"prompts": None, "mixed": None, "decoding": None, **kinds},
    }


def of_kind(**more: Any) -> dict[str, Any]:
    return {
        "steps": 5,
        "tokens": 64.2,
        "rows": 64.2,
        "seconds": 0.5,
        "flop": 50e9,
        "flop_share": 0.2,
        "bytes": 1e9,
        "distinct_bytes": 0.97e9,
        "bandwidth_share": 0.5,
        **more,
    }


def work(total: float) -> dict[str, Any]:
    need = {
        "tokens": 100,
        "read": 10,
        "products": 8e8 * total,
        "attention": 2e8 * total,
        "total": 1e9 * total,
    }
    product = {"kind": "qkv", "in_features": 64, "out_features": 128, "count": 2}
    return {
        "needed": need,
        "without_sharing": {"total": 2e9 * total},
        "flop_per_second": total / 2 * 1e9,
        "product_rate": 200e9,
        "dtype": "float32",
        "rates": [{"product": product, "rows": 64, "ours": None, "torch": 90.0, "best": 90.0}],
    }


def contestant(name: str, runs: list[dict[str, Any]], ratio: float | None = None) -> dict[str, Any]:
    good = [one for one in runs if "error" not in one]
    return {
        "name": name,
        "is_ours": ratio is None,
        "precision": "float32",
        "runs": runs,
        "median": good[0] if good else None,
        "ours_over_it": ratio and {"median": ratio, "min": ratio - 0.1, "max": ratio + 0.1, "rounds": 3},
    }


def told(*workloads: tuple[str, list[dict[str, Any]]], missing: Any = ()) -> str:
    machine = {"cpu": "a processor", "cores": 4, "threads": 2, "instructions": "avx2"}
    report = {
        "command": "batchgen bench",
        "when": "now",
        "machine": machine,
        "versions": {"batchgen": "1"},
        "missing": missing,
        "workloads": [
            {"name": n, "rows": 1, "prompt_tokens": 20, "output_tokens": 1, "contestants": c}
            for n, c in workloads
        ],
    }
    return "\n".join(lines(report))


def test_a_table() -> None:
    ours = contestant("batchgen", [run(0, 50.0, details=details())])
    other = contestant("vllm", [run(0, 25.0), {"round": 1, "error": "gone"}], 2.0)
    text = told(("unique", [ours, other]), missing=[{"name": "x", "reason": "no x", "remedy": "make it"}])
    assert "a processor, 2 threads of 4 cores, avx2\nbatchgen 1\nnot here: x (no x); make it\n" in text
    assert "unique: 1 row, 20 prompt tokens, 1 output token\n" in text
    assert "2.00x (1.90-2.10)" in text
    assert "3 of 4  87.5%     21.7500" in text
    assert "vllm, round 2 failed: gone" in text
    assert (
        "300 GFLOP needed, 20% of it attention (600 if nothing were shared): 150.0 GFLOP/s, 75% of the 200.0 "
        "GFLOP/s that products of these shapes reach in float32\n"
    ) in text
    assert "qkv        64 x 64 x 128: - GFLOP/s ours, 90 torch" in text
    assert (
        "7 steps, 100 tokens computed, 20 from the cache (25.0% of prompt tokens), 4.0% of its slots held "
        in text
    )
    assert "time: qkv 50.0%, attention 25.0%, other 5.0%, outside 20.0%" in text


def test_what_only_some_have() -> None:
    alone = {"tokens_per_second": 30.0, "bytes_per_token": 500e6, "bandwidth_share": 0.75}
    more = details(
        alone=alone, work=None, failed={"empty_prompt": 2}, preparing_seconds=0.5, preemptions=3, followed=6
    )
    text = told(("job", [contestant("batchgen", [run(0, 50.0, details=more, others_seconds=1.0)])]))
    assert "round 1: other processes had 25% of the time; measure on an idle machine" in text
    assert "operations are not counted for a model of this kind" in text
    assert (
        "one row alone: 30.0 tokens/s after the first, 500 MB of weights and cache read for each: 75% of"
        in text
    )
    assert "rows that failed: empty_prompt 2" in text
    assert "tokenizing rows: 0.50 s" in text
    assert "3 preemptions" in text
    assert "launched before the tokens of a step were known: 86% of them" in text


def test_what_steps_use() -> None:
    kinds = {
        "prompts": of_kind(steps=1, tokens=8000.4, rows=1.0),
        "mixed": of_kind(tokens=70.0),
        "decoding": of_kind(seconds=0.01),
    }
    host = {"prompts": 0.02, "decoding": None}
    more = details(utilisation=used(**kinds), host=host)
    text = told(("job", [contestant("batchgen", [run(0, 50.0, details=more)])]))
    assert (
        "    400 GFLOP computed: 40.0% of the 500.0 GFLOP/s that the fastest products reach in float32\n"
        "    1 step of prompts, 25% of the time, 500.00 ms each: 8,000 tokens of 1 row in the mean, 100.0 "
        "GFLOP/s, 20.0% of that\n"
        "    5 steps of little of prompts, 25% of the time, 100.00 ms each: 70 tokens of 64 rows in the mean"
        ", 100.0 GFLOP/s, 20.0% of that\n"
        "    5 steps that only decode, 0% of the time, 2.00 ms each: 64 tokens of 64 rows in the mean, 1.00 "
        "GB of weights, keys and values read, 50.0% of the 20.0 GB/s measured\n"
        "    the device waits for the host: 2.0% of a step of prompts\n"
        "    the device waits for the host: not known of a step that only decodes\n"
    ) in text


def test_what_rows_share_may_be_read_once() -> None:
    more = details(utilisation=used(decoding=of_kind(distinct_bytes=0.4e9)))
    text = told(("job", [contestant("batchgen", [run(0, 50.0, details=more)])]))
    assert "50.0% of the 20.0 GB/s measured (20.0% if what rows share is read once)\n" in text
    assert "the device waits for the host: 12.5% of the time\n" in text


def test_steps_of_a_model_whose_operations_are_not_counted() -> None:
    unknown = dict.fromkeys(("flop", "flop_share", "bytes", "distinct_bytes", "bandwidth_share"))
    steps = {**used(decoding=of_kind(**unknown)), "flop": None, "flop_share": None}
    more = details(utilisation=steps)
    text = told(("job", [contestant("batchgen", [run(0, 50.0, details=more)])]))
    assert "GFLOP computed" not in text
    assert "64 tokens of 64 rows in the mean\n" in text


def test_one_that_never_gave_a_result() -> None:
    ours = contestant("batchgen", [run(0, 50.0, details=details())])
    other = {**contestant("vllm", [{"round": 0, "error": "gone"}], 1.0), "ours_over_it": None}
    assert "\n  vllm      float32" in told(("unique", [ours, other]))


def test_how_speed_falls_with_length() -> None:
    short = contestant("batchgen", [run(0, 100.0, details=details(work=work(200)))])
    long = contestant("batchgen", [run(0, 60.0, details=details(work=work(250)))])
    text = told(("prompts-500", [short]), ("prompts-8000", [long]))
    assert text.endswith(
        "batchgen: prompts-8000 keeps 60% of the speed of prompts-500; by operations alone it would be 80%"
    )
