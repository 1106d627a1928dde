"""`batchgen bench`: figures of a tiny model, its report, and what is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tiny_models import oracle, save_tiny_llama

from batchgen.bench import contest, workloads
from batchgen.bench.installed import VARIABLE
from batchgen.bench.peers import harness
from batchgen.bench.workloads import BenchRow, Workload
from batchgen.cli.main import main

Captured = pytest.CaptureFixture[str]
PROMPTS = [[10, 20, 30, 40 + i, 50 + i] for i in range(4)]
TOKENS = [3, 5, 4, 6]
RATES = {"seconds", "load_seconds", "prompt_rate", "output_rate", "total_rate"}
NUMBER = {"type": "number", "exclusiveMinimum": 0}


def an_object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required, "properties": properties}


RUN = {
    "oneOf": [
        an_object(["round", "error"], error={"type": "string"}),
        an_object(
            ["round", "version", *sorted(RATES), "peak_memory", "others_seconds", "agreement", "perplexity"],
            **dict.fromkeys(RATES, NUMBER),
            peak_memory=NUMBER,
        ),
    ]
}
SCHEMA = an_object(
    ["format", "command", "when", "machine", "versions", "missing", "workloads"],
    format={"const": 1},
    machine=an_object(["cpu", "instructions", "cores", "threads", "memory", "system"]),
    versions=an_object(["batchgen", "python", "torch", "transformers", "numpy", "numba"]),
    missing={"type": "array", "items": an_object(["name", "reason", "remedy"])},
    workloads={
        "type": "array",
        "items": an_object(
            ["name", "rows", "prompt_tokens", "output_tokens", "contestants"],
            contestants={
                "type": "array",
                "minItems": 1,
                "items": an_object(
                    ["name", "is_ours", "precision", "runs", "median", "ours_over_it"],
                    runs={"type": "array", "minItems": 1, "items": RUN},
                ),
            },
        ),
    },
)
"""Of `--json`."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def references(model: Path) -> list[list[int]]:
    return oracle(model, PROMPTS, 6)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, references: list[list[int]]) -> None:
    """The standard workloads, in tokens of the tiny model."""

    def load(name: str, limit: int | None = None) -> Workload:
        known = [a[:n] if len(a) >= n else None for a, n in zip(references, TOKENS, strict=True)]
        rows = [BenchRow(*row) for row in zip(PROMPTS, TOKENS, known, strict=True)]
        return Workload(name, (rows[:1] if name == "single" else rows)[:limit])

    shape = {"vocab_size": 259, "hidden_size": 64, "num_hidden_layers": 2}
    monkeypatch.setattr(workloads, "load_workload", load)
    monkeypatch.setattr(contest, "warmup_rows", lambda: [BenchRow([1, 2, 3], 2)])
    monkeypatch.setattr(contest, "windows", lambda: [list(range(20)), list(range(40, 60))])
    monkeypatch.setattr(contest, "REFERENCE_SHAPE", shape)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "peers"))


