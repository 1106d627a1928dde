"""The real worker process over its real channel, on a tiny model."""

from __future__ import annotations

import contextlib
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tiny_models import oracle, save_tiny_llama
from waiting import PATIENCE, wait_until

from batchgen.dist.channel import pack
from batchgen.dist.handle import WorkerHandle, launch_worker
from batchgen.job.counters import create_counters, read_counters, rows_in_step
from batchgen.job.journal import ResultRecord, result_payload
from batchgen.text.tokenizer import Tokenizer


class Talk:
    """A started worker and what it said."""

    def __init__(self, tmp_path: Path, folder: Path, **changes: Any) -> None:
        self.counters = tmp_path / "worker.counters"
        create_counters(self.counters)
        self._messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.handle: WorkerHandle = launch_worker(tmp_path / "worker.log", self._messages.put)
        config = {
            "model": str(folder),
            "prompt": {"mode": "completion"},
            "sampling": {"max_tokens": 12, "temperature": None},
            "order": "prefix",
            "engine": {"max_model_len": 96, "max_num_seqs": 4},
            "counters": str(self.counters),
            **changes,
        }
        self.handle.send({"type": "start", "config": config})

    def next(self, *kinds: str) -> dict[str, Any]:
        """The next message of one of `kinds`; others are skipped."""
        while True:
            message = self._messages.get(timeout=PATIENCE)
            assert message is not None, self.handle.last_lines()
            if message["type"] in kinds:
                return message

    def results(self, count: int) -> dict[int, Any]:
        """Results of `count` rows, each exactly once."""
        done: dict[int, Any] = {}
        while len(done) < count:
            message = self.next("results")
            for row, packed in zip(message["rows"], message["packed"], strict=True):
                assert row not in done
                done[row] = ResultRecord.unpack(result_payload(bytes(16), packed)).result
        return done


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def start(tmp_path: Path, model: Path) -> Iterator[Any]:
    talks: list[Talk] = []

    def make(**changes: Any) -> Talk:
        talks.append(Talk(tmp_path, model, **changes))
        return talks[-1]

    yield make
    for talk in talks:
        talk.handle.kill()


