"""The real model and real prompts, and transformers' own output for them, kept on disk.

What transformers generated is kept in `build/parity/`, for each version of it and of torch, so that no run
computes it twice and an interrupted one goes on where it was.
"""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM

from batchgen.models.source import find_model
from batchgen.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "build" / "SmolLM2-135M-Instruct.Q4_1.gguf"
PROBLEMS = ROOT / "build" / "HumanEval.jsonl.gz"
KEPT = ROOT / "build" / "parity" / f"oracle-{transformers.__version__}-{torch.__version__}.json"
MAX_TOKENS = 48
SYSTEM = (
    "You are a patient teacher of programming who writes for beginners. Say in plain English what the "
    "function is supposed to do, what goes in and what comes out, in two to four complete sentences."
)
QUESTIONS = (
    "Explain what this function does:\n\n{}",
    "Write three test cases for it:\n\n{}",
    "Which mistakes do beginners make here?\n\n{}",
    "Say it in one short sentence.\n\n{}",
)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(str(find_model(str(MODEL)).tokenizer_folder()))


@cache
def prompts(count: int) -> list[list[int]]:
    """Token ids of real chats: half share a system turn, lengths from 40 to several hundred tokens."""
    with gzip.open(PROBLEMS, "rt", encoding="utf-8") as f:
        problems = [json.loads(line)["prompt"] for line in f]
    chats = []
    for i in range(count):
        turns = [{"role": "user", "content": QUESTIONS[i % len(QUESTIONS)].format(problems[i])}]
        if i % 2 == 0:
            turns.insert(0, {"role": "system", "content": SYSTEM})
        chats.append(tokenizer().hf.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
    return tokenizer().encode_batch(chats)


@cache
def reference_model() -> torch.nn.Module:
    folder = find_model(str(MODEL)).weights_folder()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    return model.eval()


def oracle(count: int) -> list[list[int]]:
    """Greedy output of `generate`, the end token cut off, for each of `prompts(count)`."""
    known: dict[str, list[int]] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    outputs = []
    for prompt in prompts(count):
        key = " ".join(map(str, [MAX_TOKENS, *prompt]))
        if key not in known:
            known[key] = _generate(prompt)
            KEPT.parent.mkdir(parents=True, exist_ok=True)
            temporary = KEPT.with_suffix(".tmp")
            temporary.write_text(json.dumps(known))
            temporary.replace(KEPT)
        outputs.append(known[key])
    return outputs


def _generate(prompt: list[int]) -> list[int]:
    model = reference_model()
    ids = model.generate(  # type: ignore[operator]
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=MAX_TOKENS,
        do_sample=False,
    )[0, len(prompt) :].tolist()
    eos = model.generation_config.eos_token_id
    return ids[: ids.index(eos)] if eos in ids else ids


@torch.inference_mode()
def gap(prompt: list[int], expected: list[int], actual: list[int]) -> float:
    """At the first difference, how far apart transformers' two logits are; 0 if there is none."""
    if expected == actual:
        return 0.0
    n = next((i for i, (a, b) in enumerate(zip(expected, actual, strict=False)) if a != b), None)
    if n is None:
        return float("inf")
    logits = reference_model()(torch.tensor([prompt + expected[:n]])).logits[0, -1]
    return float((logits[expected[n]] - logits[actual[n]]).abs())
