"""What goes wrong for users, one command line each: files beside a good small job, and arguments.

Where no file is given the job is `model: ./model`, `input: prompts.jsonl`, `output: out/`, with two prompts.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe

VALIDATE, SHOW = ("validate", "job.yaml"), ("show", "job.yaml")
SECOND = (*SHOW, "--row", "1")


@dataclass(frozen=True, slots=True)
class Scenario:
    """One command line, and files written before it; `settings` become `--set` arguments.

    An error of a `row` is shown and ends nothing.
    """

    arguments: tuple[str, ...]
    settings: tuple[str, ...] = ()
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    row: bool = False

    @property
    def command(self) -> list[str]:
        """The arguments of `batchgen`."""
        return [*self.arguments, *(word for setting in self.settings for word in ("--set", setting))]


def validate(*settings: str, **files: str | bytes) -> Scenario:
    """`batchgen validate`; a file `x_jsonl` becomes `x.jsonl`."""
    return Scenario(VALIDATE, settings, _named(files))


def show(row: object, *settings: str) -> Scenario:
    """`batchgen show` of one row: a dict, or the line itself."""
    line = row if isinstance(row, str | bytes) else json.dumps(row)
    text = line if isinstance(line, bytes) else line.encode()
    return Scenario(SHOW, settings, {"prompts.jsonl": text + b'\n{"prompt": "ok"}\n'}, row=True)


def arrow(table: pa.Table) -> bytes:
    """An Arrow file."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def _named(files: Mapping[str, str | bytes]) -> dict[str, str | bytes]:
    return {".".join(name.rsplit("_", 1)): content for name, content in files.items()}


def parquet(table: pa.Table) -> bytes:
    """A Parquet file."""
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


def encrypted() -> bytes:
    """A Parquet file whose columns only a key opens."""
    factory = pe.CryptoFactory(lambda configuration: _NoSecrecy())
    keys = pe.EncryptionConfiguration(footer_key="k", column_keys={"k": ["prompt"]}, plaintext_footer=True)
    properties = factory.file_encryption_properties(pe.KmsConnectionConfig(), keys)
    sink = io.BytesIO()
    pq.write_table(pa.table({"prompt": ["a"]}), sink, encryption_properties=properties)
    return sink.getvalue()


class _NoSecrecy(pe.KmsClient):  # type: ignore[misc]
    def wrap_key(self, key_bytes: bytes, master_key_identifier: str) -> bytes:
        return key_bytes.hex().encode()

    def unwrap_key(self, wrapped_key: bytes, master_key_identifier: str) -> bytes:
        return bytes.fromhex(wrapped_key.decode())


GOOD = '{"prompt": "a"}\n'
BYTES = parquet(pa.table({"b": [b"a"]}))
PARQUET = parquet(pa.table({"prompt": ["a"]}))
UNSUPPORTED = pa.table({"prompt": ["a"], "d": pa.array([(1, 2, 3)], pa.month_day_nano_interval())})
INVALID_TEXT = pa.table({"prompt": pa.array([b"\xff", b"a"]).view(pa.string())})
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)
OWN_CODE = '{"tokenizer_class": "X", "auto_map": {"AutoTokenizer": ["c.X", null]}}'
SLOW = '{"tokenizer_class": "CanineTokenizer"}'
ASSISTANT = {"role": "assistant", "content": "x"}
# A frame whose header names dictionary 7, and one raw block.
WITH_DICTIONARY = bytes.fromhex("28b52ffd 21 07 05 290000") + b"hello"
ONLY_PLAIN = "{{ 1 / 0 if messages[0].content == 'x' else 1 }}"
MESSAGES = "prompt.messages=messages"
CUT = ("prompt.overflow=truncate_right", "model.max_model_len=40")
PRIVATE_USE = [*range(0xFDD2, 0xFDF0), *range(0xF0000, 0xFFFFE)]

PER_TURN = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ 1 / 0 }}{% endif %}{{ m.content }}{% endfor %}"
)
ONLY_WITHOUT_END = "{{ 1 / 0 if 'im_' in messages[0].content else messages[0].content }}"
NO_TOOLS = "{{ 1 / 0 if tools else messages[0].content }}"

