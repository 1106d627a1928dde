"""`batchgen.map`: each promise it makes, with the fake engine in a real worker."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import Dataset, DatasetDict, IterableDataset
from fake_engine import launcher
from tiny_models import save_tokenizer

import batchgen as bg
from batchgen.api.spool import spool_stream
from batchgen.job.run_options import Launcher
from batchgen.types import DriftError, InputError, StoppedError, StorageError, UsageError

BAD = 3
ROWS = [{"id": "same", "prompt": None if i == BAD else [i, 7], "n": i} for i in range(20)]
RUN = {"progress": "none"}


class Launches:
    """Counts the workers that are started."""

    def __init__(self, behaviour: dict[str, Any] | None = None) -> None:
        self.count = 0
        self._launch: Launcher = launcher(behaviour)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self._launch(*args, **kwargs)


def write_weights(model: Path, padding: bytes) -> None:
    """A safetensors file without tensors; other padding makes it another file."""
    header = b"{}" + padding
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def call(tmp_path: Path) -> dict[str, Any]:
    model = tmp_path / "model"
    model.mkdir()
    save_tokenizer(model)
    (model / "config.json").write_text('{"model_type": "llama"}')
    write_weights(model, b"")
    return {
        "model": str(model),
        # Ids need no tokenizer, so that workers start at once.
        "prompt": {"mode": "tokens"},
        "output_column": "summary",
        "sampling": {"max_tokens": 4},
        "run": RUN,
        "launch": launcher(),
    }


def test_several_samples_are_a_list_of_answers(call: dict[str, Any]) -> None:
    call["sampling"] = {"max_tokens": 4, "n": 3, "temperature": 1.0}
    out = bg.map(Dataset.from_list(ROWS), **call)
    assert out[BAD]["summary"] is None
    assert all(len(set(row["summary"])) == 3 for row in out if row["n"] != BAD)


def test_length_order_columns_and_errors_as_data(call: dict[str, Any]) -> None:
    source = Dataset.from_list(ROWS)
    out = bg.map(source, **call)
    assert isinstance(out, Dataset)
    assert out.column_names == ["id", "prompt", "n", "summary", "summary_error"]
    assert out.select_columns(source.column_names).to_list() == ROWS
    assert out[BAD]["summary"] is None
    assert out[BAD]["summary_error"].startswith("null_prompt: ")
    good = [row for row in out if row["n"] != BAD]
    assert all(row["summary"] and row["summary_error"] is None for row in good)
    assert len({row["summary"] for row in good}) == 19


def test_rows_run_by_a_column_that_no_prompt_shows(call: dict[str, Any]) -> None:
    out = bg.map(Dataset.from_list(ROWS), **{**call, "run": {**RUN, "priority": "n", "order": "input"}})
    assert sum(row["summary"] is not None for row in out) == 19
    stream = IterableDataset.from_generator(lambda: iter(ROWS))
    found = list(bg.map(stream, **{**call, "run": {**RUN, "priority": "n"}}))
    assert [row["summary"] for row in found] == out["summary"][:]


def test_an_equal_call_computes_nothing_and_another_computes_anew(call: dict[str, Any]) -> None:
    source = Dataset.from_list(ROWS)
    launches = Launches()
    call["launch"] = launches
    first = bg.map(source, **call)
    again = bg.map(Dataset.from_list(ROWS), **call)
    assert launches.count == 1
    assert again.to_list() == first.to_list()
    # How a job is driven changes no result.
    bg.map(source, **{**call, "run": {**RUN, "workers": 2}, "engine": {"max_num_seqs": 3}})
    assert launches.count == 1
    bg.map(source, **{**call, "resume": False})
    bg.map(source, **{**call, "sampling": {"max_tokens": 5}})
    bg.map(source.select(range(5)), **call)
    assert launches.count == 4


def test_new_weights_never_get_an_old_models_answers(call: dict[str, Any], tmp_path: Path) -> None:
    launches = Launches()
    call["launch"] = launches
    source = Dataset.from_list(ROWS)
    bg.map(source, **call)
    write_weights(tmp_path / "model", b" ")
    bg.map(source, **call)
    assert launches.count == 2
    kept = {**call, "output": tmp_path / "kept"}
    bg.map(source, **kept)
    write_weights(tmp_path / "model", b"  ")
    with pytest.raises(DriftError):
        bg.map(source, **kept)


def test_a_view_of_a_data_set_is_mapped_as_it_is_seen(call: dict[str, Any]) -> None:
    source = Dataset.from_list(ROWS).shuffle(seed=1).select(range(7)).with_format("numpy")
    out = bg.map(source, **call)
    assert [int(n) for n in out["n"]] == [int(n) for n in source["n"]]
    whole = {row["n"]: row["summary"] for row in bg.map(Dataset.from_list(ROWS), **call)}
    assert len(whole) == len(ROWS)


def test_a_prompt_may_be_a_template(call: dict[str, Any]) -> None:
    out = bg.map(Dataset.from_list(ROWS), **{**call, "prompt": "Say: {{ n }}"})
    assert all(row["summary"] for row in out)


@pytest.mark.parametrize("rows", [0, 1])
def test_small_data_sets(call: dict[str, Any], rows: int) -> None:
    out = bg.map(Dataset.from_list(ROWS).select(range(rows)), **call)
    assert len(out) == rows
    assert "summary" in out.column_names


def test_splits_are_mapped_each(call: dict[str, Any]) -> None:
    source = DatasetDict({"train": Dataset.from_list(ROWS[:4]), "test": Dataset.from_list(ROWS[4:6])})
    out = bg.map(source, **call)
    assert isinstance(out, DatasetDict)
    assert {split: len(part) for split, part in out.items()} == {"train": 4, "test": 2}


def test_a_stream_is_mapped_like_a_data_set(call: dict[str, Any]) -> None:
    launches = Launches()
    call["launch"] = launches
    expected = bg.map(Dataset.from_list(ROWS), **call).to_list()
    out = bg.map(Dataset.from_list(ROWS).to_iterable_dataset(), **call)
    assert isinstance(out, IterableDataset)
    assert launches.count == 1
    assert list(out) == expected
    assert list(out.take(3)) == expected[:3]
    assert launches.count == 2


def test_a_stream_that_changes_is_refused(call: dict[str, Any]) -> None:
    times = 0

    def rows() -> Iterator[dict[str, Any]]:
        nonlocal times
        times += 1
        yield from ({"prompt": [times, i]} for i in range(3))

    out = bg.map(IterableDataset.from_generator(rows), **call)
    with pytest.raises(InputError, match="row 0 of the stream is not the row that was answered"):
        list(out)


def test_a_killed_call_goes_on_where_it_was(call: dict[str, Any], tmp_path: Path) -> None:
    """The second call only has the rows left that the first had not finished."""
    behaviour = {"tokens": 1, "step_seconds": 0.05}
    script = f"""
