"""Dialogues: the worker's loop on a tiny model, against the turns done by hand with transformers."""

from __future__ import annotations

import itertools
import random
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_harness import make_engine
from tiny_models import oracle, save_tiny_llama

from batchgen.dist import row_clock
from batchgen.dist.channel import Channel, pack
from batchgen.dist.serve import ReadyEngine, WorkerLoop
from batchgen.engine.build import Engine
from batchgen.job.counters import create_counters
from batchgen.job.journal import ResultRecord, result_payload
from batchgen.sampling.overrides import RowSampling
from batchgen.text.prompt import PromptRenderer, PromptSpec
from batchgen.text.task_request import TaskRequests
from batchgen.text.tokenizer import Tokenizer
from batchgen.types import Task

SYSTEM = "Answer in few words."
TURNS = {
    0: ["Hello there", "And then?", "Why?"],
    1: ["One turn"],
    2: ["zebra " * 5, "b"],
    3: ["a", "b" * 400],
}
MAX_TOKENS = 10


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def engine(model: Path) -> Engine:
    return make_engine(model, max_model_len=320, max_num_seqs=3)


class Talk:
    """A loop in a thread, and the other end of its channel."""

    def __init__(
        self,
        tmp_path: Path,
        model: Path,
        engine: Engine,
        sampling: dict[str, Any],
        worker: dict[str, Any],
        **prompt: Any,
    ) -> None:
        spec = PromptSpec.from_dict({"turns": "turns", "system": SYSTEM, **prompt})
        tokenizer = Tokenizer.load(str(model))
        ready = ReadyEngine(
            core=engine.core,
            renderer=PromptRenderer(spec, tokenizer),
            requests=TaskRequests(Task.GENERATE, tokenizer, engine.core.max_model_len),
            sampling=RowSampling({"max_tokens": MAX_TOKENS, **sampling}, {}, None),
            max_num_seqs=3,
            pinned={},
            facts={},
        )
        create_counters(tmp_path / "counters")
        self._ours, fd = Channel.pair()
        config = {"counters": str(tmp_path / "counters"), "include": ["output_token_ids"], **worker}
        self._engine = engine
        self._theirs = Channel.from_fd(fd)
        self.loop = WorkerLoop(self._theirs, config, lambda _: ready)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self.streams: dict[int, list[int]] = {}
        self.done: dict[int, Any] = {}

    def _run(self) -> None:
        try:
            self.loop.run()
        finally:
            self._theirs.close()
            self._engine.core.abort_all()

    def send(self, rows: dict[int, list[str]], partial: dict[int, list[int]] | None = None) -> None:
        given = partial or {}
        self.streams |= {row: list(given.get(row, [])) for row in rows}
        message = [[row, pack({"turns": turns}), [given.get(row, [])], 0] for row, turns in rows.items()]
        self._ours.send({"type": "rows", "rows": message})

    def until(self, results: int, checkpoints: bool = False) -> dict[int, Any]:
        """Receive until so many rows are done; partials must be gapless and go on where they ended."""
        while len(self.done) < results:
            if checkpoints:
                self._ours.send({"type": "checkpoint", "id": 1})
            self._take()
        return self.done

    def _take(self) -> dict[str, Any]:
        message = self._ours.receive()
        if message["type"] == "partials":
            for row, sample, first, ids in message["rows"]:
                assert sample == 0
                assert first == len(self.streams[row])
                self.streams[row] += ids
        elif message["type"] == "results":
            for row, packed in zip(message["rows"], message["packed"], strict=True):
                self.done[row] = ResultRecord.unpack(result_payload(bytes(16), packed)).result
        return message

    def end(self) -> None:
        """Ask it to stop, which reports the last partials."""
        self._ours.send({"type": "stop"})
        while (message := self._take())["type"] != "partials" or message["id"] is not None:
            pass
        self._thread.join()
        self._ours.close()


