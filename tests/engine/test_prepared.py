"""Starts that go on from what an earlier one has kept: the same bits, and only while nothing has changed."""

from __future__ import annotations

import errno
import gc
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import run as run_all
from tiny_models import save_tiny_llama
from transformers import AutoModelForCausalLM, GraniteConfig, Qwen3Config

from batchgen.cache import cache_dir
from batchgen.engine import build, prepared
from batchgen.engine.build import Engine, build_engine
from batchgen.engine.config import EngineConfig
from batchgen.models import tensor_file
from batchgen.models.prepared import PreparedModel
from batchgen.types import SamplingParams

PROMPTS = [[1, 2, 3], list(range(40)), [7] * 17, [250, 1]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, logprobs=3)
DRAWN = SamplingParams(temperature=1.0, max_tokens=9, seed=3)
SETTINGS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 8, "kv_cache_memory": 1 << 22}


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What is compiled is kept where it always is.
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(cache_dir() / "numba"))
    monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(prepared, "LEAST_BYTES", 0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny_llama(tmp_path / "model")


Open = Callable[..., Engine]


@pytest.fixture
def engine(folder: Path) -> Iterator[Open]:
    """Builds engines, and closes them."""
    opened: list[Engine] = []

    def build(place: Path = folder, **settings: Any) -> Engine:
        opened.append(build_engine(EngineConfig(model=str(place), **{**SETTINGS, **settings})))
        return opened[-1]

    yield build
    for each in opened:
        each.core.close()


def run(engine: Engine, prompts: list[list[int]], sampling: SamplingParams) -> list[Any]:
    """Tokens, texts and logarithms of probabilities."""
    return [output.samples for output in run_all(engine, prompts, sampling)]


def is_from_cache(engine: Engine) -> bool:
    return isinstance(engine.loaded, PreparedModel)


def packed(tmp_path: Path) -> Path:
    [file] = (tmp_path / "cache" / prepared.WEIGHTS).glob("*.tensors")
    return file


def qwen(folder: Path) -> Path:
    """With norms of queries and keys, and an embedding that is the head too."""
    save_tiny_llama(folder)
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=259,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=258,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("make", [save_tiny_llama, qwen])
@pytest.mark.parametrize(
    "settings", [{}, {"kv_cache_dtype": "int8"}, {"quantization": "int8"}], ids=["float32", "kv", "products"]
)
def test_the_second_start_computes_the_same_bits(
    tmp_path: Path, engine: Open, make: Callable[[Path], Path], settings: dict[str, str]
) -> None:
    place = make(tmp_path / "other")
    first, second = engine(place, **settings), engine(place, **settings)
    assert (is_from_cache(first), is_from_cache(second)) == (False, True)
    for sampling in (GREEDY, DRAWN):
        assert run(second, PROMPTS, sampling) == run(first, PROMPTS, sampling)
    assert (second.facts, second.pinned) == (first.facts, first.pinned)
    assert second.loaded.generation == first.loaded.generation
    assert second.core.eos_token_ids == first.core.eos_token_ids


def test_the_second_start_needs_no_transformers(folder: Path, engine: Open) -> None:
    engine()
    code = (
        "import sys\n"
        "from batchgen.engine import build, config, prepared\n"
        "prepared.LEAST_BYTES = 0\n"
        f"build.build_engine(config.EngineConfig(model={str(folder)!r}, **{SETTINGS!r}))\n"
        "print([m for m in ('transformers', 'datasets', 'pandas', 'pyarrow') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_embeddings_have_no_head(engine: Open) -> None:
    first, second = engine(task="embed"), engine(task="embed")
    assert (is_from_cache(first), is_from_cache(second)) == (False, True)
    with pytest.raises(TypeError, match="head"):
        second.core.runner.head(torch.zeros(1, 64))


@pytest.mark.parametrize(
    "change",
    [
        {"max_num_seqs": 9},
        {"max_num_batched_tokens": 256},
        {"block_size": 32},
        {"kv_cache_dtype": "int8"},
        {"quantization": "int8"},
        {"deterministic": False},
        {"num_threads": 1},
        {"attention": "cpu"},
        {"task": "embed"},
        {"dtype": "bfloat16"},
    ],
    ids=str,
)
def test_settings_that_a_check_depends_on_are_checked(engine: Open, change: dict[str, Any]) -> None:
    engine(num_threads=2)
    assert not is_from_cache(engine(**{"num_threads": 2, **change}))
    assert is_from_cache(engine(num_threads=2))


@pytest.mark.parametrize(
    "change",
    [
        {"max_model_len": 128},
        {"kv_cache_memory": 1 << 21},
        {"prefix_caching": False},
        {"debug_checks": True},
    ],
    ids=str,
)
def test_settings_that_no_check_depends_on_are_not(engine: Open, change: dict[str, Any]) -> None:
    engine()
    assert is_from_cache(engine(**change))


def test_a_cache_too_small_for_the_checks_starts_in_full(engine: Open) -> None:
    engine()
    assert not is_from_cache(engine(max_model_len=16))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "generation_config.json"])
