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


@pytest.fixture(params=[None, "int8"], ids=["float32", "int8"])
def any_products(request: pytest.FixtureRequest, loaded: Engine) -> Iterator[Engine]:
    """The engine in float32, and one with products in int8."""
    if request.param is None:
        yield loaded
        return
    engine = make_engine(
        MODEL, max_model_len=640, max_num_seqs=64, kv_cache_memory=400_000_000, quantization=request.param
    )
    yield engine
    engine.core.close()


@pytest.fixture
def loaded(real_engine: Engine) -> Iterator[Engine]:
    """The engine, without what an earlier test recorded of it."""
    yield real_engine
    real_engine.core.runner.__dict__.pop("execute", None)