@pytest.fixture
def start(tmp_path: Path, model: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Any:
    # The engine serves all tests of this module; a loop that ends would close it.
    monkeypatch.setattr(engine.core, "close", lambda: None)
    return lambda sampling=None, worker=None, **prompt: Talk(
        tmp_path, model, engine, sampling or {}, worker or {}, **prompt
    )


def by_hand(model: Path, turns: list[str]) -> list[str]:
    """The answers, turn by turn, with transformers alone."""
    hf = Tokenizer.load(str(model)).hf
    chat, answers = [{"role": "system", "content": SYSTEM}], []
    for turn in turns:
        chat.append({"role": "user", "content": turn})
        prompt = hf.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        (ids,) = oracle(model, [prompt], MAX_TOKENS)
        answers.append(hf.decode(ids, skip_special_tokens=True))
        chat.append({"role": "assistant", "content": answers[-1]})
    return answers


def test_reasoning_is_no_part_of_the_conversation(start: Any, model: Path) -> None:
    """Every prompt ends within an open mark, and a character of the first answer is the one that ends it."""
    hf = Tokenizer.load(str(model)).hf
    opened = hf.chat_template + "{% if add_generation_prompt %}<think>{% endif %}"
    chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Hello there"}]
    first = oracle_turn(model, hf, opened, chat)
    mark = next(c for c in first[1:] if c.isascii() and c.isprintable() and c != " ")
    talk = start(
        {"reasoning": {"start": "<think>", "end": mark}}, {"include": ["reasoning"]}, chat_template=opened
    )
    talk.send({0: ["Hello there", "And then?"]})
    result = talk.until(1)[0]
    talk.end()
    chat, expected = chat[:1], []
    for turn in ("Hello there", "And then?"):
        chat.append({"role": "user", "content": turn})
        reasoning, _, answer = oracle_turn(model, hf, opened, chat).partition(mark)
        expected.append((reasoning.strip(), answer.lstrip()))
        chat.append({"role": "assistant", "content": answer.lstrip()})
    assert list(zip(result.included["reasoning"], result.generated_text, strict=True)) == expected


def oracle_turn(model: Path, hf: Any, template: str, chat: list[dict[str, str]]) -> str:
    ids = hf.apply_chat_template(
        chat, chat_template=template, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    text: str = hf.decode(oracle(model, [ids], MAX_TOKENS)[0], skip_special_tokens=True)
    return text


def test_the_same_as_by_hand(start: Any, model: Path) -> None:
    talk = start()
    talk.send(TURNS)
    done = talk.until(len(TURNS))
    talk.end()
    for row in (0, 1, 2):
        assert done[row].status == "ok"
        assert done[row].generated_text == by_hand(model, TURNS[row])
    # The second turn does not fit, so the row has no result; its first answer is no half of one.
    assert (done[3].status, done[3].generated_text) == ("error", None)
    assert done[3].error.error_class == "context_length"
    assert done[3].error.message.startswith("turn 2: the prompt has ")
    assert not talk.loop._intake.dialogues


def test_usage_is_the_sum_of_the_turns(start: Any, model: Path) -> None:
    talk = start()
    talk.send({0: TURNS[0]})
    (result,) = talk.until(1).values()
    talk.end()
    hf = Tokenizer.load(str(model)).hf
    chat, prompts = [{"role": "system", "content": SYSTEM}], 0
    for turn, answer in zip(TURNS[0], result.generated_text, strict=True):
        chat.append({"role": "user", "content": turn})
        prompts += len(hf.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))
        chat.append({"role": "assistant", "content": answer})
    assert result.usage[0] == prompts
    assert result.usage[1] <= 3 * MAX_TOKENS
    assert len(result.included["output_token_ids"]) // 4 <= result.usage[1]


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.9, "seed": 5, "stop": ["e", "\n"]}], ids=["greedy", "sampled"]
)
def test_resumed_anywhere_it_ends_the_same(start: Any, sampling: dict[str, Any]) -> None:
    rows = {row: TURNS[row] for row in (0, 1, 2)}
    talk = start(sampling)
    talk.send(rows)
    whole = dict(talk.until(3, checkpoints=True))
    talk.end()
    draw = random.Random(0)
    for _ in range(6):
        partial = {row: ids[: draw.randint(0, len(ids))] for row, ids in talk.streams.items()}
        again = start(sampling)
        again.send(rows, partial)
        assert again.until(3, checkpoints=True) == whole
        again.end()
        for row, ids in talk.streams.items():
            shorter = min(len(ids), len(again.streams[row]))
            assert again.streams[row][:shorter] == ids[:shorter]


def test_turns_that_others_have_too_are_in_the_stream(start: Any) -> None:
    """With `input.dedupe`, tokens of a turn that was not computed here are partial output like any other."""
    rows = {0: TURNS[0], 1: [*TURNS[0][:2], "Really?"], 4: TURNS[0]}
    talk = start(worker={"dedupe": True})
    talk.send(rows)
    whole = dict(talk.until(3, checkpoints=True))
    talk.end()
    assert whole[0].generated_text == whole[4].generated_text
    assert whole[0].generated_text[:2] == whole[1].generated_text[:2]
    draw = random.Random(1)
    for _ in range(4):
        partial = {row: ids[: draw.randint(0, len(ids))] for row, ids in talk.streams.items()}
        again = start(worker={"dedupe": True})
        again.send(rows, partial)
        assert again.until(3, checkpoints=True) == whole
        again.end()


def test_a_row_may_take_so_long_not_each_of_its_turns(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count()
    monkeypatch.setattr(row_clock, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    # Each step takes a second, and each turn at most MAX_TOKENS steps.
    talk = start({"ignore_eos": True}, {"row_timeout": MAX_TOKENS + 2})
    talk.send({1: TURNS[1]})
    assert talk.until(1)[1].status == "ok"
    talk.send({0: TURNS[0]})
    error = talk.until(2)[0].error
    talk.end()
    assert error.error_class == "timeout"
    assert error.message.startswith("turn 2: the row was not done after 12 s")


def test_stopped_between_turns_nothing_is_lost(start: Any) -> None:
    rows = {row: TURNS[row] for row in (0, 2)}
    talk = start()
    talk.send(rows)
    whole = dict(talk.until(2))
    talk.end()
    stopped = start()
    stopped.send(rows)
    stopped.until(1, checkpoints=True)
    stopped.end()
    again = start()
    again.send({row: turns for row, turns in rows.items() if row not in stopped.done}, stopped.streams)
    again.until(2 - len(stopped.done))
    again.end()
    assert stopped.done | again.done == whole


def test_a_turn_that_is_cut_or_left_out(start: Any) -> None:
    talk = start(overflow="truncate_middle")
    talk.send({3: TURNS[3]})
    (cut,) = talk.until(1).values()
    talk.end()
    assert cut.status == "ok"
    assert cut.usage[2] > 100
    talk = start(overflow="skip")
    talk.send({3: TURNS[3]})
    (skipped,) = talk.until(1).values()
    talk.end()
    assert (skipped.status, skipped.error.error_class) == ("skipped", "context_length")
