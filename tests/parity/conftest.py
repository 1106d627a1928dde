"""The real model under the engine, loaded once for all tests that only change its schedule."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine_harness import make_engine
from real_model import MODEL

from batchgen.engine.build import Engine


@pytest.fixture(scope="session")
def real_engine() -> Iterator[Engine]:
    engine = make_engine(MODEL, max_model_len=640, max_num_seqs=64, kv_cache_memory=400_000_000)
    yield engine
    engine.core.close()


@pytest.fixture
def loaded(real_engine: Engine) -> Iterator[Engine]:
    """The engine, without what an earlier test recorded of it."""
    yield real_engine
    real_engine.core.runner.__dict__.pop("execute", None)
