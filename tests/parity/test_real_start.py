"""The real model, from what an earlier start has kept and in full: the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_harness import run
from real_model import MODEL, prompts

from batchgen.cache import cache_dir
from batchgen.engine.build import build_engine
from batchgen.engine.config import EngineConfig
from batchgen.models.prepared import PreparedModel
from batchgen.types import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, logprobs=2)
DRAWN = SamplingParams(temperature=0.8, max_tokens=8, seed=1, logprobs=2)


@pytest.mark.slow
def test_a_start_from_the_cache_gives_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converted, cache = cache_dir() / "gguf", tmp_path / "cache"
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(cache_dir() / "numba"))
    monkeypatch.setenv("BATCHGEN_CACHE", str(cache))
    cache.mkdir()
    if converted.is_dir():
        (cache / "gguf").symlink_to(converted)
    config = EngineConfig(model=str(MODEL), max_model_len=640, max_num_seqs=8, kv_cache_memory=200_000_000)
    found = []
    for is_prepared in (False, True):
        engine = build_engine(config)
        assert isinstance(engine.loaded, PreparedModel) == is_prepared
        outputs = [run(engine, prompts(4), sampling) for sampling in (GREEDY, DRAWN)]
        found.append([[output.samples for output in some] for some in outputs])
        engine.core.close()
    assert found[0] == found[1]
