"""`batchgen plan`: what it says of rows, tokens, faults, disk and a resume."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_engine import launcher
from hypothesis import given
from hypothesis import strategies as st

from batchgen.cli import plan as verb
from batchgen.cli.main import main
from batchgen.job.plan_rows import Everything, Sample, scan_rows
from batchgen.job.plan_tokens import BLOCK, TokenCounter
from batchgen.promise import PROMISES
from batchgen.text.prompt import PreparedRow
from batchgen.text.task_request import TaskRequests
from batchgen.types import SamplingParams, Task

Write = Callable[..., str]
Captured = pytest.CaptureFixture[str]
HOSTILE = "\x1b[31m\u202e"
ROWS = (
    '{"prompt": "hi", "id": "a"}\n'
    '{"prompt": null}\n'
    '{"prompt": ""}\n'
    '{"prompt": "broken\n'
    '{"prompt": "a<|im_end|>b", "x": NaN}\n'
    '{"prompt": "' + "long " * 30 + '"}\n'
    '{"prompt": "hi"}\n'
)


def plan_of(capsys: Captured, *arguments: str, code: int = 0) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == code
    plan: dict[str, Any] = json.loads(capsys.readouterr().out)
    return plan


def test_what_would_fail_and_why(write_job: Write, capsys: Captured) -> None:
    plan = plan_of(capsys, write_job("sampling: {max_tokens: 5}\n", ROWS), "--full")
    assert plan["rows"] == {"total": 7, "exact": True, "read": 7, "tokenized": 6, "left": 7}
    assert plan["bits"] == {
        "device": "cpu",
        "dtype": "float32",
        "quantization": None,
        "kv_cache_dtype": "float32",
        "deterministic": "auto",
        "promise": PROMISES[0].sentence,
    }
    errors = {error["class"]: error for error in plan["errors"]}
    assert set(errors) == {"invalid_json", "null_prompt", "empty_prompt"}
    assert all((error["found"], error["estimated"]) == (1, 1) for error in errors.values())
    assert errors["null_prompt"]["examples"][0]["row"] == 1
    long = plan["too_long"]
    assert (long["max_model_len"], long["found"], long["overflow"]) == (64, 1, "error")
    assert long["examples"][0]["row"] == 5
    assert plan["duplicates"]["prompts"] == {"rows": 1, "examples": [{"row": 6, "equals_row": 0}]}
    assert plan["duplicates"]["ids"]["rows"] == 0
    assert plan["control_tokens"] == {"rows": 1, "tokens": 1, "among_rows": 6}
    assert plan["input_notes"] == {"nan_replaced": 1}
    assert plan["tokens"]["exact"]
    # Three rows run; the one that is too long does not.
    assert plan["tokens"]["output_at_most"] == 15
    assert 0 < plan["tokens"]["prompt"] < 3 * 64
    assert (plan["resume"]["would"], plan["seconds"]) == ("start", None)
    assert any("leaves no room" in warning for warning in plan["warnings"])


def test_the_same_in_words_that_steer_no_terminal(write_job: Write, capsys: Captured) -> None:
    rows = json.dumps({"prompt": None, "id": HOSTILE}) + "\n" + '{"prompt": "x' + HOSTILE + "\n"
    assert main(["plan", write_job("", rows)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("rows      2; 2 read, 1 tokenized\n")
    assert "error     null_prompt: 1 of 1 row, about 1 in all\n" in text
    assert "warning   every row would fail" in text
    assert all(line.isprintable() for line in text.splitlines())


def test_a_sample_is_scaled_and_says_so(
    write_job: Write, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = "".join(json.dumps({"prompt": None if n % 10 == 0 else "word"}) + "\n" for n in range(400))
    job = write_job("", rows)
    exact = plan_of(capsys, job, "--full")
    monkeypatch.setattr(verb, "READ", 200)
    plan = plan_of(capsys, job, "--sample", "100")
    assert (plan["rows"]["read"], plan["rows"]["tokenized"], plan["rows"]["exact"]) == (200, 100, False)
    assert plan["rows"]["total"] == pytest.approx(400, rel=0.05)
    assert not plan["tokens"]["exact"]
    assert plan["tokens"]["prompt"] == pytest.approx(exact["tokens"]["prompt"], rel=0.1)
    (error,) = plan["errors"]
    assert error["estimated"] == pytest.approx(40, abs=20)
    limited = plan_of(capsys, job, "--set", "input.limit=50")
    assert (limited["rows"]["total"], limited["rows"]["exact"]) == (50, True)


def test_only_selected_rows_count(
    write_job: Write, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = "".join(json.dumps({"prompt": f"word {n}", "n": n % 4}) + "\n" for n in range(400))
    job = write_job("", rows)
    Path(job).write_text(
        "model: ./model\ninput: {path: prompts.jsonl, where: n == 0, rows: '100:'}\noutput: out/\n"
    )
    assert plan_of(capsys, job, "--full")["rows"] == {
        "total": 75,
        "exact": True,
        "read": 75,
        "tokenized": 75,
        "left": 75,
    }
    monkeypatch.setattr(verb, "READ", 40)
    plan = plan_of(capsys, job)["rows"]
    assert not plan["exact"]
    assert plan["total"] == pytest.approx(75, rel=0.05)
    first = plan_of(capsys, job, "--set", "input.where=null", "--set", "input.rows=10:30")["rows"]
    assert (first["total"], first["exact"]) == (20, True)


def test_a_row_with_sampling_of_its_own_is_counted_by_it(write_job: Write, capsys: Captured) -> None:
    rows = '{"prompt": "a", "s": {"max_tokens": 2}}\n{"prompt": "b", "s": {"top_p": 7}}\n{"prompt": "c"}\n'
    plan = plan_of(capsys, write_job("sampling: {max_tokens: 9, per_row: s}\n", rows))
    assert plan["tokens"]["output_at_most"] == 11
    (error,) = plan["errors"]
    assert (error["class"], error["found"]) == ("invalid_param", 1)


def test_parquet_rows_are_exact_without_reading_them(
    write_job: Write, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = write_job()
    pq.write_table(pa.table({"prompt": ["same"] * 300}), "prompts.parquet")
    monkeypatch.setattr(verb, "READ", 100)
    plan = plan_of(capsys, job, "--set", "input.path=prompts.parquet")
    assert (plan["rows"]["total"], plan["rows"]["exact"], plan["rows"]["read"]) == (300, True, 100)
    assert plan["duplicates"]["prompts"]["rows"] == 99


def test_what_run_would_refuse_is_the_exit_code(write_job: Write, capsys: Captured) -> None:
    twice = '{"prompt": "hi", "id": "a"}\n{"prompt": "ho", "id": "a"}\n'
    plan = plan_of(capsys, write_job("", twice), code=2)
    assert "ids must be distinct" in plan["faults"][0]
    assert main(["plan", write_job("prompt: {user: '{{ nothing }}'}\n")]) == 2
    assert main(["plan", "absent.yaml"]) == 2
    assert main(["plan", write_job(), "--simulate"]) == 2


def test_a_folder_says_what_a_resume_would_do(write_job: Write, capsys: Captured) -> None:
    # Ids need no tokenizer, so that the worker starts at once.
    quiet = "run: {progress: none, min_free_disk: 0}\nsampling: {max_tokens: 4}\nprompt: {mode: tokens}\n"
    job = write_job(quiet, '{"prompt": [65, 66]}\n' * 30)
    assert main(["run", job, "--limit", "20"], launch=launcher({"tokens": 3})) == 0
    capsys.readouterr()
    plan = plan_of(capsys, job)
    assert (plan["resume"]["would"], plan["resume"]["rows_done"], plan["rows"]["left"]) == (
        "continue",
        20,
        10,
    )
    assert plan["tokens"]["output_expected"] == 90
    assert plan["seconds"] is not None
    assert plan["disk"]["basis"] == "what finished rows take"
    assert plan_of(capsys, job, "--set", "input.limit=20")["resume"]["would"] == "do nothing"
    changed = plan_of(capsys, job, "--set", "sampling.temperature=0.9", code=4)
    assert changed["resume"]["would"] == "refuse"
    assert "sampling.temperature" in changed["resume"]["differences"][0]


@given(st.integers(0, 300), st.integers(1, 40))
def test_a_sample_is_of_the_right_size_in_order_and_always_the_same(rows: int, size: int) -> None:
    def sample() -> list[int]:
        taken: list[int] = []
        chosen = Sample(size, lambda batch: taken.extend(row for row, *_ in batch))
        for row in range(rows):
            chosen.add((row, "", {}))
        chosen.close()
        return taken

    taken = sample()
    assert taken == sorted(set(taken)) == sample()
    assert len(taken) == min(rows, size)
    assert all(0 <= row < rows for row in taken)


PROMPTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3 * BLOCK + 2), max_size=8)


@given(PROMPTS)
def test_shared_beginnings_are_those_of_a_brute_force_search(prompts: list[list[int]]) -> None:
    class Ids:
        def prepare_batch(self, rows: Any, _: int, sampling: Any = None) -> list[PreparedRow]:
            return [PreparedRow(row, values["ids"]) for row, values in rows]

    requests = TaskRequests(Task.GENERATE, None, 1 << 20)  # type: ignore[arg-type]
    counter = TokenCounter(Ids(), requests, lambda _: SamplingParams(), None)
    everything = Everything(counter.take)
    for row, ids in enumerate(prompts):
        everything.add((row, "", {"ids": ids}))
    everything.close()
    expected = 0
    for row, ids in enumerate(prompts):
        blocks = max((_common(ids, other) for other in prompts[:row]), default=0)
        expected += min(blocks, (len(ids) - 1) // BLOCK) * BLOCK
    assert counter.scan.shared_tokens == expected
    assert counter.scan.prompt_tokens == sum(map(len, prompts))


def _common(a: list[int], b: list[int]) -> int:
    """Whole blocks that two prompts have in common at their beginning."""
    blocks = 0
    while (end := (blocks + 1) * BLOCK) <= min(len(a), len(b)) and a[:end] == b[:end]:
        blocks += 1
    return blocks


def test_no_rows_are_no_special_case() -> None:
    scan = scan_rows([], [], None, Everything(lambda batch: None))
    assert (scan.read, scan.ended, scan.ids.rows) == (0, True, 0)


def test_every_turn_of_a_dialogue_is_a_prompt(write_job: Write, capsys: Captured) -> None:
    """Counted without answers, so at least so many tokens; it may be a later turn that is too long."""
    one = json.dumps({"u": ["a"]}) + "\n"
    three = json.dumps({"u": ["a", "b", "c"]}) + "\n"
    extra = "sampling: {max_tokens: 2, turns: u}\n"
    alone = plan_of(capsys, write_job(extra, one), "--full")
    job = write_job(extra, three)
    both = plan_of(capsys, job, "--full", "--set", "model.max_model_len=512")
    first = alone["tokens"]["prompt"]
    assert both["tokens"]["prompt_at_least"]
    assert both["tokens"]["prompt"] > 1.9 * 3 * first
    assert both["tokens"]["output_at_most"] == 3 * 2
    assert both["too_long"]["found"] == 0
    assert plan_of(capsys, job, "--full")["too_long"]["found"] == 1
    assert main(["plan", job, "--full"]) == 0
    assert "\nprompts   at least " in capsys.readouterr().out


def test_samples_are_counted_each(write_job: Write, capsys: Captured) -> None:
    job = write_job(
        "sampling: {max_tokens: 5, n: 3, temperature: 1}\n", '{"prompt": "hi"}\n{"prompt": "ho"}\n'
    )
    assert plan_of(capsys, job, "--full")["tokens"]["output_at_most"] == 2 * 3 * 5


PAIRS = "".join(
    json.dumps({"context": context, "continuation": continuation}) + "\n"
    for context, continuation in (("abc", "de"), ("a" * 40, "b" * 8), ("a" * 40, "c" * 30))
)


def test_both_texts_of_a_pair_are_counted_and_nothing_is_generated(
    write_job: Write, capsys: Captured
) -> None:
    """The model reads all of a pair but its last token: 4 and 47 tokens; the third has 69, and 64 fit."""
    job = write_job("task: loglikelihood\nprompt: {mode: completion}\n", PAIRS)
    plan = plan_of(capsys, job, "--full")
    tokens = plan["tokens"]
    assert (tokens["prompt"], tokens["scored"], tokens["output_at_most"]) == (4 + 47, 2 + 8, 0)
    assert tokens["prompt_lengths"]["max"] == 69
    assert (plan["task"], plan["too_long"]["found"]) == ("loglikelihood", 1)
    assert plan["warnings"] == [
        "1 of 3 prompts does not fit in 64 tokens and becomes an error row (context_length)"
    ]
    assert plan["disk"]["basis"] == "rows and their results, uncompressed"
    assert main(["plan", job, "--full"]) == 0
    text = capsys.readouterr().out
    assert "\ntexts     51 tokens in all; a row has 40 in the mean" in text
    assert "\noutputs   10 tokens are scored; nothing is generated\n" in text


def test_a_long_text_is_scored_in_windows(write_job: Write, capsys: Captured) -> None:
    """Of 100 tokens 64 and 36 are new; the second window is as long as the first."""
    job = write_job(
        "task: perplexity\nprompt: {mode: completion}\n", 2 * (json.dumps({"prompt": "x" * 100}) + "\n")
    )
    plan = plan_of(capsys, job, "--full")
    tokens = plan["tokens"]
    assert (tokens["prompt"], tokens["scored"], plan["too_long"]["found"]) == (2 * 128, 2 * 100, 0)
    # Nothing that is scored is taken from the cache: of a later window only what comes before that.
    assert tokens["shared_prefix_share"] == 16 / 256


@pytest.mark.parametrize("task", ["embed", "classify"])
def test_texts_that_become_no_tokens(write_job: Write, capsys: Captured, task: str) -> None:
    """One token more fits than where an answer follows, and all but the last token may be cached."""
    rows = "".join(json.dumps({"prompt": "x" * n}) + "\n" for n in (64, 64, 65))
    job = write_job(f"task: {task}\nprompt: {{mode: completion}}\n", rows)
    plan = plan_of(capsys, job, "--full")
    tokens = plan["tokens"]
    assert (tokens["prompt"], tokens["scored"], tokens["output_at_most"]) == (128, 0, 0)
    assert plan["too_long"]["found"] == 1
    assert tokens["shared_prefix_share"] == 48 / 128
    assert main(["plan", job]) == 0
    assert "for each" in next(x for x in capsys.readouterr().out.splitlines() if x.startswith("outputs"))
    if task == "embed":
        mean = plan_of(capsys, job, "--full", "--set", "embedding.pooling=mean")
        assert mean["tokens"]["shared_prefix_share"] == 0
