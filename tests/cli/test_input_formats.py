"""Kinds of input through the command line: jobs that continue in the middle of them, and what they refuse."""

from __future__ import annotations

import bz2
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from fake_engine import launcher

from batchgen.cli.main import main

Write = Callable[..., str]
Captured = pytest.CaptureFixture[str]
TEXTS = [f"prompt {i},\n\"é\" 'x'" for i in range(3)]
JSONL = "".join(json.dumps({"n": 1, "prompt": text}) + "\n" for text in TEXTS).encode()
QUOTED = ['"' + text.replace('"', '""') + '"' for text in TEXTS]
CSV = ("n,prompt\r\n" + "".join(f"1,{text}\r\n" for text in QUOTED)).encode()
FILES = {
    "a.csv": CSV,
    "b.tsv.gz": gzip.compress(CSV.replace(b"n,p", b"n\tp").replace(b'1,"', b'1\t"')),
    "c.json": b"[\n" + JSONL.rstrip(b"\n").replace(b"}\n", b"},\n") + b"\n]\n",
    "d.jsonl.bz2": bz2.compress(JSONL[:50]) + bz2.compress(JSONL[50:]),
    "e.jsonl.zst": zstandard.compress(JSONL[:50]) + zstandard.compress(JSONL[50:]),
}
REMOTE = "memory://cli/f.jsonl?X-Amz-Signature=f00d"
OUTPUT = ("output.format=jsonl", "output.compression=none", "output.part_rows=4")


