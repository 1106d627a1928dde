"""The parts of a step's time, in the order in which they are shown; and kinds of steps."""

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
PROMPTS, MIXED, DECODING = "prompts", "mixed", "decoding"
STEP_KINDS = (PROMPTS, MIXED, DECODING)
ALL = "all"
"""Steps of any kind."""
KINDS = {
    "q_proj": "qkv",
    "k_proj": "qkv",
    "v_proj": "qkv",
    "qkv_proj": "qkv",
    "o_proj": "output",
    "gate_proj": "gate_up",
    "up_proj": "gate_up",
    "gate_up_proj": "gate_up",
    "down_proj": "down",
}
"""What a layer's products are called; others keep the name that transformers gives them."""