def test_another_file_of_the_model_starts_in_full(folder: Path, engine: Open, name: str) -> None:
    engine()
    file = folder / name
    if name.endswith(".json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), "remark": 1}))
    else:
        save_tiny_llama(folder, hidden_act="gelu_pytorch_tanh")
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    assert not is_from_cache(engine())


@pytest.mark.parametrize("library", prepared._LIBRARIES)
def test_another_version_of_a_library_starts_in_full(
    engine: Open, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine()
    version = prepared.importlib.metadata.version
    monkeypatch.setattr(
        prepared.importlib.metadata, "version", lambda name: "9" if name == library else version(name)
    )
    assert not is_from_cache(engine())


@pytest.mark.parametrize(
    ("of", "name", "value"),
    [
        (prepared.batchgen, "__version__", "9"),
        (prepared.platform, "python_version", lambda: "9"),
        (prepared.platform, "machine", lambda: "mips"),
        (prepared.torch.backends.cpu, "get_cpu_capability", lambda: "NONE"),
        (prepared, "FORMAT", "9"),
        (prepared, "_of_code", lambda: iter(["other"])),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_another_machine_or_version_starts_in_full(
    engine: Open, of: Any, name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = engine().config
    with monkeypatch.context() as patch:
        patch.setattr(of, name, value)
        place = prepared.place_of(config, build._source(config))
    unchanged = prepared.place_of(config, build._source(config))
    assert place is not None
    assert unchanged is not None
    assert place.key != unchanged.key
    assert place.findings != unchanged.findings


@pytest.mark.parametrize("name", ["get_host_cpu_name", "get_host_cpu_features"])
def test_another_processor_starts_in_full(engine: Open, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import llvmlite.binding as llvm

    class Other(str):
        def flatten(self) -> str:
            return "other"

    engine()
    monkeypatch.setattr(llvm, name, lambda: Other("other"))
    found = engine()
    assert not is_from_cache(found)


@pytest.mark.parametrize("name", ["MKL_CBWR", "ATEN_CPU_CAPABILITY", "NUMBA_CPU_NAME", "OMP_DYNAMIC"])
def test_an_environment_that_changes_arithmetic_starts_in_full(
    engine: Open, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine()
    with monkeypatch.context() as patch:
        patch.setenv(name, "x")
        assert not is_from_cache(engine())
    assert is_from_cache(engine())


@pytest.mark.parametrize("changed", ["matmul.py", "output_check.py", "probe.py"])
def test_code_is_part_of_the_key_file_by_file(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {part for part in prepared._of_code() if isinstance(part, str)}
    assert {"decoder.py", "matmul.py", "linear.py", "runner.py", "scheduler.py", "sampler.py"} <= names
    read = Path.read_bytes
    before = prepared.key_of(prepared._of_code())
    monkeypatch.setattr(Path, "read_bytes", lambda p: b"" if p.name == changed else read(p))
    assert prepared.key_of(prepared._of_code()) != before


@pytest.mark.parametrize(
    ("damage", "quantization"),
    [
        *((damage, None) for damage in ("content", "header", "cut", "longer", "empty", "foreign", "gone")),
        *((damage, "int8") for damage in ("content", "cut")),
    ],
)
def test_damaged_weights_are_made_anew(
    tmp_path: Path, engine: Open, damage: str, quantization: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    engine = partial(engine, quantization=quantization)
    expected = run(engine(), PROMPTS, GREEDY)
    file = packed(tmp_path)
    content = bytearray(file.read_bytes())
    places = {"content": len(content) - 5, "header": 100}
    if damage in places:
        content[places[damage]] ^= 1
    written = {"cut": content[:-1], "longer": content + b"x", "empty": b"", "foreign": b"x" * len(content)}
    file.unlink()
    if damage != "gone":
        file.write_bytes(written.get(damage, content))
    again = engine()
    assert not is_from_cache(again)
    assert run(again, PROMPTS, GREEDY) == expected
    assert ("is made anew" in caplog.text) == (damage != "gone")
    last = engine()
    assert is_from_cache(last)
    assert run(last, PROMPTS, GREEDY) == expected


def test_a_damaged_finding_is_not_used(tmp_path: Path, engine: Open) -> None:
    engine()
    [entry] = (tmp_path / "cache" / prepared.FINDINGS).iterdir()
    entry.write_bytes(entry.read_bytes()[:32] + b"{}")
    assert not is_from_cache(engine())
    assert is_from_cache(engine())


def test_a_copied_file_is_read_in_full_once(
    tmp_path: Path, engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine()
    file = packed(tmp_path)
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content)
    hashed: list[int] = []
    sha256 = tensor_file.hashlib.sha256
    monkeypatch.setattr(
        tensor_file.hashlib, "sha256", lambda *parts: hashed.extend(map(len, parts)) or sha256(*parts)
    )
    assert is_from_cache(engine())
    assert max(hashed) > len(content) // 2
    hashed.clear()
    assert is_from_cache(engine())
    assert max(hashed) < len(content) // 2


def granite(folder: Path) -> Path:
    """Its logits are scaled: more than a head does."""
    save_tiny_llama(folder)
    torch.manual_seed(3)
    config = GraniteConfig(
        vocab_size=259,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        logits_scaling=3.0,
        attention_multiplier=0.25,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def test_a_model_that_does_more_is_loaded_each_time(tmp_path: Path, engine: Open) -> None:
    place = granite(tmp_path / "granite")
    first = engine(place)
    assert "layers: one program of our own products" in first.notes
    assert not is_from_cache(engine(place))


def test_a_cache_that_cannot_be_written_is_done_without(
    tmp_path: Path, engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / prepared.WEIGHTS).write_text("in the way")
    first = engine()
    assert any("was not kept" in note for note in first.notes)
    second = engine()
    assert not is_from_cache(second)
    assert run(second, PROMPTS, GREEDY) == run(first, PROMPTS, GREEDY)


def test_a_full_disk_is_done_without(tmp_path: Path, engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(tensor_file.os, "fsync", full)
        first = engine()
    assert any("No space left" in note for note in first.notes)
    assert not list((tmp_path / "cache" / prepared.WEIGHTS).glob("*.tmp"))
    assert not is_from_cache(engine())
    assert is_from_cache(engine())


def test_a_limit_on_files_is_done_without(tmp_path: Path, engine: Open) -> None:
    engine()
    packed(tmp_path).unlink()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        first = engine()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert any("File too large" in note for note in first.notes)
    assert not list((tmp_path / "cache" / prepared.WEIGHTS).glob("*.t*"))


def test_no_more_than_a_share_of_the_disk(
    tmp_path: Path, engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared, "MOST_SHARE", 0.0)
    first = engine()
    assert any("too much of the disk" in note for note in first.notes)
    assert not is_from_cache(engine())


def test_weights_that_nobody_used_for_long_make_room(
    tmp_path: Path, engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine()
    old = packed(tmp_path)
    for file in (old, old.with_suffix(".lock")):
        os.utime(file, (1, 1))
    engine(task="embed")
    assert packed(tmp_path) != old


WRITER = f"""
import os, signal, sys
from batchgen.engine import build, config, prepared
from batchgen.models import tensor_file
prepared.LEAST_BYTES = 0
if sys.argv[2:]:
    tensor_file.os = type("Os", (), dict(vars(os), fsync=lambda _: os.kill(os.getpid(), signal.SIGKILL)))
engine = build.build_engine(config.EngineConfig(model=sys.argv[1], **{SETTINGS!r}))
print(type(engine.loaded).__name__, flush=True)
"""


def _writer(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), *arguments], stdout=subprocess.PIPE, text=True
    )


def test_a_writer_that_was_killed_leaves_nothing_that_is_used(
    tmp_path: Path, folder: Path, engine: Open
) -> None:
    with _writer(folder, "kill") as killed:
        assert killed.wait() == -signal.SIGKILL
    place = tmp_path / "cache" / prepared.WEIGHTS
    assert list(place.glob("*.tmp"))
    assert not list(place.glob("*.tensors"))
    assert not is_from_cache(engine())
    assert not list(place.glob("*.tmp"))
    assert is_from_cache(engine())


def test_two_that_start_at_once(tmp_path: Path, folder: Path, engine: Open) -> None:
    writers = [_writer(folder) for _ in range(2)]
    for writer in writers:
        assert writer.communicate()[0].strip() in ("LoadedModel", "PreparedModel")
    assert [writer.returncode for writer in writers] == [0, 0]
    assert tensor_file.open_tensors(packed(tmp_path)).tensors
    assert is_from_cache(engine())


def _mappings() -> int:
    return len(re.findall(r"\.tensors", Path("/proc/self/maps").read_text()))


def test_memory_is_counted_and_given_back(engine: Open) -> None:
    first = engine()
    of_weights = next(note for note in first.notes if "weights" in note)
    for _ in range(10):
        second = build_engine(second_config := first.config)
        assert is_from_cache(second), second_config
        assert of_weights in second.notes
        assert _mappings() == 1
        run(second, PROMPTS[:1], GREEDY)
        second.core.close()
        del second
        gc.collect()
        assert _mappings() == 0


def test_mapped_weights_are_not_counted_as_available(engine: Open) -> None:
    from batchgen.models.footprint import mapped_bytes, weight_bytes

    engine()
    model = engine().loaded
    assert isinstance(model, PreparedModel)
    assert mapped_bytes([model.memory]) == weight_bytes([model.memory]) > 0


def test_a_start_from_the_cache_reads_no_weights(engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    from batchgen.engine import first_start

    engine()
    monkeypatch.setattr(first_start, "load_model", None)
    monkeypatch.setattr(build.ModelSource, "weights_folder", None)
    assert is_from_cache(engine())


def test_a_young_writer_of_other_weights_is_left_alone(tmp_path: Path, engine: Open) -> None:
    place = tmp_path / "cache" / prepared.WEIGHTS
    place.mkdir(parents=True)
    young, old = place / "other.tensors.1.tmp", place / "other.tensors.2.tmp"
    for file in (young, old):
        file.touch()
    os.utime(old, (time.time() - 7200,) * 2)
    engine()
    assert young.exists()
    assert not old.exists()