OF_THE_JOB_FILE = [
    Scenario(("validate", "gone.yaml")),
    Scenario(("bench", "job.yaml", "--peer", "vlm")),
    Scenario(("bench", "job.yaml", "--json", "no/figures.json")),
    validate("sampling.top_p"),
    validate("prompt.user={{ gone }}"),
    validate("input.columns=[gone]"),
    validate("input.id=gone"),
    validate("prompt.mode=completion", "prompt.system=x"),
    validate("prompt.messages=prompt", "prompt.user=x"),
    validate("prompt.user={{ x"),
    validate("prompt.chat_template={% x"),
    validate("prompt.chat_template_kwargs={tools: []}"),
    validate("prompt.system=x", f"prompt.chat_template={NO_SYSTEM}"),
    validate("prompt.chat_template={{ raise_exception('never') }}"),
    validate("sampling.stop_token_ids=[9999]"),
    validate("sampling.logit_bias={9999: 1}"),
    validate("output.columns={prompt: x}"),
    validate("output.columns={generated_text: prompt}"),
    validate("output.columns={sample: x}"),
    validate("output.columns={generated_text: status}"),
    validate("output.columns={generated_text: prompt}", "input.columns=[prompt]"),
    validate("output.format=openai_batch", "output.columns={status: s}"),
    validate("prompt.mode=completion", "sampling.turns=prompt"),
    validate("prompt.user=x", "sampling.turns=prompt"),
    validate("prompt.continuation=x"),
    validate("task=loglikelihood", "prompt.mode=tokens", "prompt.continuation=x"),
    validate("task=embed", "prompt.mode=chat", "sampling.turns=prompt"),
    validate("task=embed", "output.columns={generated_text: text}"),
    validate("prompt.assistant_prefix=x", f"prompt.chat_template={PER_TURN}"),
    validate("sampling.turns=prompt", f"prompt.chat_template={PER_TURN}"),
    validate("prompt.tools=[{type: function, function: {name: f}}]", f"prompt.chat_template={NO_TOOLS}"),
    validate("output.columns={sumary: x}"),
    validate("output.columns={status: id}"),
    validate("input.columns=[prompt]", "output.columns={status: prompt}"),
    validate("prompt.tools=[3]"),
    validate("prompt.tools=[{type: function, function: {name: f}}]"),
    validate("input.where=prompt ="),
    validate("input.where=" + "x" * 100_000),
    validate("input.where=gone == 1"),
    validate("sampling.reasoning={column: status}"),
    validate("sampling.reasoning={column: prompt}"),
    validate("output.columns={status: x}", prompts_jsonl='{"prompt": "a", "x": 1}\n'),
]
OF_THE_INPUT = [
    validate("input=gone.jsonl"),
    validate('input="a\\0b"'),
    validate('model="a\\0b"'),
    validate('output="a\\0b"'),
    validate("input=gone-*.jsonl"),
    validate("input=[prompts.jsonl, ./prompts.jsonl]"),
    validate("input=[prompts.jsonl, a.parquet]", a_parquet=PARQUET),
    validate("input=a.parquet", a_parquet=PARQUET[:-8]),
    validate("input=a.parquet", a_parquet=parquet(pa.table([["a"], ["b"]], names=["prompt", "prompt"]))),
    validate("input=[a.parquet, b.parquet]", a_parquet=PARQUET, b_parquet=parquet(pa.table({"prompt": [1]}))),
    validate("input=a.jsonl.gz", **{"a.jsonl_gz": gzip.compress(GOOD.encode() * 99)[:-20]}),
    validate("input=a.jsonl.zst", **{"a.jsonl_zst": WITH_DICTIONARY}),
    validate("input=a.jsonl", a_jsonl="\n"),
    validate("input=a.jsonl", a_jsonl="<html>\n"),
    validate("input=a.bin", a_bin=b"\x00\x01\x02"),
    validate("input=a.csv", a_csv=""),
    validate("input=a.csv", a_csv="a,,c\n1,2,3\n"),
    validate("input=a.csv", a_csv="a,a\n1,2\n"),
    validate("input=a.json", a_json=""),
    validate("input=a.json", a_json='{\n"prompt": "x"\n}'),
    validate("input.format=jsonl", "input=a.parquet", a_parquet=PARQUET),
    validate("input=model"),
    validate("input=a://b"),
    validate("input.id=key", prompts_jsonl='{"prompt":"a","key":"k"}\n{"prompt":"b","key":"k"}\n'),
    validate("input=b.jsonl", b_jsonl='{"text": "a"}\n'),
    validate("input=a::b://c"),
    validate("input=hf://x"),
    validate("input=memory://gone/*.jsonl"),
    validate("input=/dev/null"),
    validate("input=a.arrow", a_arrow=b"ARROWx"),
    validate("input=a.xlsx", a_xlsx=b"PK\x03\x04" + b"\0" * 40),
    validate("input=a.json", a_json="3"),
    validate("input=a.json", a_json='[{"prompt": "a"}] x'),
    validate("input=a.csv", a_csv='"a\n1\n'),
    validate("input=a.csv", a_csv=b"a\xff,b\n1,2\n"),
    validate("input=a.csv", a_csv="x" * 2_000_000),
    validate("input=a.parquet", a_parquet=PARQUET[:4] + b"\0" * 40 + PARQUET[-8:]),
    validate("input=a.parquet", a_parquet=b"PAR1" + b"\xff" * 40 + (40).to_bytes(4, "little") + b"PAR1"),
    validate("input=a.parquet", a_parquet=PARQUET[:4] + b"\xff" * 30 + PARQUET[34:]),
    validate("input=a.parquet", a_parquet=encrypted()),
    validate("input=a.jsonl.gz", **{"a.jsonl_gz": b"\x1f\x8b\x08\0\0\0\0\0\0\3" + b"\xff" * 40}),
]
BATCH = '{"custom_id": "a", "method": "POST", "url": "/v1/%s", "body": {"messages": [], "stream": true}}\n'
CHAT = BATCH % "chat/completions"
GOOD_BATCH = CHAT.replace("true", "false")
BAD_BATCH = CHAT + GOOD_BATCH
NO_BODY = '{"custom_id": "a", "url": "/v1/chat/completions"}\n'
NO_MESSAGES = '{"custom_id": "b", "url": "/v1/chat/completions", "body": {}}\n'
STATE = {"_data_files": [{"filename": "a.arrow"}], "_indices_data_files": [{"filename": "b.arrow"}]}
OF_INPUT_FORMATS = [
    validate("input=a.csv", a_csv='"a\n'),
    validate("input=a.csv", a_csv="a\rb\r"),
    validate("input=a.csv", a_csv=b"\xff\n"),
    validate("input=a.csv", a_csv=b"x" * 1_100_000),
    validate("input=[a.csv, b.csv]", a_csv="prompt\n", b_csv="prompt,b\n"),
    validate("input=a.json", a_json="[7"),
    validate("input=a.json", a_json="7"),
    validate("input=a.json", a_json="[] []"),
    validate("input=a.json", a_json='{\n"a": 1}'),
    validate("input=a.jsonl", a_jsonl=BATCH % "embeddings"),
    validate("engine.attention=triton"),
    validate("input=a.jsonl", a_jsonl=b"\xfd7zXZ\0"),
    validate("input=a.arrow", a_arrow="{}"),
    validate("input=a.arrow", a_arrow=b"ARROW1\0\0\0\0"),
    validate("input=a.parquet", "input.format=csv", a_parquet=PARQUET),
    Scenario(VALIDATE, ("input=saved",), {"saved/state.json": "{"}),
    Scenario(VALIDATE, ("input=saved",), {"saved/state.json": json.dumps(STATE)}),
    Scenario(VALIDATE, ("input=saved",), {"saved/dataset_dict.json": '{"splits": ["train", "test"]}'}),
    validate("input=gs://bucket/a.jsonl"),
    validate("input=nothing://a"),
    validate("input=simplecache::s3://bucket/a.jsonl"),
    validate("input=memory://nowhere/a.jsonl"),
    validate("input='memory://nowhere/*.jsonl'"),
    validate("input=hf://models/x"),
    Scenario(SHOW, ("input=a.csv",), {"a.csv": "prompt\n1,2\n"}, row=True),
    Scenario(SHOW, ("input=a.csv",), {"a.csv": 'prompt\n"1"2\n'}, row=True),
    Scenario(SHOW, ("input=a.csv",), {"a.csv": b"prompt\n\xff\n"}, row=True),
    Scenario(SHOW, ("input=a.json",), {"a.json": '[,{"prompt": "x"}]'}, row=True),
    Scenario(SHOW, ("input=a.jsonl",), {"a.jsonl": BAD_BATCH}, row=True),
    show('{"prompt": NaN}', "input.strict_json=true"),
    validate("input=a.jsonl", a_jsonl=CHAT),
    Scenario(SECOND, ("input=a.jsonl",), {"a.jsonl": GOOD_BATCH + NO_BODY}, row=True),
    Scenario(SECOND, ("input=a.jsonl",), {"a.jsonl": GOOD_BATCH + NO_MESSAGES}, row=True),
    validate("input=a.csv.gz", **{"a.csv_gz": gzip.compress(b"prompt,b\n", mtime=0)[:-14]}),
    validate("input=a.parquet", "input.schema={prompt: string}", a_parquet=PARQUET),
    validate("input=a.csv", "input.schema={promt: string}", a_csv="prompt\na\n"),
    show('{"prompt": "x", "n": "many"}', "input.schema={n: int64}"),
    validate("input=a.arrow", a_arrow=arrow(UNSUPPORTED)),
    Scenario(SHOW, ("input=a.parquet",), {"a.parquet": parquet(INVALID_TEXT)}, row=True),
    validate("input.where=n / 0 > 1", prompts_jsonl='{"prompt": "a", "n": 1}\n'),
    show('{"prompt": "x", "n": "many"}', "input.where=n > 1"),
]
OF_THE_MODEL = [
    validate("model=./gone"),
    validate("model=gone.gguf"),
    validate("model=dummy:gpt-9"),
    validate("model=dummy:phi-4?layers=3"),
    validate("model=dummy:phi-4?num_hidden_layers=0"),
    validate("model=dummy:phi-4?vocab_size=9"),
    validate("model=bad.gguf", bad_gguf=b"GGUF" + b"\0" * 64),
    validate("model=org/gone"),
    validate("model=empty", **{"empty/x_txt": ""}),
    validate("model=empty", **{"empty/config_json": "{}"}),
    validate("model.revision=main"),
    validate("model=bad", **{"bad/config_json": "{}", "bad/pytorch_model_bin": b""}),
    validate("model=bad", **{"bad/config_json": "{}", "bad/model_safetensors": b"<html>"}),
    validate("model=bad", **{"bad/config_json": "{}", "bad/model_safetensors": b"\2\0\0\0\0\0\0\0{}more"}),
    validate("model=bad", **{"bad/config_json": "{}", "bad/model.safetensors.index_json": "[]"}),
    validate(
        "model=bad",
        **{
            "bad/config_json": "{}",
            "bad/model.safetensors.index_json": '{"weight_map": {"a": "m-1.safetensors"}}',
        },
    ),
    validate("model.tokenizer=empty", **{"empty/x_txt": ""}),
    validate("model.tokenizer=./gone"),
    validate(
        "model.tokenizer=own",
        **{"own/tokenizer_config_json": OWN_CODE},
    ),
    validate("model.tokenizer=slow", **{"slow/tokenizer_config_json": SLOW}),
    Scenario(SHOW, ("model=bad",), {"bad/config.json": "{}", "bad/generation_config.json": "{"}),
]
OF_THE_OUTPUT = [
    validate("output=prompts.jsonl"),
    validate("output=" + "x" * 300),
    Scenario(VALIDATE, ("input=data/part-000000.jsonl", "output=."), {"data/part-000000.jsonl": GOOD}),
    validate("run.min_free_disk=1000TB"),
    Scenario(("status", "gone")),
    Scenario(("status", "model")),
    Scenario(("init",)),
    Scenario(("run", "job.yaml"), (), {"out/manifest.json": "[]"}),
    Scenario(("run", "job.yaml"), (), {"out/data/part-000000.jsonl": "{}"}),
    Scenario(("run", "job.yaml"), ("run.metrics=nowhere:x",)),
    Scenario(("export", "gone", "--format", "csv")),
    Scenario(("retry", "gone")),
    Scenario(("report", "gone")),
    Scenario(("init", "prompts.jsonl/job.yaml")),
    Scenario(("schema", "--output", "gone/s.json")),
    Scenario(("show", "job.yaml", "--row", "9")),
    Scenario(("show", "job.yaml", "--id", "none")),
    Scenario(("run", "job.yaml"), (), {"out/manifest.json": "{"}),
    Scenario(("run", "job.yaml"), (), {"out/manifest.json": '{"format": 999, "batchgen": "9"}'}),
]
OF_A_ROW = [
    show("[1]"),
    show("{broken"),
    show(b'{"prompt": "\xff"}'),
    show('{"prompt": "\\ud83d"}'),
    show('{"prompt": 1e999}'),
    show('{"prompt": ' + "[" * 3000 + "]" * 3000 + "}"),
    show({"prompt": None}),
    show({"prompt": ""}),
    show({"prompt": 3}),
    show({"prompt": "a <|im_end|>"}, "prompt.special_tokens_in_content=error"),
    show({"messages": None}, MESSAGES),
    show({"messages": []}, MESSAGES),
    show({"messages": "[{"}, MESSAGES),
    show({"messages": [3]}, MESSAGES),
    show({"messages": [{"role": "user", "content": None}]}, MESSAGES),
    show({"messages": [{"role": "system", "content": "x"}]}, MESSAGES, "prompt.system=y"),
    show({"messages": [{"role": "user", "content": "x"}, ASSISTANT]}, "prompt.assistant_prefix=y"),
    show({"prompt": "x" * 99}, "model.max_model_len=20"),
    show({"prompt": None, "x": 1}, "prompt.user={{ prompt }}"),
    show({"prompt": ""}, "prompt.user={{ prompt }}"),
    show({"prompt": "x"}, "prompt.user={{ prompt.y.z }}"),
    show({"prompt": "x"}, "prompt.user={{ 1 / 0 }}{{ prompt }}"),
    show(
        {"prompt": "x"},
        "prompt.chat_template={{ messages[0].content / 0 if messages[0].content == 'x' else 1 }}",
    ),
    show({"prompt_token_ids": ["x"]}, "prompt.mode=tokens"),
    show({"prompt_token_ids": []}, "prompt.mode=tokens"),
    show({"prompt": "x", "p": {"temperature": -1}}, "sampling.per_row=p"),
    show({"prompt": "x", "p": {"n": 2}}, "sampling.per_row=p", "sampling.temperature=1"),
    show({"prompt": "x", "t": "[{"}, "prompt.tools=t"),
    show({"prompt": "x", "t": [3]}, "prompt.tools=t"),
    show({"prompt": "x", "u": None}, "sampling.turns=u", "prompt.system=x"),
    show({"prompt": "x", "u": []}, "sampling.turns=u"),
    show({"prompt": "x", "u": [None]}, "sampling.turns=u"),
    show({"prompt": "x", "u": [""]}, "sampling.turns=u"),
    show({"a": 1}),
    show({"prompt": "x", "s": float("nan")}, "prompt.user={{ prompt }} {{ s }}"),
    show({"messages": None, "prompt": "x"}, MESSAGES),
    show({"prompt": "x", "w": 3}, "input.where=w"),
    show('{"prompt": "x", "prompt": "y"}', "input.strict_json=true"),
    Scenario(
        SECOND,
        ("sampling.turns=u", "prompt.system=x"),
        {"prompts.jsonl": '{"u": ["a"]}\n{"prompt": "x"}\n'},
        row=True,
    ),
    show('{"prompt": NaN}', "prompt.mode=completion"),
    show({"messages": None, "a": 1}, MESSAGES, "prompt.system=x"),
    show({"messages": "null"}, MESSAGES),
    show(
        {"messages": [{"role": "system", "content": "x"}, ASSISTANT]},
        MESSAGES,
        "prompt.system_fallback=prepend_to_user",
        f"prompt.chat_template={NO_SYSTEM}",
    ),
    show({"prompt": "x"}, """prompt.user={{ prompt }}{{ "\\ud83d" }}"""),
    show({"prompt": "<|im_end|>"}, f"prompt.chat_template={ONLY_WITHOUT_END}"),
    Scenario(SHOW, ("input=a.parquet", "prompt.user={{ b }}"), {"a.parquet": BYTES}, row=True),
    show({"prompt": "x", "b": 1}, "prompt.user=" + "x" * 99 + "{{ prompt }}", *CUT),
    show({"prompt": "<|im_end|>" + "".join(map(chr, PRIVATE_USE))}),
    show({"prompt": "x"}, "prompt.user={{ prompt * 100000000 }}"),
    show({"prompt": "{{ x"}, "prompt.user={% for i in range(9999999) %}{{ prompt }}{% endfor %}"),
]
ALL = [*OF_THE_JOB_FILE, *OF_THE_INPUT, *OF_INPUT_FORMATS, *OF_THE_MODEL, *OF_THE_OUTPUT, *OF_A_ROW]