@pytest.fixture
def write_job(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.chdir(tmp_path)

    def write(extra: str = "") -> str:
        rows = [{"prompt": "one"}, {"prompt": ""}, {"prompt": "three"}, {"prompt": "two"}]
        Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        Path("job.yaml").write_text(
            f"model: {model}\ninput: prompts.jsonl\noutput: out/\nprompt: {{mode: completion}}\n{extra}"
        )
        return "job.yaml"

    return write


def install(folder: Path, venv: str, model: str, source: str) -> None:
    """A peer whose Python is this one, told to run other code."""
    (folder / venv / "bin").mkdir(parents=True)
    python = folder / venv / "bin" / "python"
    python.write_text(f"#!{sys.executable}\n{source}")
    python.chmod(0o755)
    (folder / model).mkdir(parents=True)


PEER = f"""
import sys
sys.path.insert(0, {str(Path(harness.__file__).parent)!r})
del sys.argv[1:3]
import harness

class Fixed:
    version = "fixed 1"
    def __init__(self, task):
        pass
    def generate(self, rows):
        return [[1] * row["max_new_tokens"] for row in rows]

harness.main(Fixed)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_a_model_beside_others(model: Path, tmp_path: Path, capsys: Captured) -> None:
    install(tmp_path / "peers", "hf", "models/smollm2-135m", PEER)
    file = tmp_path / "report.json"
    assert main(["bench", "--model", str(model), "--peers", "--repeats", "1", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    jsonschema.validate(report, SCHEMA)
    assert report["command"].split()[0] == "batchgen"
    assert [w["name"] for w in report["workloads"]] == ["shared-prefix", "unique", "single"]
    assert [m["name"] for m in report["missing"]][:2] == ["vllm", "openvino"]
    assert "make peers" in report["missing"][0]["remedy"]
    for workload in report["workloads"]:
        ours, other = workload["contestants"]
        assert (ours["name"], ours["precision"], other["name"]) == ("batchgen", "float32", "transformers")
        [run] = ours["runs"]
        agreed = run["agreement"]
        assert agreed["exact"] == agreed["rows"] > 0
        assert run["perplexity"] > 1
        assert other["ours_over_it"]["rounds"] == 1
        check_details(run["details"], workload)
    alone = report["workloads"][2]["contestants"][0]["runs"][0]["details"]["alone"]
    # Weights are read once for each token, the embedding is not: all but the cache's share.
    weights = 4 * (2 * (64 * 128 + 64 * 64 + 64 * 256 + 128 * 64) + 259 * 64)
    assert alone["bytes_per_token"] == pytest.approx(weights, rel=0.05)
    said = capsys.readouterr()
    assert "not here: vllm" in said.out
    assert "unique: 4 rows, 20 prompt tokens, 18 output tokens" in said.out
    assert "GFLOP/s ours" in said.out
    assert "time: qkv " in said.out
    assert "unique, round 1, batchgen: " in said.err


def check_details(details: dict[str, Any], workload: dict[str, Any]) -> None:
    work = details["work"]
    assert details["rows"] == workload["rows"]
    assert work["needed"]["read"] == workload["output_tokens"]
    assert work["needed"]["tokens"] <= details["computed_tokens"]
    assert {rate["product"]["kind"] for rate in work["rates"]} == {
        *("qkv", "output", "gate_up", "down", "lm_head")
    }
    assert all(rate["torch"] > 0 and rate["best"] >= rate["torch"] for rate in work["rates"])
    assert work["flop_per_second"] == pytest.approx(work["needed"]["total"] / details["seconds"])
    parts = details["parts"]
    assert {"qkv", "attention", "lm_head", "norm", "sampling", "scheduler", "host"} <= parts.keys()
    assert all(seconds >= 0 for seconds in parts.values())
    assert sum(parts.values()) <= details["seconds"]
    assert 0 < details["empty_slots"] < 1
    used = details["utilisation"]
    assert used["product_rate"] >= max(rate["best"] for rate in work["rates"]) * 1e9
    assert 0 < used["flop"] <= work["without_sharing"]["total"]
    assert used["flop_share"] == pytest.approx(used["flop"] / details["seconds"] / used["product_rate"])
    kinds = [kind for kind in used["kinds"].values() if kind is not None]
    assert sum(kind["steps"] for kind in kinds) == details["steps"]
    assert sum(kind["flop"] for kind in kinds) == used["flop"]
    assert 0 < details["host"]["all"] < 1
    assert details["hit_share"] == 0


@pytest.mark.slow
def test_a_dummy_takes_any_tokens(capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Standard rows on a model that knows fewer tokens than they are in."""
    monkeypatch.chdir(tmp_path)
    model = "dummy:llama-3.1-8b?num_hidden_layers=1&hidden_size=64&intermediate_size=96&num_attention_heads=4"
    model += "&num_key_value_heads=2&head_dim=16&vocab_size=300"
    line = ["bench", "--model", model, "--workload", "decode", "--limit", "2", "--json", "report.json"]
    assert main([*line, "--set", "model.max_model_len=2048"]) == 0
    [workload] = json.loads(Path("report.json").read_text())["workloads"]
    assert (workload["prompt_tokens"], workload["output_tokens"]) == (2048, 512)
    said = capsys.readouterr().out
    assert "steps that only decode, " in said
    assert "the device waits for the host: " in said


@pytest.mark.usefixtures("tiny")
def test_a_jobs_own_rows(write_job: Callable[..., str], capsys: Captured) -> None:
    job = write_job("sampling: {max_tokens: 4, ignore_eos: true}\n")
    assert main(["bench", job, "--json", "report.json", "--set", "engine.max_num_seqs=1"]) == 0
    report = json.loads(Path("report.json").read_text())
    jsonschema.validate(report, SCHEMA)
    [workload] = report["workloads"]
    assert (workload["name"], workload["rows"], workload["output_tokens"]) == ("job", 4, 12)
    assert workload["prompt_tokens"] == len("onethreetwo")
    details = workload["contestants"][0]["runs"][0]["details"]
    assert details["failed"] == {"empty_prompt": 1}
    assert details["preparing_seconds"] > 0
    assert details["steps"] >= 12
    assert not Path("out").exists()
    assert "rows that failed: empty_prompt 1" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_a_variant_beside_it(write_job: Callable[..., str]) -> None:
    line = ["--workload", "unique", "--limit", "1", "--repeats", "1", "--json", "report.json"]
    assert main(["bench", write_job(), *line, "--variant", "engine.kv_cache_dtype=int8"]) == 0
    [workload] = json.loads(Path("report.json").read_text())["workloads"]
    ours, variant = workload["contestants"]
    assert variant["name"] == "batchgen engine.kv_cache_dtype=int8"
    assert variant["runs"][0]["details"]["facts"]["kv_cache_dtype"] == "int8"
    assert ours["runs"][0]["details"]["facts"]["kv_cache_dtype"] == "float32"
    assert ours["precision"] == variant["precision"] == "float32"
    assert variant["ours_over_it"]["rounds"] == 1


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_weights_are_what_they_were_quantized_to(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    line = ["--workload", "single", "--set", "model.quantization=int8", "--json", str(file)]
    assert main(["bench", "--model", str(model), *line]) == 0
    [workload] = json.loads(file.read_text())["workloads"]
    assert workload["contestants"][0]["precision"] == "int8"


@pytest.mark.usefixtures("tiny")
def test_another_engine_that_fails(model: Path, tmp_path: Path, capsys: Captured) -> None:
    install(tmp_path / "peers", "hf", "models/smollm2-135m", "raise SystemExit('no such kernel')")
    line = ["--workload", "single", "--peer", "transformers", "--repeats", "1"]
    assert main(["bench", "--model", str(model), *line]) == 8
    assert "transformers, round 1 failed: it ended with 1 and without a result: no such kernel" in (
        capsys.readouterr().out
    )


def test_a_workload_in_tokens_of_another_model(model: Path, capsys: Captured) -> None:
    assert main(["bench", "--model", str(model), "--workload", "single"]) == 2
    assert "give a JOB without --workload to measure its rows" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ([], 2, "give a JOB, or --model and no JOB"),
        (["job.yaml", "--model", "m"], 2, "give a JOB, or --model and no JOB"),
        (["job.yaml", "--kernels"], 2, "--kernels measures no rows"),
        (["--kernels", "--model", "no/such"], 2, "no/such"),
        (["--kernels", "--json", "no/where.json"], 2, "there is no folder"),
        (["job.yaml", "--peer", "vlm"], 2, "--peer vlm: there is none of this name; use vllm, openvino,"),
        (["job.yaml", "--peer", "vllm"], 2, "it is not installed (no "),
        (["job.yaml", "--json", "no/where.json"], 2, "--json no/where.json: there is no folder"),
        (["job.yaml", "--set", "engine.block_size=x"], 2, "engine.block_size"),
        (["gone.yaml"], 2, "gone.yaml"),
        (["--model", "no/such/model", "--workload", "single"], 2, "no/such/model"),
        (["job.yaml", "--workload", "other"], 2, "'other' is not one of"),
    ],
)
@pytest.mark.usefixtures("tiny")
def test_what_is_refused(
    write_job: Callable[..., str], capsys: Captured, line: list[str], code: int, said: str
) -> None:
    write_job()
    assert main(["bench", *line]) == code
    assert said in capsys.readouterr().err


@pytest.mark.usefixtures("tiny")
def test_others_do_not_run_a_jobs_rows(
    write_job: Callable[..., str], tmp_path: Path, capsys: Captured
) -> None:
    install(tmp_path / "peers", "hf", "models/smollm2-135m", PEER)
    assert main(["bench", write_job(), "--peers"]) == 2
    assert "choose some with --workload" in capsys.readouterr().err
