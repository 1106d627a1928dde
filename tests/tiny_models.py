"""Tiny random models and tokenizers for tests, and the oracle: transformers' own greedy output.

Weights are drawn so that logits have a standard deviation above 1 and attention is far from
uniform: with the usual 0.02 a wrong mask would pass unnoticed.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer without merges: one token a byte, then the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def spread(model: torch.nn.Module, seed: int = 0) -> None:
    """Redraw all weights so that logits and attention scores vary strongly."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if p.dim() < 2:
                p.copy_((0.0 if name.endswith("bias") else 1.0) + 0.2 * noise)
            elif "embed" in name:
                p.copy_(noise)
            else:
                gain = 2.0 if any(k in name for k in ("q_proj", "k_proj", "lm_head")) else 1.0
                p.copy_(gain * noise / p.shape[1] ** 0.5)


_TINY = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 258,
    "pad_token_id": 256,
}


def save_tiny_llama(folder: Path, **settings: object) -> Path:
    """A two-layer Llama with grouped heads and a byte-level tokenizer."""
    return _save(AutoModelForCausalLM.from_config(LlamaConfig(**{**_TINY, **settings})), folder)


def save_tiny_classifier(folder: Path) -> Path:
    """The same with a head that says no or yes."""
    labels = {"id2label": {0: "no", 1: "yes"}, "label2id": {"no": 0, "yes": 1}}
    return _save(AutoModelForSequenceClassification.from_config(LlamaConfig(**_TINY, **labels)), folder)


def _save(model: PreTrainedModel, folder: Path) -> Path:
    spread(model)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def oracle(folder: Path, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Greedy output of transformers' `generate`, one prompt at a time, the end token cut off."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.eval()
    eos = model.generation_config.eos_token_id
    outputs = []
    for prompt in prompts:
        ids = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=max_tokens,
            do_sample=False,
        )[0, len(prompt) :].tolist()
        outputs.append(ids[: ids.index(eos)] if eos in ids else ids)
    return outputs
