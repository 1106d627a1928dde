"""Whatever a job file holds: a job or a `UsageError`, at once. `BATCHGEN_FUZZ` multiplies the examples."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from batchgen.job.load import load_job
from batchgen.job.resolved import resolved_yaml
from batchgen.job.schema import job_schema
from batchgen.job.spec.job import SECTIONS
from batchgen.job.unavailable import MEANS_OFF
from batchgen.job.yaml_loader import parse_document
from batchgen.types import UsageError

TIMES = int(os.environ.get("BATCHGEN_FUZZ", "1"))
SCHEMA = Draft202012Validator(job_schema())
FULL = (Path(__file__).parent / "full_job.yaml").read_text()
SPLICES = [
    *"[]{}:,-?&*!|>%@`'\"#~\t\n\x00\x85\u2028\ufeff\\",
    *("<<", "*x", "&x ", "!!int ", "!!python/name:x ", "--- ", "...", "${env:", "${env:A}", "${env:HOME}"),
    *("{{ x }}", "1e999", ".inf", ".nan", "0o17", "0x", "9" * 5000, '"\\ud83d"', '"\\UFFFFFFFF"', "- " * 120),
    *("[" * 120, "%YAML 9", "include: job.yaml\n", "include: [a]\n", "~nobody/x", "\\0", "s3://x", "dummy:x"),
]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(SPLICES),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
KEYS = [(s, key) for s, model in SECTIONS.items() for key in model.model_fields]
KEYS += [(path[0], path[1]) for path in MEANS_OFF if len(path) == 2]
# Slow only where the machine is busy with something else.
RULES = settings(
    max_examples=60 * TIMES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _load(content: bytes, *sets: str) -> None:
    """A job that loads can be written and loaded again; everything else is a sentence."""
    Path("job.yaml").write_bytes(content)
    try:
        spec = load_job("job.yaml", sets)
    except UsageError:
        return
    text = resolved_yaml(spec)
    SCHEMA.validate(yaml.safe_load(text))
    if "${env:" not in text:
        Path("again.yaml").write_text(text, encoding="utf-8")
        assert yaml.safe_load(resolved_yaml(load_job("again.yaml"))) == yaml.safe_load(text)


@given(st.binary(max_size=300))
@RULES
def test_any_bytes(content: bytes) -> None:
    _load(content)


@given(
    st.lists(st.tuples(st.integers(0, len(FULL)), st.integers(0, 30), st.sampled_from(SPLICES)), max_size=4)
)
@RULES
def test_a_job_file_with_anything_anywhere(cuts: list[tuple[int, int, str]]) -> None:
    text = FULL
    for at, length, splice in cuts:
        text = text[:at] + splice + text[at + length :]
    _load(text.encode(errors="surrogatepass"))


@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4), st.booleans())
@RULES
def test_any_value_of_any_key(given_values: dict[tuple[str, str], object], required: bool) -> None:
    job: dict[str, dict[str, object]] = {}
    if required:
        job = {"model": {"path": "m/m"}, "input": {"path": "i"}, "output": {"path": "o"}}
    for (section, key), value in given_values.items():
        job.setdefault(section, {})[key] = value
    text = yaml.safe_dump(job)
    _load(text.encode(errors="surrogatepass"))
    if yaml.safe_load(text) == parse_document(text, "job.yaml").data and _loads():
        SCHEMA.validate(yaml.safe_load(text))


def _loads() -> bool:
    try:
        load_job("job.yaml")
    except UsageError:
        return False
    return True


@given(st.sampled_from(KEYS), st.text(max_size=20) | st.sampled_from(SPLICES))
@RULES
def test_any_setting(key: tuple[str, str], text: str) -> None:
    _load(b"model: m/m\ninput: i\noutput: o\n", f"{key[0]}.{key[1]}={text}")
    _load(b"model: m/m\ninput: i\noutput: o\n", f"{text}={key}")


@pytest.mark.parametrize(
    "text",
    [
        "a: " + "${env:" * 100_000,
        "a: &a " + "${env:A:-x}" * 1000 + "\n" + "".join(f"k{i}: *a\n" for i in range(5000)),
        "".join(f"k{i}: 1\n" for i in range(8000)),
        "prompt: {" + ", ".join(f"k{i}: 1" for i in range(8000)) + "}\n",
        "sampling: {stop: [" + "1, " * 8000 + "]}\n",
        "name: " + "x" * 900_000,
        "? " * 5000,
        "- " * 5000,
    ],
    ids=range(8),
)
def test_large_files_end_soon(text: str) -> None:
    _load(text.encode())


def test_a_shuffled_job_file() -> None:
    draw = random.Random(0)
    for _ in range(30 * TIMES):
        pieces = re.findall(r"\S+|\s+", FULL)
        for _ in range(3):
            i, j = draw.randrange(len(pieces)), draw.randrange(len(pieces))
            pieces[i], pieces[j] = pieces[j], pieces[i]
        _load("".join(pieces).encode())