import os, sys, threading
import batchgen as bg
from datasets import Dataset
from fake_engine import launcher
call = { ({k: v for k, v in call.items() if k != "launch"})!r}
call["run"] = {{"progress": "none", "checkpoint_seconds": 0.1}}
source = Dataset.from_list({ROWS!r} * 40)
out = bg.map(source, launch=launcher({behaviour!r}), output={str(tmp_path / "kept")!r}, **call)
print(len(out), out[5]["summary"])
"""
    command = [sys.executable, "-c", script]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    journal = tmp_path / "kept" / "out" / ".batchgen" / "journal"
    while process.poll() is None and not any(f.stat().st_size > 200 for f in journal.glob("*.seg")):
        try:
            process.wait(0.05)
        except subprocess.TimeoutExpired:
            continue
    process.kill()
    assert process.wait() == -9
    process.communicate()
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    source = Dataset.from_list(ROWS * 40)
    whole = bg.map(
        source, **{**call, "run": {**RUN, "checkpoint_seconds": 0.1}, "launch": launcher(behaviour)}
    )
    assert done.stdout.split(maxsplit=1) == [str(len(source)), whole[5]["summary"] + "\n"]
    kept = bg.open(tmp_path / "kept" / "out")
    assert kept.status().attempts == 2
    assert kept.table(["generated_text"])["generated_text"].to_pylist() == list(whole["summary"])


def test_a_stopped_call_says_so_and_continues(call: dict[str, Any]) -> None:
    source = Dataset.from_list(ROWS)
    slow = {**call, "launch": launcher({"load_seconds": 6000}), "run": {**RUN, "max_time": 0.5, "grace": 0.2}}
    with pytest.raises(StoppedError, match="run the same call to continue"):
        bg.map(source, **slow)
    assert len(bg.map(source, **{**slow, "launch": call["launch"], "run": {**RUN, "max_time": 6000}})) == 20


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"output_column": "n"}, "already; choose another output_column"),
        ({"error_column": "n"}, "already; choose another error_column"),
        ({"prompt": "{{ promt }}"}, "no column 'promt'; did you mean 'prompt'"),
        ({"sampling": {"temperatur": 1}}, "did you mean sampling.temperature"),
        ({"input": {"limit": 3}}, "map: 'input' is not an argument"),
        ({"output_column": ""}, "map: output_column: '' is not the name of a column; give text"),
        ({"output_column": None}, "map: output_column: null is not the name of a column"),
        ({"error_column": 3}, "map: error_column: 3 is not the name of a column; give text"),
        ({"error_column": ""}, "map: error_column: '' is not the name of a column"),
        ({"error_column": "summary"}, "error_column: 'summary' is the output_column too; give another name"),
        ({"output": 3}, "map: output: 3 is not a path; give text or a pathlib.Path"),
        ({"output": ""}, "map: output: '' is a name that no file can have"),
        ({"output": "a\0b"}, "map: output: .* is a name that no file can have"),
        ({"output": "s3://bucket/x"}, "map: output: .* is not a folder of this machine"),
        ({"output": __file__}, r"map: output: .*test_map\.py is a file; give a folder"),
        ({"output": f"{__file__}/x"}, r"map: output: .*test_map\.py is a file; give a folder"),
        ({"model": 3.5}, "model"),
        ({"model": {"path": b"m"}}, r"model\.path: b'm' is of type bytes, which a job file cannot hold"),
        ({"sampling": {"stop": [{1}]}}, r"sampling\.stop\[0\]: \{1\} is of type set"),
        ({"sampling": {"logit_bias": {True: 1}}}, r"sampling\.logit_bias: true is a key and not text"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(
    call: dict[str, Any], change: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        bg.map(Dataset.from_list(ROWS), **{**call, **change})


NO_FOLDERS = ["..", ".", "", "a/b", "/tmp", "../x", "a\\b", "a\0b", "a\nb", "\ud800", "é" * 200]


@pytest.mark.parametrize("split", NO_FOLDERS, ids=range(len(NO_FOLDERS)))
def test_a_split_never_leaves_the_output_folder(call: dict[str, Any], tmp_path: Path, split: str) -> None:
    """Not even the splits before it run."""
    launches = Launches()
    source = Dataset.from_list(ROWS[:4])
    output = tmp_path / "kept" / "here"
    with pytest.raises(UsageError, match=r"map: the split .* has a name that no folder in output can have"):
        bg.map(
            DatasetDict({"train": source, split: source}), **{**call, "launch": launches, "output": output}
        )
    assert launches.count == 0
    assert not output.parent.exists()


def test_splits_with_an_output_have_folders_in_it(call: dict[str, Any], tmp_path: Path) -> None:
    source = Dataset.from_list(ROWS[:2])
    bg.map(DatasetDict({"train": source}), **{**call, "output": tmp_path / "kept"})
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["train"]
    assert not list((tmp_path / "kept" / "train").glob(".*"))
    assert len(bg.open(tmp_path / "kept" / "train" / "out")) == 2
    # What is copied is never moved between file systems: the cache may lie on another.
    assert not (tmp_path / "cache" / "map").exists()


def test_a_path_is_as_good_as_its_text(call: dict[str, Any]) -> None:
    launches = Launches()
    call["launch"] = launches
    source = Dataset.from_list(ROWS[:4])
    expected = bg.map(source, **call).to_list()
    model = Path(call["model"])
    assert bg.map(source, **{**call, "model": model}).to_list() == expected
    assert launches.count == 1
    assert len(bg.map(source, **{**call, "model": {"path": model, "tokenizer": model}})) == 4


def test_other_things_are_no_data_sets(call: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="list is not a datasets"):
        bg.map(ROWS, **call)


def test_progress_bars_of_datasets_stay_away(call: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    datasets.enable_progress_bars()
    bg.map(Dataset.from_list(ROWS), **call)
    assert "%|" not in capfd.readouterr().err


def test_a_copy_of_a_stream_that_does_not_fit_names_its_file(tmp_path: Path) -> None:
    """What the stream itself raises is not about the copy."""
    (tmp_path / "input.jsonl").symlink_to("/dev/full")
    stream = IterableDataset.from_generator(lambda: iter([{"n": 1}]))
    with pytest.raises(StorageError, match=r"input\.jsonl: cannot be written: No space left on device"):
        spool_stream(stream, ["n"], tmp_path)

    def broken() -> Iterator[dict[str, int]]:
        raise ConnectionResetError("the server is gone")
        yield {"n": 1}

    with pytest.raises(ConnectionResetError, match="the server is gone"):
        spool_stream(IterableDataset.from_generator(broken), ["n"], tmp_path / "..")
