"""`batchgen show`: the prompt of one row, its ids, the sampling in effect."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from batchgen.cli.main import main

Write = Callable[..., str]
Captured = pytest.CaptureFixture[str]


def test_a_row_as_the_model_sees_it(write_job: Write, capsys: Captured) -> None:
    assert main(["show", write_job('prompt: {user: "{{ prompt }}!"}\n'), "--row", "1"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(
        "row 1, id 'prompts.jsonl:1', prompts.jsonl line 2\n\nprompt\n<|im_start|>user\nho!<|im_end|>\n"
    )
    assert "\n22 tokens (* special)\n      0      257 * <|im_start|>\n" in text
    assert "  temperature: 0.6\n" in text
    assert "  max_tokens: 256\n" in text


def test_the_same_as_json(write_job: Write, capsys: Captured) -> None:
    job = write_job("sampling: {temperature: 0.1}\n")
    assert main(["show", job, "--id", "prompts.jsonl:0", "--set", "sampling.seed=9", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["row"], shown["error"]) == (0, None)
    assert shown["tokens"][0] == {"id": 257, "token": "<|im_start|>", "special": True}
    assert (shown["sampling"]["temperature"], shown["sampling"]["top_p"]) == (0.1, 0.9)
    assert shown["sampling"]["seed"] == 9


def test_defaults_of_the_model_can_be_left_out(write_job: Write, capsys: Captured) -> None:
    assert main(["show", write_job(), "--json", "--set", "model.generation_defaults=none"]) == 0
    assert json.loads(capsys.readouterr().out)["sampling"]["temperature"] == 0.0


def test_a_row_that_cannot_run_says_why(write_job: Write, capsys: Captured) -> None:
    job = write_job(rows='{"prompt": null}\n{broken\n')
    assert main(["show", job, "--row", "0"]) == 0
    assert "error null_prompt: column 'prompt' is null" in capsys.readouterr().out
    assert main(["show", job, "--row", "1"]) == 0
    assert "error invalid_json: " in capsys.readouterr().out


def test_what_a_row_holds_cannot_steer_the_terminal(write_job: Write, capsys: Captured) -> None:
    assert main(["show", write_job(rows='{"prompt": "\\u001b[2J"}\n')]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert "\\x1b[2J" in text


@pytest.mark.parametrize(
    ("which", "said"),
    [
        (["--row", "2"], "--row 2: the input has 2 rows; count them from 0"),
        (["--id", "x"], "--id x: 2 rows were searched and none has this id"),
    ],
)
def test_a_row_that_is_not_there(write_job: Write, capsys: Captured, which: list[str], said: str) -> None:
    assert main(["show", write_job(), *which]) == 2
    assert said in capsys.readouterr().err


def test_a_rows_own_sampling(write_job: Write, capsys: Captured) -> None:
    job = write_job(
        "sampling: {per_row: s, max_tokens: 9}\n",
        rows='{"prompt": "a", "s": {"temperature": 0.1}}\n{"prompt": "b", "s": {"temperature": Infinity}}\n',
    )
    assert main(["show", job]) == 0
    text = capsys.readouterr().out
    assert "\nsampling (* of this row)\n* temperature: 0.1\n  top_p: 0.9\n" in text
    assert main(["show", job, "--row", "1", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["error"]["class"] == "invalid_param"
    assert (shown["status"], shown["overridden"]) == ("error", [])


def test_a_prompt_that_was_cut(write_job: Write, capsys: Captured) -> None:
    job = write_job(
        "prompt: {mode: completion, overflow: truncate_left}\nsampling: {max_tokens: 4}\n",
        rows='{"prompt": "abcdefghijklmn"}\n',
    )
    assert main(["show", job, "--set", "model.max_model_len=12"]) == 0
    text = capsys.readouterr().out
    assert "\nprompt\nghijklmn\n" in text
    assert "\n6 tokens were cut to make the prompt fit\n" in text
    assert main(["show", job, "--set", "model.max_model_len=12", "--set", "prompt.overflow=skip"]) == 0
    assert "\nskipped context_length: the prompt has 14 tokens" in capsys.readouterr().out


def test_the_first_turn_of_a_dialogue(write_job: Write, capsys: Captured) -> None:
    job = write_job("sampling: {turns: turns}\n", rows='{"turns": ["a", "b"]}\n')
    assert main(["show", job]) == 0
    assert "\nprompt of turn 1 of 2\n<|im_start|>user\na<|im_end|>\n" in capsys.readouterr().out


def test_which_tokens_are_scored(write_job: Write, capsys: Captured) -> None:
    extra = "prompt: {mode: completion}\ntask: "
    job = write_job(extra + "loglikelihood\n", '{"context": "ab", "continuation": "cd"}\n')
    assert main(["show", job]) == 0
    text = capsys.readouterr().out
    assert "\n\ncontext\nab\n\ncontinuation\ncd\n\n4 tokens (* special, > scored: 2)\n" in text
    assert [line[18] for line in text.splitlines()[-4:]] == [" ", " ", ">", ">"]
    assert "sampling" not in text
    assert main(["show", write_job(extra + "perplexity\n"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["task"], shown["scored_tokens"], shown["sampling"]) == ("perplexity", 2, {})


def test_what_becomes_of_a_text(write_job: Write, capsys: Captured) -> None:
    assert main(["show", write_job("prompt: {mode: completion}\ntask: embed\n")]) == 0
    text = capsys.readouterr().out
    assert "\n\ntext\nhi\n\n2 tokens (* special)\n" in text
    assert text.endswith('\n\nembedding\n  pooling: "auto"\n  normalize: true\n')