def has_ended(pid: int) -> bool:
    """Whether nothing of it runs any more."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def rows(texts: list[str]) -> list[list[Any]]:
    return [[i, pack({"prompt": text}), [], 0] for i, text in enumerate(texts)]


TEXTS = ["Hello", "the quick brown fox", "a", "zebra " * 6, "", "much too long " * 20, "ünïcode"]


def test_rows_become_results_and_faults_stay_their_own(start: Any, model: Path) -> None:
    talk = start()
    ready = talk.next("ready", "fatal")
    assert ready["type"] == "ready", ready
    assert ready["pinned"]["max_model_len"] == 96
    assert ready["facts"]["batch_invariant"] is True
    talk.handle.send({"type": "rows", "rows": rows(TEXTS)})
    done = talk.results(len(TEXTS))
    assert [done[i].status for i in range(7)] == ["ok"] * 4 + ["error", "error", "ok"]
    assert [done[4].error.error_class, done[5].error.error_class] == ["empty_prompt", "context_length"]
    tokenizer = Tokenizer.load(str(model))
    good = [0, 1, 2, 3, 6]
    expected = oracle(model, tokenizer.encode_batch([TEXTS[i] for i in good]), 12)
    assert [done[i].generated_text for i in good] == [tokenizer.decode(ids) for ids in expected]
    counters = read_counters(talk.counters)
    assert counters is not None
    assert counters.sampled >= sum(len(ids) for ids in expected)


@pytest.mark.parametrize("n", [1, 3])
def test_partials_resume_to_the_same_text(start: Any, n: int) -> None:
    sampling = {"max_tokens": 64, "ignore_eos": True, "temperature": 0.8, "n": n}
    engine = {"max_model_len": 96, "max_num_seqs": 12}
    long = {"sampling": sampling, "samples": n > 1, "engine": engine}
    talk = start(**long)
    ready = talk.next("ready")
    talk.handle.send({"type": "rows", "rows": rows(TEXTS[:3])})
    told: dict[int, list[list[int]]] = {row: [[] for _ in range(n)] for row in range(3)}
    while not all(told[row][n - 1] for row in told):
        talk.handle.send({"type": "checkpoint", "id": 1})
        for row, sample, first, ids in talk.next("partials")["rows"]:
            assert first == len(told[row][sample])
            told[row][sample] += ids
    whole = talk.results(3)
    talk.handle.kill()
    again = start(**long, pinned=ready["pinned"])
    again.next("ready")
    resumed = [[i, pack({"prompt": TEXTS[i]}), told[i], 0] for i in range(3)]
    again.handle.send({"type": "rows", "rows": resumed})
    assert again.results(3) == whole
    if n > 1:
        assert [len({*result.generated_text}) for result in whole.values()] == [n] * 3


def test_a_canary_is_answered_and_counts_for_nothing(start: Any) -> None:
    talk = start(sampling={"max_tokens": 12, "ignore_eos": True, "min_tokens": 5})
    talk.next("ready")
    talk.handle.send({"type": "canary", "row": 3, "values": pack({"prompt": TEXTS[3]})})
    assert talk.next("canary", "results") == {"type": "canary"}
    counters = read_counters(talk.counters)
    assert counters is not None
    assert counters.sampled == 0
    talk.handle.send({"type": "rows", "rows": rows(TEXTS[:4])})
    assert talk.results(4)[3].usage[1] == 12
    talk.handle.send({"type": "canary", "row": 4, "values": pack({"prompt": ""})})
    assert talk.next("canary", "results") == {"type": "canary"}
    assert rows_in_step(talk.counters) != []


def test_a_row_that_runs_too_long_is_an_error_of_its_own(start: Any) -> None:
    talk = start(sampling={"max_tokens": 80, "ignore_eos": True}, row_timeout=1e-6)
    talk.next("ready")
    talk.handle.send({"type": "rows", "rows": rows(TEXTS[:2])})
    done = talk.results(2)
    assert {r.error.error_class for r in done.values()} == {"timeout"}
    assert done[0].error.message == (
        "the row was not done after 1e-06 s in the engine (run.row_timeout); "
        "lower sampling.max_tokens or raise the limit"
    )


def test_stop_sends_the_last_partials_and_exits(start: Any) -> None:
    talk = start(sampling={"max_tokens": 64, "ignore_eos": True})
    talk.next("ready")
    talk.handle.send({"type": "rows", "rows": rows(TEXTS[:3])})
    talk.next("progress")
    talk.handle.send({"type": "stop"})
    talk.next("partials")
    assert talk.handle.wait(PATIENCE) == 0


def test_drain_finishes_what_runs_and_drops_the_rest(start: Any) -> None:
    talk = start(sampling={"max_tokens": 64, "ignore_eos": True})
    talk.next("ready")
    talk.handle.send({"type": "rows", "rows": rows(["some text"] * 400)})
    finished = len(talk.next("results")["rows"])
    talk.handle.send({"type": "drain"})
    talk.handle.send({"type": "checkpoint", "id": 7})
    while (message := talk.next("results", "partials"))["type"] == "results":
        finished += len(message["rows"])
    running = len(message["rows"])
    assert 0 < running + finished < 400
    talk.handle.send({"type": "stop"})
    assert talk.handle.wait(PATIENCE) == 0


def test_a_model_that_is_not_there_is_fatal_with_its_exit_code(start: Any, tmp_path: Path) -> None:
    talk = start(model=str(tmp_path / "nothing"))
    fatal = talk.next("fatal")
    assert fatal["exit_code"] == 2
    assert "model.path" in fatal["message"]
    assert talk.handle.wait(PATIENCE) == 2


def test_a_worker_does_not_outlive_its_supervisor(model: Path, tmp_path: Path) -> None:
    create_counters(tmp_path / "c")
    config = {
        "model": str(model), "prompt": {"mode": "completion"}, "sampling": {}, "engine": {},
        "counters": str(tmp_path / "c"),
    }  # fmt: skip
    program = (
        "import sys, time, pathlib\n"
        "from batchgen.dist.handle import launch_worker\n"
        "def show(m): print(m and m['type'], flush=True)\n"
        f"h = launch_worker(pathlib.Path({str(tmp_path / 'log')!r}), show)\n"
        f"h.send({{'type': 'start', 'config': {config!r}}})\n"
        "print('pid', h.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert supervisor.stdout is not None
    pid = int(supervisor.stdout.readline().split()[1])
    assert supervisor.stdout.readline().strip() == "ready"
    supervisor.send_signal(signal.SIGKILL)
    supervisor.wait(PATIENCE)
    supervisor.stdout.close()
    wait_until(lambda: has_ended(pid))


def test_a_template_that_refuses_the_job_is_fatal_before_weights_load(start: Any, model: Path) -> None:
    talk = start(prompt={"mode": "chat", "chat_template": "{{ raise_exception('no turns here') }}"})
    fatal = talk.next("fatal", "ready")
    assert (fatal["type"], fatal.get("exit_code")) == ("fatal", 2)
    assert "no turns here" in fatal["message"]


@pytest.mark.parametrize("chosen", [None, "active"])
def test_waiting_threads_of_a_worker_spin_only_shortly(
    chosen: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    if chosen:
        monkeypatch.setenv("OMP_WAIT_POLICY", chosen)
    show = (sys.executable, "-c", "import os; print(os.environ.get('GOMP_SPINCOUNT'))")
    handle = launch_worker(tmp_path / "log", lambda message: None, command=show)
    assert handle.wait(PATIENCE) == 0
    assert handle.last_lines() == ["None" if chosen else "3000"]
    handle.close()
