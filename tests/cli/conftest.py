"""A folder with a small job: a tokenizer without weights, a few prompts, a job file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_models import save_tokenizer

JOB = "model: ./model\ninput: prompts.jsonl\noutput: out/\n"


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with an empty file of weights: what `validate` and `show` may need and no more."""
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 64}))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (folder / "generation_config.json").write_text(
        json.dumps({"do_sample": True, "temperature": 0.6, "top_p": 0.9})
    )
    return folder


@pytest.fixture
def write_job(tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Write `job.yaml` and its input in a fresh current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(tokenizer_folder)

    def write(extra: str = "", rows: str = '{"prompt": "hi"}\n{"prompt": "ho"}\n') -> str:
        Path("job.yaml").write_text(JOB + extra)
        Path("prompts.jsonl").write_text(rows)
        return "job.yaml"

    return write
