"""`batchgen validate`: each fault by its sentence and exit code, all of them at once, no weights."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from batchgen.cli.main import main
from batchgen.types import UsageError

Write = Callable[..., str]
Captured = pytest.CaptureFixture[str]
NO_SYSTEM = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"


def test_a_good_job(write_job: Write, capsys: Captured) -> None:
    assert main(["validate", write_job()]) == 0
    assert capsys.readouterr().err == "valid: nothing found that would stop this job\n"
    assert not Path("out").exists()


def test_the_answer_as_json(write_job: Write, capsys: Captured) -> None:
    assert main(["validate", write_job(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "ok": True,
        "exit_code": 0,
        "faults": [],
        "notes": [],
        "rows_read": 2,
        "bad_rows": 0,
        "columns": ["prompt"],
    }


def test_faults_of_different_kinds_come_together(write_job: Write, capsys: Captured) -> None:
    job = write_job('prompt: {user: "{{ body }}"}\nsampling: {stop_token_ids: [999]}\n')
    arguments = ["validate", job, "--json", "--set", "output.path=job.yaml", "--set", "input.columns=[gone]"]
    assert main(arguments) == 2
    faults = json.loads(capsys.readouterr().out)["faults"]
    assert [fault["message"].split(":")[0] for fault in faults] == [
        "prompt.user",
        "input.columns",
        "output.path",
    ]
    assert {fault["exit_code"] for fault in faults} == {2}


def test_every_fault_of_the_file_is_an_entry(write_job: Write, capsys: Captured) -> None:
    assert main(["validate", write_job("sampling: {structured: 2, top_p: 3}\n"), "--json"]) == 2
    messages = [fault["message"] for fault in json.loads(capsys.readouterr().out)["faults"]]
    assert [message[:15] for message in messages] == ["sampling.struct", "sampling.top_p:"]


def test_faults_of_the_file_do_not_hide_those_of_the_world(write_job: Write, capsys: Captured) -> None:
    """Everything that is wrong in one pass, and nothing that only follows from something else."""
    Path(write_job()).write_text(
        "model: {path: ./gone, dtype: int3}\n"
        "input: {path: gone.jsonl, limit: 0}\n"
        "output: {path: job.yaml, part_rows: 0}\n"
        "sampling: {top_p: 7, min_tokens: 300, max_tokens: x}\n"
        "run: {grace: soon}\n"
    )
    assert main(["validate", "job.yaml", "--json"]) == 2
    faults = json.loads(capsys.readouterr().out)["faults"]
    assert [(fault["line"], fault["key"], fault["exit_code"]) for fault in faults] == [
        (1, "model.dtype", 2),
        (2, "input.limit", 2),
        (3, "output.part_rows", 2),
        (4, "sampling.top_p", 2),
        (4, "sampling.max_tokens", 2),
        (5, "run.grace", 2),
        (2, "input.path", 3),
        (1, "model.path", 2),
        (3, "output.path", 2),
    ]


@pytest.mark.parametrize(
    ("extra", "keys"),
    [
        ("prompt: {usr: x}\n", ["prompt.usr"]),
        ("prompt: {mode: talk, user: '{{ gone }}'}\n", ["prompt.mode"]),
        ("sampling: {seed: -1}\nprompt: {user: '{{ gone }}'}\n", ["sampling.seed", "prompt.user"]),
        ("name: a b\n", ["name"]),
        ("zzz: 1\n", ["zzz"]),
    ],
)
def test_a_fault_brings_no_others_with_it(
    write_job: Write, capsys: Captured, extra: str, keys: list[str]
) -> None:
    assert main(["validate", write_job(extra), "--json"]) == 2
    assert [fault["key"] for fault in json.loads(capsys.readouterr().out)["faults"]] == keys


def test_a_job_without_its_sections(write_job: Write, capsys: Captured) -> None:
    Path(write_job()).write_text("model: {dtype: bf16}\nsampling: 3\n")
    assert main(["validate", "job.yaml", "--json"]) == 2
    faults = json.loads(capsys.readouterr().out)["faults"]
    assert [fault["key"] for fault in faults] == ["input", "output", "model", "sampling"]


def test_a_fault_for_a_program(write_job: Write, capsys: Captured) -> None:
    job = write_job("sampling: {seed: -1}\n")
    assert main(["validate", job, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["faults"] == [
        {
            "exit_code": 2,
            "file": "job.yaml",
            "line": 4,
            "column": 18,
            "key": "sampling.seed",
            "message": "sampling.seed: -1 is not allowed; use a whole number from 0 to 2**63 - 1",
            "remedy": "use a whole number from 0 to 2**63 - 1",
        }
    ]
    job = write_job()
    assert (
        main(["validate", job, "--json", "--set", "prompt.user={{ gone }}", "--set", "output=job.yaml"]) == 2
    )
    prompt, output = json.loads(capsys.readouterr().out)["faults"]
    assert (prompt["file"], prompt["line"], prompt["key"]) == ("--set prompt.user", None, "prompt.user")
    assert output["remedy"] == "give a folder"


def test_a_fault_of_the_world_names_the_line_of_its_key(write_job: Write, capsys: Captured) -> None:
    job = write_job()
    Path("prompts.jsonl").unlink()
    assert main(["validate", job]) == 3
    assert "batchgen: job.yaml:2:8: input.path: " in capsys.readouterr().err
    assert main(["run", job]) == 3
    assert "batchgen: job.yaml:2:8: input.path: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "code", "said"),
    [
        ("input=gone.jsonl", 3, "gone.jsonl"),
        ("prompt.messages=chat", 2, "prompt.messages: the input has no column 'chat'"),
        ("input.id=key", 2, "input.id"),
        ("model=./gone", 2, "model.path"),
        (
            "sampling.stop_token_ids=[5, 100000]",
            2,
            "sampling.stop_token_ids: 100000 is not a token id of this",
        ),
        ("output.path=prompts.jsonl/x", 2, "prompts.jsonl is a file; give a folder"),
        ("run.min_free_disk=1000TB", 5, "free some space or lower run.min_free_disk"),
    ],
)
def test_one_fault(write_job: Write, capsys: Captured, setting: str, code: int, said: str) -> None:
    job = write_job(rows='{"prompt": "hi"}\n')
    if setting.startswith("input.id"):
        pq.write_table(pa.table({"prompt": ["a"]}), "a.parquet")
        assert main(["validate", job, "--set", "input=a.parquet", "--set", setting]) == code
    else:
        assert main(["validate", job, "--set", setting]) == code
    assert said in capsys.readouterr().err


def test_no_permission_on_the_parent_of_the_output(
    write_job: Write, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "locked")
    job = write_job()
    Path("locked").mkdir()
    assert main(["validate", job, "--set", "output.path=locked/deep/out"]) == 5
    assert "no permission to write in" in capsys.readouterr().err


def test_ids_that_occur_twice_are_named_by_line(write_job: Write, capsys: Captured) -> None:
    rows = "".join(json.dumps({"prompt": "x", "key": key}) + "\n" for key in ("a", "b", "a"))
    assert main(["validate", write_job(rows=rows), "--set", "input.id=key"]) == 2
    assert "id 'a' is at prompts.jsonl line 1 and at prompts.jsonl line 3" in capsys.readouterr().err


def test_rows_that_cannot_be_read_are_a_note(write_job: Write, capsys: Captured) -> None:
    assert main(["validate", write_job(rows='{"prompt": "a"}\n{broken\n')]) == 0
    said = capsys.readouterr().err
    assert (
        "note: 1 of the first 2 rows cannot be read and each becomes an error row; prompts.jsonl line 2: not"
        in said
    )


@pytest.mark.parametrize("setting", ["input.on_bad_row=stop", "run.fail_fast=true"])
def test_rows_that_would_stop_the_job_are_exit_3(write_job: Write, capsys: Captured, setting: str) -> None:
    job = write_job(rows='{"prompt": "a"}\n{broken\n')
    assert main(["validate", job, "--set", setting]) == 3
    assert "rows cannot be read and" in (said := capsys.readouterr().err)
    assert said.count("prompts.jsonl line 2") == 1


def test_an_openai_batch_of_which_no_first_line_can_be_read(write_job: Write, capsys: Captured) -> None:
    line = '{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"stream": true}}\n'
    assert main(["validate", write_job(rows=line)]) == 3
    said = capsys.readouterr().err
    assert "none of the first rows can be read" in said
    assert "prompts.jsonl line 1: " in said
    assert "sampling" not in said


def test_corrupt_input_is_exit_3(write_job: Write, capsys: Captured) -> None:
    job = write_job()
    pq.write_table(pa.table({"prompt": ["a"]}), "a.parquet")
    Path("a.parquet").write_bytes(Path("a.parquet").read_bytes()[:-8])
    assert main(["validate", job, "--set", "input=a.parquet"]) == 3
    assert "a.parquet" in capsys.readouterr().err
    Path("b.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "a"}\n' * 9)[:-20])
    assert main(["validate", job, "--set", "input=b.jsonl.gz"]) == 3
    # Once, although several checks read it.
    assert capsys.readouterr().err.count("b.jsonl.gz") == 1


def test_a_template_without_a_system_turn(write_job: Write, capsys: Captured) -> None:
    job = write_job("prompt: {system: Be brief}\n")
    Path("no_system.jinja").write_text(NO_SYSTEM + "{{ m.content }}{% endfor %}")
    arguments = ["validate", job, "--set", "prompt.chat_template=no_system.jinja"]
    assert main(arguments) == 2
    assert "prompt.system_fallback: prepend_to_user" in capsys.readouterr().err
    assert main([*arguments, "--set", "prompt.system_fallback=prepend_to_user"]) == 0


def test_a_base_model_has_no_chat_template(
    write_job: Write, tokenizer_folder: Path, capsys: Captured
) -> None:
    job = write_job()
    Path("base").mkdir()
    for file in tokenizer_folder.iterdir():
        if not file.name.startswith("chat_template"):
            (Path("base") / file.name).write_bytes(file.read_bytes())
    assert main(["validate", job, "--set", "model=base"]) == 2
    assert "prompt.mode: completion" in capsys.readouterr().err
    assert main(["validate", job, "--set", "model=base", "--set", "prompt.mode=completion"]) == 0


def test_the_first_rows_are_tried(write_job: Write, capsys: Captured) -> None:
    job = write_job("sampling: {per_row: s}\n", rows='{"prompt": "hi", "s": {"x": 1}}\n{"prompt": null}\n')
    assert main(["validate", job]) == 0
    assert (
        "note: 2 of the first 2 rows cannot run and each becomes a row with status error; "
        "prompts.jsonl line 1: invalid_param: column 's': 'x' is not a known key"
    ) in capsys.readouterr().err


def test_everything_the_template_refuses_is_said_at_once(write_job: Write, capsys: Captured) -> None:
    silent = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    job = write_job(
        f'prompt: {{chat_template: "{silent}", system: S, assistant_prefix: A, tools: [{{a: 1}}]}}\n'
    )
    assert main(["validate", job]) == 2
    said = capsys.readouterr().err
    for setting in ("system", "assistant_prefix", "tools"):
        assert f"prompt.{setting}: the chat template" in said


@pytest.mark.parametrize(
    ("config", "setting", "key", "said"),
    [
        ({"model_type": "bloom"}, "", "model.path", "adds ALiBi distances to its scores"),
        ({"model_type": "mamba"}, "", "model.path", "keeps a recurrent state"),
        ({"model_type": "deepseek_v32"}, "", "model.path", "keys that an indexer chooses (sparse attention)"),
        ({"model_type": "t5"}, "", "model.path", "is an encoder-decoder (cross attention)"),
        ({}, "", "model.path", "has no usable configuration"),
        ({"architectures": ["LlamaForCausalLM"]}, "classify", "task", "needs a head for classes"),
    ],
    ids=["alibi", "recurrent", "sparse", "cross", "none", "no-classes"],
)
def test_a_model_that_can_never_run(
    write_job: Write, capsys: Captured, config: dict[str, object], setting: str, key: str, said: str
) -> None:
    """With the sentence that a run would end with, and beside the other faults."""
    job = write_job(f"task: {setting}\n" if setting else "")
    shutil.copytree("model", "other")
    if setting:
        config = {"model_type": "llama", **config}
    Path("other/config.json").write_text(json.dumps(config))
    settings = ["--set", "model=other", "--set", "run.priority=gone"]
    assert main(["validate", job, "--json", *settings]) == 2
    faults = json.loads(capsys.readouterr().out)["faults"]
    assert [fault["key"] for fault in faults] == ["run.priority", key]
    assert said in faults[1]["message"]
    assert main(["run", job, *settings[:2]]) == 2
    assert faults[1]["message"] in capsys.readouterr().err
    assert not Path("out").exists()


def test_products_in_int8_are_for_float32(write_job: Write, capsys: Captured) -> None:
    job = write_job("engine: {kv_cache_dtype: int8}\n")
    assert main(["validate", job, "--json", "--set", "model.quantization=int8"]) == 0
    settings = ("--set", "model.quantization=int8", "--set", "model.dtype=bf16")
    assert main(["validate", job, *settings]) == 2
    assert (
        "model.quantization: int8 is for a model in float32 on a processor, not in bfloat16; use "
        "model.dtype: float32 and engine.device: cpu, or leave model.quantization out"
    ) in capsys.readouterr().err
    assert main(["validate", job, "--set", "model.quantization=int4"]) == 2
    assert "model.quantization" in capsys.readouterr().err


def test_what_keys_and_values_cannot_be_stored_as(write_job: Write, capsys: Captured) -> None:
    job = write_job("engine: {kv_cache_dtype: fp32}\n")
    assert main(["validate", job, "--json"]) == 0
    assert main(["validate", job, "--set", "model.dtype=bf16"]) == 2
    assert (
        "batchgen: job.yaml:4:26: engine.kv_cache_dtype: float32 is not for a model in bfloat16, whose keys "
        "and values can be stored as bfloat16 or int8 or fp8; use one of them, or auto"
    ) in capsys.readouterr().err


def test_an_attention_backend_of_another_device(write_job: Write, capsys: Captured) -> None:
    job = write_job("engine: {attention: triton}\n")
    assert main(["validate", job]) == 2
    assert capsys.readouterr().err.startswith(
        "batchgen: job.yaml:4:21: engine.attention: the triton attention backend runs on cuda, not on cpu; "
        "use 'auto' or another backend"
    )
    assert main(["validate", job, "--set", "engine.attention=reference"]) == 0


ON_PROCESSORS = {
    "cuda_graphs: true": (
        "cuda_graphs",
        "engine.cuda_graphs: true asks that steps are captured, and on cpu none are; use auto, or a GPU "
        "with engine.device: cuda",
    ),
    "attention: triton": (
        "attention",
        "engine.attention: the triton attention backend runs on cuda, not on cpu; use 'auto' or another "
        "backend",
    ),
    "attention: cpu, kv_cache_dtype: fp8": (
        "attention",
        "engine.attention: the cpu attention backend stores keys and values as bfloat16 or float16 or "
        "float32 or int8, not as fp8; use 'auto' or another backend",
    ),
}


@pytest.mark.parametrize("engine", ON_PROCESSORS)
def test_what_only_gpus_do_is_refused_on_a_processor(engine: str, write_job: Write, capsys: Captured) -> None:
    job = write_job(f"engine: {{device: cpu, {engine}}}\n")
    key, message = ON_PROCESSORS[engine]
    assert main(["validate", job, "--json"]) == 2
    (fault,) = json.loads(capsys.readouterr().out)["faults"]
    assert (fault["key"], fault["message"].partition("engine.")[2]) == (
        f"engine.{key}",
        message.removeprefix("engine."),
    )
    for verb in ("plan", "run"):
        assert main([verb, job]) == 2
        said = capsys.readouterr()
        assert message in said.out + said.err
    assert not Path("out").exists()


def test_fp8_on_a_processor_is_for_the_reference(write_job: Write, capsys: Captured) -> None:
    job = write_job("engine: {device: cpu, kv_cache_dtype: fp8}\n")
    for attention in ("auto", "reference"):
        assert main(["validate", job, "--set", f"engine.attention={attention}"]) == 0


def test_products_in_int8_are_not_for_a_gpu(write_job: Write, capsys: Captured) -> None:
    job = write_job("engine: {device: cuda}\n")
    settings = ("--set", "model.quantization=int8", "--set", "model.dtype=float32")
    assert main(["validate", job, *settings]) == 2
    assert (
        "model.quantization: int8 is for a model in float32 on a processor, not on cuda; use model.dtype: "
        "float32 and engine.device: cpu, or leave model.quantization out"
    ) in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_where_there_is_none(write_job: Write, capsys: Captured) -> None:
    job = write_job("engine: {device: cuda}\n")
    for verb in ("validate", "run"):
        assert main([verb, job]) == 2
        assert capsys.readouterr().err.startswith(
            "batchgen: job.yaml:4:18: engine.device: cuda cannot be had here: torch "
        )
    assert main(["plan", job, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bits"]["dtype"] == "bfloat16"


def test_a_pooling_that_is_not_there(write_job: Write, capsys: Captured) -> None:
    job = write_job("task: embed\nembedding: {pooling: auto}\n")
    shutil.copytree("model", "other")
    Path("other/modules.json").write_text('[{"type": "sentence_transformers.models.Dense", "path": "2"}]')
    assert main(["validate", job, "--set", "model=other", "--json"]) == 2
    (fault,) = json.loads(capsys.readouterr().out)["faults"]
    assert fault["key"] == "embedding.pooling"
    assert main(["validate", job, "--set", "model=other", "--set", "embedding.pooling=mean"]) == 0


def test_a_fault_is_said_once(write_job: Write, capsys: Captured) -> None:
    """Also one that both the job file's reader and the input's would find."""
    assert main(["validate", write_job(), "--set", "input.where=prompt ="]) == 2
    assert capsys.readouterr().err.count("expected a column") == 1


def test_an_output_in_no_bucket_is_refused(write_job: Write, capsys: Captured) -> None:
    assert main(["validate", write_job(), "--set", "output.path=s3:///results"]) == 2
    assert "names no bucket; write one, such as s3://bucket/results" in capsys.readouterr().err


def test_what_is_known_at_once_is_said_before_the_tokenizer_is_loaded(
    write_job: Write, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def load(source: object) -> None:
        said.append(capsys.readouterr().err)
        raise UsageError("model.tokenizer: none")

    monkeypatch.setattr("batchgen.api.job_model.load_tokenizer", load)
    assert main(["validate", write_job(), "--set", "output.path=job.yaml"]) == 2
    [before], after = said, capsys.readouterr().err
    assert "output.path" in before
    assert "output.path" not in after
    assert "model.tokenizer: none" in after
