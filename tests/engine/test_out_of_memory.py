"""Memory that runs out in a step: what is remembered of it, and a process whose allocator really refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tiny_models import save_tiny_llama

from batchgen.engine.step_budget import STEPS_BEFORE_MORE, StepBudget


def test_a_budget_is_halved_and_comes_back_step_by_step() -> None:
    budget = StepBudget()
    budget.sufficed()
    assert budget.tokens is None
    budget.ran_out(2048)
    budget.ran_out(1024)
    seen = []
    while budget.tokens is not None:
        seen.append(budget.tokens)
        budget.sufficed()
    assert seen == [512] * STEPS_BEFORE_MORE + [1024] * STEPS_BEFORE_MORE


def test_a_budget_that_fails_again_on_its_way_back_is_halved_again() -> None:
    budget = StepBudget()
    budget.ran_out(64)
    budget.ran_out(32)
    for _ in range(STEPS_BEFORE_MORE):
        budget.sufficed()
    assert budget.tokens == 32
    budget.ran_out(31)
    assert budget.tokens == 15
    budget.forget()
    assert budget.tokens is None


LIMITED = """
import ctypes, logging, resource, sys
from pathlib import Path
from engine_harness import make_engine, run
from batchgen.types import SamplingParams

logging.basicConfig()
SAMPLING = SamplingParams(max_tokens=4, ignore_eos=True)
PROMPTS = [[(7 * i + j) % 250 for i in range(4000)] for j in range(4)]

def engine(tokens):
    return make_engine(Path(sys.argv[1]), max_model_len=8192, max_num_batched_tokens=tokens,
                       kv_cache_memory=2**27, debug_checks=False)

wanted = run(engine(512), PROMPTS, SAMPLING)
small, large = engine(512), engine(8192)
run(small, [prompt[:600] for prompt in PROMPTS], SAMPLING)
ctypes.CDLL(None).malloc_trim(0)
with open("/proc/self/status") as f:
    data = next(int(line.split()[1]) * 1024 for line in f if line.startswith("VmData"))
no_limit = resource.RLIM_INFINITY
resource.setrlimit(resource.RLIMIT_DATA, (data + 8 * 2**20, no_limit))
got = run(large, PROMPTS, SAMPLING)
resource.setrlimit(resource.RLIMIT_DATA, (no_limit, no_limit))
assert [out.error for out in got] == [None] * 4
assert [out.token_ids for out in got] == [out.token_ids for out in wanted]
"""


def test_a_process_that_gets_no_more_memory_goes_on_in_smaller_steps(tmp_path: Path) -> None:
    folder = save_tiny_llama(tmp_path, max_position_embeddings=8192)
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "ran out of memory, halved" in done.stderr
