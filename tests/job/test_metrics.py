"""What Prometheus gets from a job: scraped while it runs, and refused before it starts."""

from __future__ import annotations

import socket
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from fake_engine import launcher
from prometheus_client.parser import text_string_to_metric_families
from tiny_models import save_tokenizer
from waiting import PATIENCE

from batchgen.api.job import Job
from batchgen.cli.status import describe
from batchgen.job.metrics import JobMetrics, serve_metrics
from batchgen.job.progress import Progress
from batchgen.job.report.collect import collect_report
from batchgen.job.status import read_status
from batchgen.job.units import parse_address, split_address
from batchgen.types import UsageError

ROWS = 12
HOSTILE = 'a"b\\c\nd\x1b[31m'


@pytest.fixture
def job(tmp_path: Path) -> dict[str, Any]:
    model = tmp_path / "model"
    model.mkdir()
    save_tokenizer(model)
    (model / "config.json").write_text('{"model_type": "llama"}')
    (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (tmp_path / "in.jsonl").write_text('{"prompt": [1, 2, 3, 4]}\n' * (ROWS - 1) + '{"prompt": null}\n')
    return {
        "model": str(model),
        "input": str(tmp_path / "in.jsonl"),
        "output": str(tmp_path / "out"),
        "prompt": {"mode": "tokens"},
        "sampling": {"max_tokens": 4},
        "run": {"progress": "none", "min_free_disk": 0, "metrics": "127.0.0.1:0"},
    }


class Scraper:
    """A display that scrapes when it is told where, and whenever progress is shown."""

    def __init__(self) -> None:
        self.address = ""
        self.scrapes: list[dict[str, float]] = []

    def update(self, snapshot: Progress) -> None:
        self.scrapes.append(scrape(self.address))

    def note(self, text: str) -> None:
        if text.startswith("metrics: "):
            self.address = text.removeprefix("metrics: ")

    def close(self) -> None: ...


def scrape(address: str) -> dict[str, float]:
    with urllib.request.urlopen(address, timeout=PATIENCE) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {
            sample.name + "".join(f"/{value}" for value in sample.labels.values()): sample.value
            for family in families
            for sample in family.samples
        }


def test_a_running_job_is_scraped(job: dict[str, Any]) -> None:
    display = Scraper()
    seen: list[Progress] = []
    result = Job(job).run(display=display, launch=launcher({}), on_progress=seen.append)
    # A row without a prompt reaches the engine and fails there.
    assert (result.exit_code, len(seen)) == (0, len(display.scrapes))
    # Each snapshot is shown first and served next.
    last = display.scrapes[-1]
    assert any(name.startswith("batchgen_info/out/") for name in last)
    with pytest.raises(OSError, match="refused"):
        scrape(display.address)


def test_reasoning_is_counted_wherever_tokens_are(job: dict[str, Any], tmp_path: Path) -> None:
    job["sampling"]["reasoning"] = {}
    job["output"] = {"path": job["output"], "part_rows": 5, "include": ["usage"]}
    seen: list[Progress] = []
    result = Job(job).run(display=Scraper(), launch=launcher({}), on_progress=seen.append)
    counted = sum(row["usage"]["reasoning_tokens"] for row in result if row["usage"])
    assert counted == ROWS - 1
    assert seen[-1].reasoning_tokens == counted
    status = read_status(tmp_path / "out")
    assert status.reasoning_tokens == counted
    assert f"; {counted} of the results are reasoning" in "\n".join(describe(status))
    assert collect_report(tmp_path / "out")["lengths"]["reasoning_tokens"] == counted


def test_every_figure_is_there_and_counters_never_go_down() -> None:
    said: list[str] = []
    with serve_metrics("127.0.0.1:0", HOSTILE, said.append) as update:
        address = said[0].removeprefix("metrics: ")
        assert scrape(address)["batchgen_rows_total/ok"] == 0
        progress = Progress(
            state="running",
            rows_total=20,
            rows_done=12,
            ok=10,
            error=2,
            running=3,
            waiting=4,
            prompt_tokens=100,
            cached_tokens=25,
            output_tokens=50,
            reasoning_tokens=30,
            pool_used=6,
            pool_total=8,
            working_seconds=10.0,
        )
        update(progress)
        update(Progress(state="running", rows_total=None, ok=11, prompt_tokens=40))
        now = scrape(address)
        assert now["batchgen_prompt_tokens_total"] == 100
        assert (now["batchgen_rows_total/ok"], "batchgen_rows_selected" in now) == (11, False)
        update(progress)
        now = scrape(address)
    expected = {
        "batchgen_rows_total/error": 2,
        "batchgen_rows_selected": 20,
        "batchgen_rows_running": 3,
        "batchgen_rows_waiting": 4,
        "batchgen_cached_tokens_total": 25,
        "batchgen_output_tokens_total": 50,
        "batchgen_reasoning_tokens_total": 30,
        "batchgen_cache_blocks_used": 6,
        "batchgen_cache_blocks": 8,
        "batchgen_prefix_hit_ratio": 0.25,
        "batchgen_rows_per_second": 1.2,
        "batchgen_output_tokens_per_second": 5.0,
    }
    assert {name: now[name] for name in expected} == pytest.approx(expected)
    assert any(HOSTILE in name for name in now)


def test_a_port_in_use_is_said_before_anything_starts(job: dict[str, Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        job["run"]["metrics"] = port

        def launch(*_: Any) -> Any:
            raise AssertionError("a worker was started")

        with pytest.raises(UsageError, match=rf"run\.metrics: 127\.0\.0\.1:{port} .*in use.*another port"):
            Job(job).run(launch=launch)


def test_without_the_key_nothing_listens() -> None:
    with serve_metrics(None, "x", pytest.fail) as update:
        update(Progress())
    assert JobMetrics("x")._latest == Progress()


@pytest.mark.parametrize(
    ("given", "address"),
    [
        (9400, "127.0.0.1:9400"),
        ("9400", "127.0.0.1:9400"),
        (":0", "127.0.0.1:0"),
        ("0.0.0.0:9400", "0.0.0.0:9400"),
        ("my-host:1", "my-host:1"),
        ("[::1]:9400", "[::1]:9400"),
    ],
)
def test_a_port_alone_means_this_machine_only(given: Any, address: str) -> None:
    assert parse_address(given) == address
    assert split_address("[::1]:7") == ("::1", 7)


@pytest.mark.parametrize("given", [True, 1.5, "", "host", "host:", "a b:1", "::1:9", "h:65536", -1])
def test_what_is_no_address(given: Any) -> None:
    with pytest.raises(ValueError, match="not an address"):
        parse_address(given)
