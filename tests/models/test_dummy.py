"""Models of known shapes with weights of noise: published sizes, bits of a seed, text and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import batchgen as bg
from batchgen.cli.main import main
from batchgen.models.dummy import SEED, folder
from batchgen.models.dummy_shapes import SHAPES
from batchgen.models.loader import LoadedModel, load_model
from batchgen.models.source import find_model, find_tokenizer
from batchgen.text.tokenizer import Tokenizer
from batchgen.types import Task, UsageError

RENAMED = {"rope_theta", "rope_scaling", "rope_local_base_freq", "num_experts"}
"""By transformers, when it reads a configuration."""
TINY = "hidden_size=64&intermediate_size=96&num_attention_heads=4&num_key_value_heads=2&vocab_size=400"
LLAMA = f"dummy:llama-3.1-8b?num_hidden_layers=2&head_dim=16&{TINY}"
MORE = {
    "mixtral-8x7b": "num_local_experts=4&",
    "qwen3-30b-a3b": "num_experts=8&num_experts_per_tok=2&moe_intermediate_size=32&",
    "gpt-oss-20b": "num_local_experts=4&",
    "gemma3-27b": "sliding_window=8&query_pre_attn_scalar=16&",
}
PARAMETERS = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "smollm2-135m": 134_515_008,
    "mistral-7b": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "gemma2-9b": 9_241_705_984,
    "gemma3-1b": 999_885_952,
    "phi-4": 14_659_507_200,
    "gpt-oss-20b": 20_914_757_184,
}
"""As the models' pages say."""


def tiny(name: str) -> str:
    # Phi takes its head size from the others.
    head = "" if name == "phi-4" else "head_dim=16&"
    return f"dummy:{name}?num_hidden_layers=2&{head}{MORE.get(name, '')}{TINY}"


def load(path: str, dtype: str = "float32", task: Task = Task.GENERATE) -> LoadedModel:
    return load_model(find_model(path).weights_folder(), dtype, task=task)


@pytest.mark.parametrize("name", SHAPES)
def test_sizes_are_the_published_ones(name: str) -> None:
    config = AutoConfig.from_pretrained(folder(f"dummy:{name}"))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert type(model).__name__ == SHAPES[name]["architectures"][0]
    count = sum(p.numel() for p in model.parameters())
    if name in PARAMETERS:
        assert count == PARAMETERS[name]
    else:
        assert 26.9e9 < count < 27.1e9
    # What the configuration does not know would have no effect.
    known = {*config.to_dict(), *RENAMED}
    assert SHAPES[name].keys() <= known


@pytest.mark.parametrize("name", SHAPES)
def test_logits_are_spread_and_finite_in_bfloat16(name: str) -> None:
    loaded = load(tiny(name), "bfloat16")
    model: Any = loaded.model
    model.set_attn_implementation("eager")
    ids = torch.arange(3, 63).view(1, -1)
    with torch.inference_mode():
        logits = model(input_ids=ids).logits.float()
    assert logits.isfinite().all()
    assert logits.std(-1).min() > 1
    assert logits.argmax(-1).unique().numel() > 20
    assert loaded.eos_token_ids == (1,)
    assert all(not buffer.isnan().any() for buffer in model.buffers())


def test_weights_are_of_the_seed_and_the_name() -> None:
    first, again, other = (load(LLAMA + end).model.state_dict() for end in ("", "", "&seed=1"))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    deeper = load(LLAMA.replace("layers=2", "layers=3")).model.state_dict()
    assert all(torch.equal(first[name], deeper[name]) for name in first)
    half = load(LLAMA, "bfloat16").model.state_dict()
    assert half["lm_head.weight"].dtype == torch.bfloat16
    # Numbers of the configuration are not those of a moment: frequencies stay in float32.
    assert load(LLAMA, "bfloat16").model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_files_are_its_configuration_alone() -> None:
    source = find_model(LLAMA)
    source.check_weights()
    assert [file.name for file in source.weight_files()] == ["config.json"]
    assert json.loads(source.weight_files()[0].read_text())[SEED] == 0
    assert find_model(LLAMA).folder == source.folder
    assert find_model(LLAMA + "&seed=1").folder != source.folder
    assert find_tokenizer(LLAMA).tokenizer_folder() == source.folder
    with pytest.raises(UsageError, match=r"^model\.revision: dummy:.* is local and has no revisions"):
        find_model(LLAMA, "main")


