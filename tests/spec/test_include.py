"""`include`: files laid over one another, each path against its own file, each fault at its own place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from job_files import SMALLEST

from batchgen.job.faults import JobFileError
from batchgen.job.load import load_job
from batchgen.job.spec.job import JobSpec
from batchgen.types import UsageError

WriteFile = Callable[[str, str], None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WriteFile:
    """Write a file in a fresh current folder: name, then text."""
    monkeypatch.chdir(tmp_path)

    def write_file(name: str, text: str) -> None:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)

    return write_file


def _faults(*overrides: str) -> list[str]:
    with pytest.raises(UsageError) as error:
        load_job("job.yaml", overrides)
    assert isinstance(error.value, JobFileError)
    return [str(fault) for fault in error.value.faults]


def _job() -> JobSpec:
    return load_job("job.yaml", ["run.grace=1s"])


def test_maps_merge_lists_replace_and_the_nearer_wins(write: WriteFile) -> None:
    write("a.yaml", "model: {path: a/a, dtype: bf16}\nsampling: {stop: [x, y], seed: 1, top_p: 0.5}\n")
    write("b.yaml", "model: b/b\nsampling: {seed: 2, min_p: 0.1}\nrun: {grace: 9s, fail_fast: true}\n")
    own = "input: i\noutput: o\nsampling: {stop: [z], min_p: null}\n"
    write("job.yaml", "include: [a.yaml, b.yaml]\n" + own)
    spec = _job()
    assert (spec.model.path, spec.model.dtype) == ("b/b", "bfloat16")
    assert (spec.sampling.stop, spec.sampling.seed, spec.sampling.top_p) == (("z",), 2, 0.5)
    assert spec.sampling.min_p is None
    assert (spec.run.grace, spec.run.fail_fast) == (1.0, True)
    assert {".".join(map(str, key)): str(spec.places[key]) for key in spec.places if len(key) == 2} == {
        "model.path": "b.yaml:1:8",
        "model.dtype": "a.yaml:1:27",
        "sampling.stop": "job.yaml:4:18",
        "sampling.seed": "b.yaml:2:18",
        "sampling.top_p": "a.yaml:2:42",
        "sampling.min_p": "job.yaml:4:30",
        "run.grace": "--set run.grace",
        "run.fail_fast": "b.yaml:3:29",
        "input.path": "job.yaml:2:8",
        "output.path": "job.yaml:3:9",
    }


def test_paths_begin_at_the_file_they_stand_in(write: WriteFile, tmp_path: Path) -> None:
    write("sub/deep/c.jinja", "from c")
    write("sub/deep/c.yaml", "prompt: {chat_template: c.jinja}\nmodel: ./m\n")
    write("sub/b.yaml", "include: deep/c.yaml\ninput: [x.jsonl, ../y.jsonl]\nmodel: {tokenizer: ./t}\n")
    write("job.yaml", "include: [sub/b.yaml]\noutput: o\n")
    spec = _job()
    assert spec.prompt.chat_template == "from c"
    assert spec.model.path == str(tmp_path / "sub" / "deep" / "m")
    assert spec.model.tokenizer == str(tmp_path / "sub" / "t")
    assert spec.input.path == (str(tmp_path / "sub" / "x.jsonl"), str(tmp_path / "y.jsonl"))
    assert spec.output.path == str(tmp_path / "o")
    assert load_job("job.yaml", ["input=z.jsonl"]).input.path == (str(tmp_path / "z.jsonl"),)


def test_every_fault_has_the_place_where_the_value_stands(write: WriteFile) -> None:
    write("sub/b.yaml", "sampling:\n  top_p: 7\n  zzz: 1\n  seed: 1\n  seed: 2\n")
    write("c.yaml", "a: [\n")
    write("job.yaml", SMALLEST + "include: [sub/b.yaml, c.yaml, gone.yaml]\nrun: {grace: soon}\n")
    assert [fault[:38] for fault in _faults()] == [
        "c.yaml:2:1: not valid YAML (while pars",
        "job.yaml:4:31: include: gone.yaml cann",
        "job.yaml:5:14: run.grace: 'soon' is no",
        "sub/b.yaml:2:10: sampling.top_p: 7 is ",
        "sub/b.yaml:3:3: sampling.zzz is not a ",
        "sub/b.yaml:5:3: the key sampling.seed ",
    ]


def test_circles_are_refused_and_name_the_chain(write: WriteFile) -> None:
    write("job.yaml", "include: a/b.yaml\n" + SMALLEST)
    write("a/b.yaml", "include: [c.yaml]\n")
    write("a/c.yaml", "include: [../a/b.yaml]\n")
    assert _faults() == [
        "a/c.yaml:1:11: include: the files include each other (a/b.yaml > a/c.yaml > a/b.yaml); "
        "remove one include"
    ]


def test_one_file_may_be_included_twice_but_not_without_end(write: WriteFile) -> None:
    write("job.yaml", "include: [a.yaml, b.yaml]\n" + SMALLEST)
    for name in "ab":
        write(f"{name}.yaml", "include: [z0.yaml]\n")
    write("z0.yaml", "sampling: {seed: 7}\n")
    assert _job().sampling.seed == 7
    for i in range(12):
        write(f"z{i}.yaml", f"include: [z{i + 1}.yaml, z{i + 1}.yaml]\n")
    write("z12.yaml", "sampling: {seed: 8}\n")
    assert any("more than 100 files" in fault for fault in _faults())


def test_a_path_from_the_environment_is_shown_as_written(
    write: WriteFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHERE", "hunter2")
    write("hunter2/b.yaml", "sampling: {top_p: 7}\n")
    write("job.yaml", 'include: "${env:WHERE}/b.yaml"\n' + SMALLEST)
    assert _faults()[0].startswith("${env:WHERE}/b.yaml:1:19: sampling.top_p: 7")


def test_include_cannot_come_from_the_command_line(write: WriteFile) -> None:
    write("job.yaml", SMALLEST)
    assert _faults("include=[b.yaml]") == [
        "--set include: include: it has no meaning on the command line; write it into a job file"
    ]


def test_what_one_file_lacks_another_may_give(write: WriteFile) -> None:
    write("base.yaml", "model: org/name\n")
    write("job.yaml", "include: base.yaml\ninput: i\n")
    assert _faults() == ["job.yaml:1:1: output is missing; add a line such as output: …"]
    assert load_job("job.yaml", ["output=o"]).model.path == "org/name"
