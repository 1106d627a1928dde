"""From a job file to what the supervisor is given."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from batchgen.job.load import load_job
from batchgen.job.run_options import options_from_spec
from batchgen.job.spec.job import JobSpec


@pytest.fixture
def spec(tmp_path: Path) -> JobSpec:
    (tmp_path / "model").mkdir()
    job = tmp_path / "job.yaml"
    job.write_text(
        "model: ./model\ninput: {path: in.jsonl, on_bad_row: stop}\noutput: out/\n"
        "run: {grace: 30s, max_errors: 5%, min_free_disk: 2GB, cost: {gpu_hour: 2.5}}\n"
    )
    return load_job(job)


def test_every_option_comes_from_the_job_file(spec: JobSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    options = options_from_spec(spec, overwrite=True)
    assert (options.grace, options.max_errors, options.min_free_disk) == (30.0, 0.05, 2_000_000_000)
    assert options.gpu_hour == 2.5
    assert (options.stop_on_bad_row, options.overwrite, options.max_time) == (True, True, None)


def test_slurm_says_when_a_run_must_have_stopped(spec: JobSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 600))
    most = options_from_spec(spec).max_time
    assert most is not None
    assert 560 < most <= 571