def batch_line(i: int, **body: Any) -> dict[str, Any]:
    body = {"model": "gpt-x", "messages": [{"role": "user", "content": "hi"}], **body}
    return {"custom_id": f"r{i}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def sets(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def run(job: str, *settings: str) -> list[dict[str, Any]]:
    line = ["run", job, "--progress", "none", *sets(*settings)]
    assert main(line, launch=launcher()) == 0
    out = next((s.partition("=")[2] for s in settings if s.startswith("output.path=")), "out")
    parts = sorted(Path(out, "data").iterdir())
    return [json.loads(line) for part in parts for line in part.read_text().splitlines()]


def test_files_of_many_kinds_are_one_input_and_continued_in_the_middle(
    write_job: Write, capsys: Captured
) -> None:
    for name, data in FILES.items():
        Path(name).write_bytes(data)
    fsspec.filesystem("memory").pipe_file(REMOTE.removeprefix("memory:/"), JSONL)
    job = write_job("prompt: {mode: completion}\nsampling: {max_tokens: 4}\n")
    settings = (f"input.path=[{', '.join(FILES)}, '{REMOTE}']", *OUTPUT)
    assert len(run(job, *settings, "input.limit=7")) == 7
    rows = run(job, *settings)
    assert [row["prompt"] for row in rows] == TEXTS * 6
    assert [row["status"] for row in rows] == ["ok"] * 18
    assert main(["verify", "out"]) == 0
    written = [path for path in Path("out").rglob("*") if path.is_file()]
    assert not [path for path in written if b"f00d" in path.read_bytes()]
    out, err = capsys.readouterr()
    assert "f00d" not in out + err


def test_an_openai_batch_is_answered_as_one(write_job: Write, capsys: Captured) -> None:
    job = write_job()
    lines = [
        batch_line(0),
        batch_line(1, max_completion_tokens=2, presence_penalty=0),
        batch_line(2, response_format={"type": "json_object"}),
        batch_line(3, max_tokens=2.5),
    ]
    Path("batch.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    batch = sets("input=batch.jsonl", "output.format=openai_batch", "output.compression=none")
    assert main(["validate", job, *batch]) == 0
    assert "batch.jsonl line 3: body.response_format is not supported" in capsys.readouterr().err
    assert main(["show", job, *batch, "--id", "r1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sampling"]["max_tokens"] == 2
    rows = run(job, *batch[1::2])
    assert [row["custom_id"] for row in rows] == ["r0", "r1", "r2", "r3"]
    answered = [row["response"]["body"]["usage"]["completion_tokens"] for row in rows[:2]]
    assert answered[1] <= 2
    assert ["invalid_param" in json.dumps(row) for row in rows] == [False, False, True, True]


def test_reasoning_is_split_off_into_a_column(write_job: Write, capsys: Captured) -> None:
    job = write_job("sampling: {max_tokens: 6, reasoning: {column: thoughts}}\n")
    assert main(["show", job, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["sampling"]["reasoning"]
    assert shown == {"start": "<think>", "end": "</think>"}
    plain = run(job, *OUTPUT, "sampling.reasoning=null")
    rows = run(job, *OUTPUT, "output.path=split")
    whole = [row["generated_text"] for row in plain]
    assert [" ".join(filter(None, (row["thoughts"], row["generated_text"]))) for row in rows] == whole
    assert all(row["thoughts"] for row in rows)


def test_reasoning_is_counted_in_usage(write_job: Write) -> None:
    """The fake engine takes an answer's first token for reasoning."""
    job = write_job("sampling: {max_tokens: 6, reasoning: {column: thoughts}}\n")
    (usage,) = {tuple(row["usage"]) for row in run(job, *OUTPUT)}
    assert usage == ("prompt_tokens", "completion_tokens", "truncated_tokens", "reasoning_tokens")
    assert [row["usage"]["reasoning_tokens"] for row in run(job, *OUTPUT)] == [1, 1]
    lines = run(job, "output.format=openai_batch", "output.compression=none", "output.path=batch")
    for line in lines:
        assert line["response"]["body"]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 1}
    assert main(["run", job, *sets("output.path=parquet")], launch=launcher()) == 0
    (part,) = Path("parquet/data").iterdir()
    assert [u["reasoning_tokens"] for u in pq.read_table(part)["usage"].to_pylist()] == [1, 1]
    for folder in ("out", "batch", "parquet"):
        assert main(["verify", folder]) == 0
        assert json.loads(Path(folder, "report.json").read_text())["lengths"]["reasoning_tokens"] == 2
    assert main(["export", "parquet", "--format", "csv", "--output", "all.csv"]) == 0
    header, *rows = Path("all.csv").read_text().splitlines()
    assert header.split(",")[-2:] == ["usage.reasoning_tokens", "thoughts"]
    assert [row.split(",")[-2] for row in rows] == ["1", "1"]


def cut(name: str, size: int) -> bytes:
    return FILES[name][:-size]


@pytest.mark.parametrize(
    ("name", "data", "code", "said"),
    [
        ("a.csv", b"a,a\n1,2\n", 2, "two columns of the CSV header are named 'a'"),
        ("a.csv", b"", 3, "is empty; a CSV file begins with a header"),
        ("a.json", b'{\n"a": 1}', 2, "holds one JSON object, not records"),
        ("a.json", b'[{"prompt": "a"}', 3, "is cut, or a quote or bracket is missing"),
        ("a.jsonl.bz2", cut("d.jsonl.bz2", 9), 3, "the compressed stream ends at byte"),
        ("a.jsonl.xz", b"\xfd7zXZ\x00", 2, "xz (decompress it, or compress it again with zstd)"),
        ("a.parquet", b"PAR1\0\0\0\0", 3, "no Parquet footer at its end"),
        ("a.arrow", b"ARROW1\0\0\0\0", 3, "is cut, damaged or still being written"),
        ("a", b"text", 2, "is not of a known kind; batchgen reads Parquet, Arrow, JSONL"),
    ],
)
def test_what_ends_before_a_model_loads(
    write_job: Write, capsys: Captured, name: str, data: bytes, code: int, said: str
) -> None:
    job = write_job()
    Path(name).write_bytes(data)
    for verb in ("validate", "run"):
        assert main([verb, job, *sets(f"input={name}")]) == code
        message = capsys.readouterr().err
        assert said in message
        assert name in message
    assert not Path("out").exists()


def test_strict_json(write_job: Write, capsys: Captured) -> None:
    rows = '{"prompt": "a"}\n{"prompt": "b", "x": NaN}\n{"prompt": "c", "prompt": "d"}\n'
    job = write_job("prompt: {mode: completion}\n", rows)
    assert main(["validate", job]) == 0
    assert "cannot be read" not in capsys.readouterr().err
    assert main(["validate", job, *sets("input.strict_json=true")]) == 0
    said = capsys.readouterr().err
    assert "2 of the first 3 rows cannot be read" in said
    assert "NaN is no JSON number; write null, or set input.strict_json: false" in said


def test_parquet_and_arrow_are_read_by_what_they_are(write_job: Write, capsys: Captured) -> None:
    table = pa.table({"prompt": TEXTS})
    with pa.ipc.new_stream("a.arrow", table.schema) as writer:
        writer.write_table(table)
    pq.write_table(table, "a.data")
    job = write_job("prompt: {mode: completion}\n")
    for name in ("a.arrow", "a.data"):
        assert main(["validate", job, "--json", *sets(f"input={name}")]) == 0
        assert json.loads(capsys.readouterr().out)["columns"] == ["prompt"]


def test_batch_lines_that_say_nothing_of_n_get_the_jobs(write_job: Write) -> None:
    """The job's `sampling` holds wherever a line is silent, here too; OpenAI's default of 1 does not."""
    lines = [batch_line(0), batch_line(1, n=1), batch_line(2, n=3), batch_line(3, n=None)]
    Path("batch.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    job = write_job("sampling: {n: 2, temperature: 1.0, max_tokens: 3}\n")
    rows = run(job, "input=batch.jsonl", "output.format=openai_batch", "output.compression=none")
    assert [len(row["response"]["body"]["choices"]) for row in rows] == [2, 1, 3, 2]
    alone = run(job, "input=batch.jsonl", "sampling.n=1", *OUTPUT, "output.path=one")
    assert [row["status"] for row in alone] == ["ok", "ok", "error", "ok"]
    assert "a job whose sampling.n is above 1" in alone[2]["error"]["message"]
