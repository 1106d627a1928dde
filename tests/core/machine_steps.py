"""How long the state machines of the core run.

BATCHGEN_STEPS sets about how many rules all machines together run. The default fits CI and makes the same
choices every time; set it to explore, as in `BATCHGEN_STEPS=1000000 pytest tests/core -k machine`. How many
rules and scheduler steps really ran is printed at the end.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

CI_STEPS = 24_000
STEPS = int(os.environ.get("BATCHGEN_STEPS", CI_STEPS))


def machine_settings(share: float, rules: int = 50) -> settings:
    """For a machine that runs its share of all rules, in examples of so many."""
    return settings(
        max_examples=max(1, round(STEPS * share / rules)),
        stateful_step_count=rules,
        deadline=None,
        derandomize="BATCHGEN_STEPS" not in os.environ,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
