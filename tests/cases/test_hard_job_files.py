"""What YAML 1.1 makes of job files and YAML 1.2 does not, each line of the table through the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from job_place import Place, lines


def write(place: Place, sampling: str) -> str:
    """A job file with these lines under `sampling`."""
    path = Path(place.write(lines({"prompt": "a"})))
    path.write_text(f"model: model/\ninput: in.jsonl\noutput: out/\nsampling:\n{sampling}\n")
    return str(path)


@pytest.mark.parametrize(
    ("written", "key", "value"),
    [
        ("temperature: 1e-3", "temperature", 0.001),
        ("stop: [12:30:00]", "stop", ["12:30:00"]),
        ("stop: [no, on, yes, off, n]", "stop", ["no", "on", "yes", "off", "n"]),
        ("seed: 017", "seed", 17),
        ("stop: ['\\n']", "stop", ["\\n"]),
        ('stop: ["\\n"]', "stop", ["\n"]),
    ],
)
def test_what_a_value_is(place: Place, written: str, key: str, value: Any) -> None:
    """As `config` says; and `run` takes it."""
    job = write(place, f"  {written}")
    found = json.loads(place.call(["config", job, "--json"], 0).partition("\nnote: ")[0])
    assert (found["sampling"][key], type(found["sampling"][key])) == (value, type(value))


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("  ignore_eos: on", "job.yaml:5:15: sampling.ignore_eos: 'on' is not allowed; use true or false"),
        ("  temperature: 12:30:00", "job.yaml:5:16: sampling.temperature: '12:30:00' is not allowed"),
        (
            "  temperature: 0.0\n  temperature: 1.0",
            "job.yaml:6:3: the key sampling.temperature is given twice, first at {job}:5:3; remove one",
        ),
        (
            "  stop: !!python/object/apply:os.system [id]",
            "job.yaml:5:9: sampling.stop: the YAML tag !!python/object/apply:os.system is not allowed",
        ),
        (
            "  stop: [!!python/name:os.system ]",
            "job.yaml:5:10: sampling.stop[0]: the YAML tag !!python/name:os.system is not allowed",
        ),
    ],
)
@pytest.mark.parametrize("verb", ["validate", "run", "config"])
def test_what_is_refused(place: Place, verb: str, written: str, said: str) -> None:
    """In one sentence: what the reader refuses is not refused again for being nothing."""
    job = write(place, written)
    found = place.call([verb, job], 2)
    assert said.format(job=job) in found
    assert sum("sampling." in line for line in found.splitlines()) == 1
    assert not place.output.exists()


def test_a_backslash_that_is_not_an_escape(place: Place) -> None:
    job = write(place, "  stop: ['\\n']")
    noted = "job.yaml:5:10: sampling.stop[0]: \\n outside double quotes is a backslash and a letter"
    assert noted in place.call(["validate", job], 2)
    assert noted in place.call(["run", job], 0)
