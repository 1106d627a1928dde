"""Runs of contestants: who runs when, what becomes of one that fails, and what is made of the figures."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from batchgen.bench import contest
from batchgen.bench.contest import Contestant, Rules, medians, ratio
from batchgen.bench.installed import PEERS, VARIABLE, Peer, peers_folder
from batchgen.bench.workloads import BenchRow, Workload
from batchgen.dist.handle import SPINS
from batchgen.types import EngineError, UsageError

FAKE = str(Path(__file__).parent / "fake_contestant.py")
ROWS = Workload("shared-prefix", [BenchRow([1, 2, 3], 3, [5, 6, 7]), BenchRow([1, 2], 4, [5, 6, 1, 8])])
ONCE = Rules(threads=2)


@pytest.fixture
def make(tmp_path: Path) -> Any:
    def fake(name: str, do: str | None = None, **options: Any) -> Contestant:
        settings = {"name": name, "do": do, "log": str(tmp_path / "log"), "pid": str(tmp_path / "pid")}
        command = [sys.executable, FAKE]
        kinds = {key: options.pop(key) for key in ("shared_only", "environment") if key in options}
        return Contestant(
            name, command, precision="float32", options={**settings, **options}, is_ours=name == "a", **kinds
        )

    return fake


def log(folder: Path) -> list[str]:
    return [line.split()[0] for line in (folder / "log").read_text().splitlines()]


def test_contestants_take_turns(make: Any, tmp_path: Path) -> None:
    said: list[str] = []
    found = contest.contest(ROWS, [make("a"), make("b"), make("c")], Rules(threads=2, repeats=2), said.append)
    assert log(tmp_path) == ["a", "b", "c", "a", "b", "c"]
    assert [c["name"] for c in found["contestants"]] == ["a", "b", "c"]
    assert [[run["round"] for run in c["runs"]] for c in found["contestants"]] == [[0, 1]] * 3
    assert found["contestants"][1]["ours_over_it"]["rounds"] == 2
    assert found["contestants"][0]["ours_over_it"] is None
    assert len(said) == 6
    assert said[0].startswith("shared-prefix, round 1, a: ")


def test_figures_of_a_run(make: Any) -> None:
    found = contest.contest(ROWS, [make("a", sleep=0.05)], Rules(threads=2, repeats=2))
    assert (found["rows"], found["prompt_tokens"], found["output_tokens"]) == (2, 5, 7)
    first, second = found["contestants"][0]["runs"]
    assert first["version"] == "fake 1"
    assert first["total_rate"] == pytest.approx(12 / first["seconds"])
    assert first["prompt_rate"] + first["output_rate"] == pytest.approx(first["total_rate"])
    assert first["agreement"] == {"rows": 2, "exact": 1, "share": pytest.approx((1 + 2 / 4) / 2)}
    # Text is scored once.
    assert first["perplexity"] == pytest.approx(math.e)
    assert second["perplexity"] is None


def test_what_a_contestant_is_told(make: Any, tmp_path: Path) -> None:
    contest.contest(ROWS, [make("a", environment={"FAKE": "set"})], Rules(threads=3))
    assert (tmp_path / "log").read_text() == "a 3 set\n"


@pytest.mark.parametrize(
    ("do", "said"),
    [
        ("fail", "RuntimeError: no such kernel"),
        ("die", "it ended with 3 and without a result: what a library prints / Illegal instruction"),
        ("less", "row 0 has 2 tokens of 3 that were asked for"),
    ],
)
def test_another_that_fails_is_no_end(make: Any, do: str, said: str) -> None:
    found = contest.contest(ROWS, [make("a"), make("b", do)], ONCE)
    other = found["contestants"][1]
    assert other["runs"] == [{"round": 0, "error": said}]
    assert other["median"] is None
    assert other["ours_over_it"] is None


def test_one_that_hangs_is_ended_with_all_it_started(make: Any, tmp_path: Path) -> None:
    found = contest.contest(ROWS, [make("a"), make("b", "hang")], Rules(threads=1, timeout=15))
    assert found["contestants"][1]["runs"][0]["error"] == (
        "no result after 15 s; allow more with --timeout, or take fewer rows with --limit"
    )
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not _lives(pid))


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_ours_that_fails_is_the_end(make: Any) -> None:
    with pytest.raises(UsageError, match="block_size: 7 is not a multiple of 8"):
        contest.contest(ROWS, [make("a", "tell")], ONCE)
    with pytest.raises(EngineError, match="no such kernel"):
        contest.contest(ROWS, [make("a", "fail")], ONCE)


def test_ours_waits_as_a_worker_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert contest.ours("a", Path("job.yaml"), [], own=True).environment["GOMP_SPINCOUNT"] == SPINS


def test_a_python_that_is_not_there(make: Any) -> None:
    gone = Contestant("b", ["/nowhere/python"])
    found = contest.contest(ROWS, [make("a"), gone], ONCE)
    assert found["contestants"][1]["runs"][0]["error"] == (
        "/nowhere/python cannot be started: No such file or directory"
    )


def test_rounds_go_on_until_enough_was_measured(make: Any) -> None:
    found = contest.contest(ROWS, [make("a", sleep=0.1)], Rules(threads=1, min_duration=0.25))
    runs = found["contestants"][0]["runs"]
    assert sum(run["seconds"] for run in runs) >= 0.25
    assert sum(run["seconds"] for run in runs[:-1]) < 0.25


def test_some_take_part_only_where_a_prefix_is_shared(make: Any, tmp_path: Path) -> None:
    contestants = [make("a"), make("b", shared_only=True)]
    contest.contest(Workload("unique", ROWS.rows), contestants, ONCE)
    assert log(tmp_path) == ["a"]


def test_ratios_are_of_one_round() -> None:
    ours = [{"total_rate": rate} for rate in (100.0, 300.0, 90.0)]
    theirs: list[dict[str, Any]] = [{"total_rate": 50.0}, {"error": "gone"}, {"total_rate": 30.0}]
    assert ratio(ours, theirs) == {"median": 2.5, "min": 2.0, "max": 3.0, "rounds": 2}
    assert ratio(ours, [{"error": "gone"}] * 3) is None


def test_medians_are_of_runs_that_gave_a_result() -> None:
    run = dict.fromkeys(("seconds", "load_seconds", "prompt_rate", "output_rate", "total_rate"), 1.0)
    found = medians([run, {"error": "gone"}, {**run, "seconds": 4.0}, {**run, "seconds": 2.0}])
    assert found is not None
    assert found["seconds"] == 2.0
    assert medians([{"error": "gone"}]) is None


def test_where_peers_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert peers_folder() == tmp_path
    monkeypatch.delenv(VARIABLE)
    assert peers_folder() == Path("~/.cache/batchgen-peers").expanduser()


def test_a_peer_needs_its_python_and_its_model(tmp_path: Path) -> None:
    peer = Peer("ct2", "ct2", "ctranslate2_generator", "models/ct2", options={"tokenizer": "models/t.json"})
    assert peer.missing(tmp_path) == f"no {tmp_path}/ct2/bin/python"
    (tmp_path / "ct2" / "bin").mkdir(parents=True)
    (tmp_path / "ct2" / "bin" / "python").touch()
    assert peer.missing(tmp_path) == f"no {tmp_path}/models/ct2"
    (tmp_path / "models" / "ct2").mkdir(parents=True)
    assert peer.missing(tmp_path) is None
    contestant = peer.contestant(tmp_path)
    assert contestant.command[0] == f"{tmp_path}/ct2/bin/python"
    assert contestant.command[-1] == "ctranslate2_generator"
    assert (contestant.model, contestant.options) == (
        f"{tmp_path}/models/ct2",
        {"tokenizer": f"{tmp_path}/models/t.json"},
    )


def test_every_peer_has_a_script() -> None:
    for peer in PEERS:
        [*_, harness, module] = peer.contestant(Path("/")).command
        assert os.path.exists(harness)
        assert (Path(harness).parent / f"{module}.py").exists()
    assert len({peer.name for peer in PEERS}) == len(PEERS)
