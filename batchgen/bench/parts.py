"""The parts of a step's time, in the order in which they are shown."""

from __future__ import annotations

HEAD = "lm_head"
ATTENTION = "attention"
SCHEDULER, INPUTS, REST, SAMPLING, HOST = "scheduler", "inputs", "embedding", "sampling", "host"
PROGRAM = "between operations"
"""Of layers that are one program: describing a step to it, starting threads, waiting for the last."""
PARTS = (
    *("qkv", "output", "gate_up", "down", HEAD, ATTENTION, "norm", "rotation"),
    *(PROGRAM, REST, SAMPLING, SCHEDULER, INPUTS, HOST),
)
