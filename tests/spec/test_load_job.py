"""Job files become `JobSpec`s: shorthands, defaults, units, overrides, paths, secrets, the resolved copy."""

from __future__ import annotations

from pathlib import Path

import pytest
from job_files import SMALLEST, Write

from batchgen.job.load import Override, load_job
from batchgen.job.resolved import resolved_yaml
from batchgen.job.spec.job import part_rows_auto
from batchgen.types import UsageError

FULL = Path(__file__).parent / "full_job.yaml"


def test_the_smallest_job(job_file: Write, tmp_path: Path) -> None:
    spec = load_job(job_file(SMALLEST))
    assert spec.model.path == "org/name"
    assert spec.input.path == (str(tmp_path / "prompts.jsonl"),)
    assert spec.output_folder == tmp_path / "out"
    assert (spec.version, spec.name, spec.task, spec.notes) == (1, None, "generate", ())
    assert part_rows_auto(spec) == 1000


def test_every_default_of_the_full_job_is_accepted() -> None:
    """The job file of the documentation, with every key at its documented value."""
    spec = load_job(FULL)
    assert spec.input.path[0].endswith("/data/2024-*.parquet")
    assert spec.run.grace == 20.0
    assert spec.run.min_free_disk == 1_000_000_000
    assert spec.output.columns == {"generated_text": "summary"}


def test_overrides_win_and_the_last_wins_most(job_file: Write, tmp_path: Path) -> None:
    spec = load_job(
        job_file(SMALLEST + "sampling: {temperature: 0.5, max_tokens: 9}\n"),
        [
            "sampling.temperature=1e-3",
            "sampling.temperature=0.25",
            "model=other/name",
            "model.dtype=bf16",
            "input=[a.jsonl, b.jsonl]",
            Override("input.limit", "5", "--limit"),
        ],
    )
    assert (spec.sampling.temperature, spec.sampling.max_tokens) == (0.25, 9)
    assert (spec.model.path, spec.model.dtype) == ("other/name", "bfloat16")
    assert spec.input.path == (str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"))
    assert spec.input.limit == 5


def test_units(job_file: Write) -> None:
    text = SMALLEST + (
        "run: {grace: 1m30s, max_time: 01:30:00, checkpoint_seconds: 2, max_errors: 5%}\n"
        "engine: {kv_cache_memory: 4GB}\n"
    )
    spec = load_job(job_file(text), ["run.min_free_disk=1.5GiB"])
    assert (spec.run.grace, spec.run.max_time, spec.run.checkpoint_seconds) == (90.0, 5400.0, 2.0)
    assert spec.run.min_free_disk == 3 * 2**29
    assert spec.run.max_errors == 0.05
    assert spec.engine.kv_cache_memory == 4_000_000_000


def test_a_model_is_local_if_it_looks_so_or_is_there(job_file: Write, tmp_path: Path) -> None:
    def model(path: str) -> str:
        return load_job(job_file(SMALLEST), [f"model={path}"]).model.path

    assert model("org/name") == "org/name"
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert model("org/name") == str(tmp_path / "org" / "name")
    assert model("./m") == str(tmp_path / "m")
    assert model("m.gguf") == str(tmp_path / "m.gguf")


def test_a_chat_template_is_a_file_or_itself(job_file: Write, tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text("{{ messages[0].content }}")
    from_file = load_job(job_file(SMALLEST), ["prompt.chat_template=chat.jinja"])
    inline = load_job(job_file(SMALLEST), ["prompt.chat_template={{ messages[0].content }}"])
    assert from_file.prompt.chat_template == inline.prompt.chat_template == "{{ messages[0].content }}"


@pytest.mark.parametrize(
    ("max_tokens", "rows"), [(1, 1000), (256, 1000), (1024, 256), (8192, 32), (100_000, 16)]
)
def test_parts_of_long_answers_have_fewer_rows(job_file: Write, max_tokens: int, rows: int) -> None:
    assert part_rows_auto(load_job(job_file(SMALLEST), [f"sampling.max_tokens={max_tokens}"])) == rows


def test_a_stated_part_size_is_kept(job_file: Write) -> None:
    assert part_rows_auto(load_job(job_file(SMALLEST), ["output.part_rows=7"])) == 7


@pytest.mark.parametrize("stop", [r"['\n']", r"[\n]"])
def test_a_stop_string_with_a_plain_backslash_is_noted(job_file: Write, stop: str) -> None:
    spec = load_job(job_file(SMALLEST + f"sampling:\n  stop: {stop}\n"))
    assert spec.sampling.stop == (r"\n",)
    assert spec.notes == (
        r"job.yaml:5:10: sampling.stop[0]: \n outside double quotes is a backslash and a letter; "
        r'for a line break write "\n"',
    )
    assert load_job(job_file(SMALLEST + 'sampling: {stop: ["\\n", "\\\\n"]}\n')).notes == ()


def test_the_resolved_copy_loads_as_the_same_job(job_file: Write, tmp_path: Path) -> None:
    tricky = '  user: "1e-3"\n  system: "no"\n  assistant_prefix: "a: b # c\\n{{ x }}"\n'
    spec = load_job(
        job_file(SMALLEST + "name: x\nprompt:\n" + tricky + "sampling: {stop: ['\\n', '~', '12:30']}\n")
    )
    text = resolved_yaml(spec)
    (tmp_path / "copy.yaml").write_text(text)
    again = load_job(tmp_path / "copy.yaml")
    assert resolved_yaml(again).partition("# Where")[0] == text.partition("# Where")[0]
    assert again.sampling == spec.sampling
    assert again.prompt == spec.prompt


def test_secrets_reach_neither_the_copy_nor_a_message(
    job_file: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "hunter2")
    file = job_file(SMALLEST + 'prompt: {system: "key ${env:TOKEN}"}\n')
    spec = load_job(file, ["input=${env:TOKEN}.jsonl", "input.limit=3"])
    assert spec.prompt.system == "key hunter2"
    text = resolved_yaml(spec)
    assert "hunter2" not in text
    assert "system: key ${env:TOKEN}" in text
    assert "- ${env:TOKEN}.jsonl" in text
    with pytest.raises(UsageError) as error:
        load_job(job_file(SMALLEST + 'run: {order: "${env:TOKEN}"}\nsampling: {stop: "${env:TOKEN}"}\n'))
    assert "hunter2" not in str(error.value)
    assert "'${env:TOKEN}'" in str(error.value)


def test_a_wrong_condition_is_shown_with_its_place(job_file: Write) -> None:
    file = job_file("model: m\noutput: o\ninput: {path: a.jsonl, where: n > = 3}\n")
    with pytest.raises(UsageError) as error:
        load_job(file)
    assert str(error.value) == (
        "job.yaml:3:31: input.where: expected a column, a number, a text in quotes or `(`, at character 5:\n"
        "  n > = 3\n      ^"
    )


def test_a_chat_template_may_be_the_name_of_one_of_the_tokenizers(job_file: Write, tmp_path: Path) -> None:
    """A file of that name goes before it; what looks like a path must be there."""
    assert load_job(job_file(SMALLEST), ["prompt.chat_template=tool_use"]).prompt.chat_template == "tool_use"
    (tmp_path / "tool_use").write_text("{{ 1 }}")
    assert load_job(job_file(SMALLEST), ["prompt.chat_template=tool_use"]).prompt.chat_template == "{{ 1 }}"
    with pytest.raises(UsageError, match=r"the file 'gone\.jinja' cannot be read"):
        load_job(job_file(SMALLEST), ["prompt.chat_template=gone.jinja"])
