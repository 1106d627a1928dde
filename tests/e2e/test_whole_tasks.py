"""Jobs of every task: job file, command line, real engine worker, a tiny model, real files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from tiny_models import save_tiny_classifier, save_tiny_llama

import batchgen
import batchgen as bg
from batchgen.cli.main import main

TEXTS = ["A first text", "another one, which is longer: " + "word " * 30, "x", "ünïcödé"]
ENGINE = {"kv_cache_memory": "4MB", "attention": "reference", "max_num_seqs": 4}
MAX_LEN = 128


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_classifier(tmp_path_factory.mktemp("classifier"))


def llm(model: Path) -> bg.LLM:
    return bg.LLM(str(model), max_model_len=MAX_LEN, kv_cache_memory=2**22, attention="reference")


def run_job(folder: Path, model: Path, rows: list[dict[str, Any]], **job: Any) -> list[dict[str, Any]]:
    """Run a job over rows and verify its folder; the records of its only part."""
    folder.mkdir(exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    whole = {
        "model": {"path": str(model), "max_model_len": MAX_LEN},
        "input": "rows.jsonl",
        "output": {"path": "out", "format": job.pop("format", "parquet"), "compression": "none"},
        "run": {"progress": "none", "min_free_disk": 0},
        "engine": ENGINE,
        **job,
    }
    if "include" in whole:
        whole["output"]["include"] = whole.pop("include")
    (folder / "job.yaml").write_text(yaml.safe_dump(whole))
    root = Path(batchgen.__file__).parent.parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{root}:{root / 'kernels'}")
        assert main(["run", str(folder / "job.yaml")]) == 0
        assert main(["verify", str(folder / "out")]) == 0
        assert main(["run", str(folder / "job.yaml")]) == 0
    [part] = (folder / "out" / "data").iterdir()
    if part.suffix == ".parquet":
        return pq.read_table(part).to_pylist()  # type: ignore[no-any-return]
    return [json.loads(line) for line in part.read_text().splitlines()]


def test_loglikelihood(tmp_path: Path, model: Path) -> None:
    pairs = [("The sky is", " blue"), ("", "Once"), ("x" * 200, "too long"), ("no continuation", "")]
    rows = [{"context": a, "continuation": b, "key": i} for i, (a, b) in enumerate(pairs)]
    found = run_job(tmp_path, model, rows, task="loglikelihood", format="jsonl")
    with llm(model) as engine:
        expected = engine.loglikelihood(pairs)
    assert list(found[0]) == [
        *("row", "id", "context", "continuation", "key"),
        *("loglikelihood", "is_greedy", "num_tokens", "status", "error", "usage"),
    ]
    for record, result in zip(found, expected, strict=True):
        assert record["status"] == ("ok" if result.ok else "error")
        if result.ok:
            assert record["loglikelihood"] == result.loglikelihood
            assert record["is_greedy"] is result.is_greedy
            assert record["num_tokens"] == result.num_tokens
        else:
            assert record["loglikelihood"] is record["num_tokens"] is None
            assert record["error"]["message"] == result.error.message  # type: ignore[union-attr]


@pytest.mark.slow
def test_pairs_by_templates_and_a_conversation(tmp_path: Path, model: Path) -> None:
    rows = [{"q": "Name a colour.", "a": "blue"}, {"q": "And another?", "a": "red"}]
    prompt = {"mode": "chat", "user": "{{ q }}", "continuation": "{{ a }}"}
    found = run_job(tmp_path, model, rows, task="loglikelihood", prompt=prompt, include=["prompt"])
    with llm(model) as engine:
        expected = engine.loglikelihood([(record["prompt"] + "|", "x") for record in found])
        pairs = [(record["prompt"], row["a"]) for record, row in zip(found, rows, strict=True)]
        ids = [[engine._tokenizer.encode_batch([text])[0] for text in pair] for pair in pairs]
        expected = engine.loglikelihood([tuple(pair) for pair in ids])  # type: ignore[arg-type, misc]
    assert [record["loglikelihood"] for record in found] == [r.loglikelihood for r in expected]
    assert found[0]["prompt"].endswith("<|im_start|>assistant\n")


@pytest.mark.slow
def test_perplexity(tmp_path: Path, model: Path) -> None:
    found = run_job(tmp_path, model, [{"text": text} for text in TEXTS], task="perplexity")
    with llm(model) as engine:
        expected = engine.perplexity(TEXTS)
    for record, result in zip(found, expected, strict=True):
        for name in ("loglikelihood", "num_tokens", "num_bytes", "num_words", "perplexity", "bits_per_byte"):
            assert record[name] == getattr(result, name)
    assert found[1]["num_tokens"] > MAX_LEN


@pytest.mark.slow
def test_embed(tmp_path: Path, model: Path) -> None:
    rows = [{"prompt": text} for text in [*TEXTS[:1], *TEXTS[2:], ""]]
    found = run_job(tmp_path, model, rows, task="embed", embedding={"pooling": "mean"})
    with llm(model) as engine:
        expected = engine.embed([row["prompt"] for row in rows], pooling="mean")
    for record, result in zip(found, expected, strict=True):
        assert record["embedding"] == (None if result.embedding is None else result.embedding.tolist())
    schema = pq.read_schema(next((tmp_path / "out" / "data").iterdir()))
    assert schema.field("embedding").type == pa.list_(pa.float32(), 64)


def test_classify(tmp_path: Path, classifier: Path) -> None:
    found = run_job(tmp_path, classifier, [{"text": text} for text in TEXTS[2:]], task="classify")
    with llm(classifier) as engine:
        expected = engine.classify(TEXTS[2:])
    for record, result in zip(found, expected, strict=True):
        assert (record["label"], record["score"]) == (result.label, result.score)
        assert {one["label"]: one["score"] for one in record["scores"]} == result.scores


@pytest.mark.slow
def test_prompt_logprobs(tmp_path: Path, model: Path) -> None:
    rows = [{"prompt": text} for text in TEXTS[2:]]
    job: dict[str, Any] = {"prompt": {"mode": "completion"}}
    job |= {"sampling": {"max_tokens": 2, "prompt_logprobs": 2}, "include": ["prompt_logprobs"]}
    found = run_job(tmp_path, model, rows, **job)
    params = bg.SamplingParams(max_tokens=2, prompt_logprobs=2)
    with llm(model) as engine:
        expected = engine.generate(TEXTS[2:], params)
    for record, output in zip(found, expected, strict=True):
        assert record["generated_text"] == output.text
        if output.prompt_logprobs is None:
            assert record["prompt_logprobs"] is None
            continue
        for one, wanted in zip(record["prompt_logprobs"], output.prompt_logprobs, strict=True):
            if wanted is None:
                assert one is None
                continue
            assert (one["logprob"], one["rank"]) == (wanted.logprob, wanted.rank)
            assert [(t["token_id"], t["logprob"]) for t in one["top"]] == [
                (t.token_id, t.logprob) for t in wanted.top
            ]