def test_text_is_bytes_and_words() -> None:
    tokenizer = Tokenizer.load(str(folder(LLAMA)))
    assert tokenizer.vocab_size == 400
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    words = list(range(259, 400))
    assert tokenizer.encode_batch([tokenizer.decode(words)]) == [words]
    for text in ("a line\nwith ☃ and \0", " a b ab zz", "  two  spaces"):
        [ids] = tokenizer.encode_batch([text])
        assert tokenizer.decode(ids) == text
        assert max(ids) < 400


def test_an_engine_of_one() -> None:
    llm = bg.LLM(LLAMA, max_model_len=64, kv_cache_memory=1 << 20)
    prompts = [[5, 300, 301], list(range(259, 290))]
    sampling = bg.SamplingParams(max_tokens=8, ignore_eos=True)
    got = [list(output.token_ids) for output in llm.generate(prompts, sampling)]
    model: Any = load(LLAMA).model
    model.set_attn_implementation("eager")
    for prompt, tokens in zip(prompts, got, strict=True):
        ids = torch.tensor([prompt])
        whole = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, eos_token_id=-1
        )
        assert whole[0, len(prompt) :].tolist() == tokens
    [chat] = llm.chat([[{"role": "user", "content": "hi"}]], bg.SamplingParams(max_tokens=2))
    assert chat.error is None


def test_a_job_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text('{"prompt": "a b"}\n{"prompt": "c d"}\n')
    Path("job.yaml").write_text(
        f"model: {{path: '{LLAMA}', max_model_len: 64}}\n"
        "input: in.jsonl\noutput: {path: out, format: jsonl, compression: none}\n"
        "prompt: {mode: completion}\nsampling: {max_tokens: 4, ignore_eos: true}\n"
        "engine: {kv_cache_memory: 1MB}\n"
    )
    assert main(["validate", "job.yaml"]) == 0
    assert main(["run", "job.yaml"]) == 0
    rows = [
        json.loads(line)
        for part in sorted(Path("out/data").iterdir())
        for line in part.read_text().splitlines()
    ]
    assert [row["status"] for row in rows] == ["ok", "ok"]
    # Other weights are another result.
    assert main(["run", "job.yaml", "--set", f"model.path={LLAMA}&seed=2"]) == 4


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("dummy:llama-9", r"names no shape that is known here; use dummy: and one of llama-3\.1-8b, "),
        ("dummy:", r"names no shape"),
        (LLAMA + "&layers=3", r"layers is no number of this configuration; use seed, head_dim"),
        (LLAMA + "&rope_scaling=3", r"rope_scaling is no number"),
        (LLAMA + "&tie_word_embeddings=1", r"tie_word_embeddings is no number"),
        ("dummy:phi-4?num_hidden_layers=two", r"num_hidden_layers is 'two'; use a whole number above 0"),
        ("dummy:phi-4?num_hidden_layers=0", r"use a whole number above 0"),
        ("dummy:phi-4?rope_theta=inf", r"rope_theta is 'inf'; use a number above 0"),
        ("dummy:phi-4?seed=-1", r"seed is '-1'; use a whole number of 0 or more"),
        ("dummy:phi-4?vocab_size=100", r"vocab_size is 100; use 259, which has every byte, to 1048576"),
    ],
)
def test_names_that_are_none(path: str, said: str) -> None:
    with pytest.raises(UsageError, match=r"^model\.path: 'dummy:.*" + said):
        find_model(path)


def test_numbers_that_do_not_fit_together() -> None:
    with pytest.raises(UsageError, match=r"^model\.path: .* has no usable configuration \(.*head_dim"):
        load(LLAMA.replace("head_dim=16", "head_dim=7"))


def test_weights_that_no_memory_holds() -> None:
    wide = LLAMA.replace("intermediate_size=96", f"intermediate_size={10**12}")
    with pytest.raises(
        UsageError, match=r"^model\.path: no weights can be made for .*config\.json \(.*smaller"
    ):
        load(wide)
