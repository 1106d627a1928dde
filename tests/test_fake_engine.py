"""The fake engine keeps its promises: the same answers at any speed, without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from fake_engine import Behaviour, FakeCore, answer, save_model, text_of

from batchgen.scores import Scoring
from batchgen.types import Output, Request, SamplingParams

FAKE_BATCHGEN = Path(__file__).with_name("fake_batchgen.py")


def texts(behaviour: Behaviour, rows: int) -> dict[int, str]:
    core = FakeCore(behaviour, 4)
    for row in range(rows):
        assert core.add(Request(row, [row, 7], SamplingParams(max_tokens=20, seed=3))) is None
    done: dict[int, str] = {}
    while core.num_unfinished:
        done |= {output.request_id: output.text for output in core.step()}
    return done


@pytest.mark.parametrize("tokens_per_step", [None, 1, 3])
def test_an_answer_is_a_function_of_row_seed_and_prompt(tokens_per_step: int | None) -> None:
    done = texts(Behaviour(tokens_per_step=tokens_per_step), 12)
    assert done == {row: text_of(answer(3, row, [row, 7], 20)) for row in range(12)}
    assert len(set(done.values())) == 12
    assert len({len(text) for text in done.values()}) > 3


def test_logprobs_are_a_function_of_the_tokens() -> None:
    core = FakeCore(Behaviour(tokens_per_step=1), 4)
    sampling = SamplingParams(max_tokens=6, logprobs=2, prompt_logprobs=2)
    assert core.add(Request(0, [4, 7, 9], sampling, scoring=Scoring(0, (7, 9), 2))) is None
    done: list[Output] = []
    while core.num_unfinished:
        done += core.step()
    (output,) = done
    assert output.logprobs is not None
    assert output.prompt_logprobs is not None
    assert [one.token_id for one in output.logprobs] == output.token_ids
    for one in (*output.logprobs, *output.prompt_logprobs[1:]):
        assert one is not None
        assert replace(one, top=()) == one.top[one.rank - 1]
        assert one.top[0].logprob > one.top[1].logprob


def test_the_command_line_with_token_ids_loads_neither_torch_nor_transformers(tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    rows = "".join(json.dumps({"prompt_token_ids": [n, n + 1]}) + "\n" for n in range(30))
    (tmp_path / "in.jsonl").write_text(rows)
    (tmp_path / "job.yaml").write_text(
        "model: model\ninput: in.jsonl\nprompt: {mode: tokens}\nsampling: {max_tokens: 8}\n"
        "output: {path: out, format: jsonl, compression: none}\nrun: {min_free_disk: 1MB}\n"
    )
    command = [sys.executable, str(FAKE_BATCHGEN), "run", str(tmp_path / "job.yaml")]
    path = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONPROFILEIMPORTTIME": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    log = next((tmp_path / "out/.batchgen/attempts").glob("*.log")).read_text()
    assert " fake_engine\n" in done.stderr
    assert " batchgen.dist.serve\n" in log
    for heavy in ("torch", "transformers"):
        assert f" {heavy}\n" not in done.stderr + log
    part = (tmp_path / "out/data/part-000000.jsonl").read_text().splitlines()
    assert [json.loads(line)["generated_text"] for line in part] == [
        text_of(answer(0, n, [n, n + 1], 8)) for n in range(30)
    ]
