"""Hard inputs that broke tools like ours, each through the command line on a real file, named by its case.

A real worker with the fake engine answers, so that what is tested is reading, identity, errors and writing.
What becomes of prompts inside the model is in `tests/e2e/test_prompt_cases.py`.
"""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from job_place import Place, Rows, lines


def classes(rows: Rows) -> list[str]:
    return [row["error"]["class"] if row["error"] else row["status"] for row in rows]


def test_c01_bom(place: Place) -> None:
    rows = lines({"prompt": "a", "deep": {"x": 1}}, {"prompt": "b"}, {"prompt": "c"})
    found = place.run(b"\xef\xbb\xbf" + rows)
    assert [row["prompt"] for row in found] == ["a", "b", "c"]
    assert found[0]["deep"] == {"x": 1}
    report = json.loads(place.call(["report", str(place.output), "--json"], 0))
    assert "bom_stripped" in json.dumps(report)


def test_c02_crlf(place: Place) -> None:
    found = place.run(b'{"prompt": "a"}\r\n\r\n{"prompt": "b"}\r\n   \r\n{"prompt": }\r\n')
    assert classes(found) == ["ok", "ok", "invalid_json"]
    assert "line 5" in found[2]["error"]["message"]
    assert all("\r" not in row.get("prompt", "") for row in found)


@pytest.mark.parametrize("sign", ["\u2028", "\u2029", "\x85", "\v", "\f", "\r", "\x1c", "\x00"])
def test_c03_u2028(place: Place, sign: str) -> None:
    text = f"a{sign}b"
    raw = json.dumps({"prompt": text}, ensure_ascii=sign < " ").encode() + b"\n"
    found = place.run(raw)
    assert [row["prompt"] for row in found] == [text]


def test_c05_nan(place: Place) -> None:
    data = (
        b'{"prompt": "a", "score": 1.5, "s": {}}\n{"prompt": "b", "score": NaN, "s": {}}\n'
        b'{"prompt": "c", "score": 2, "s": {"temperature": Infinity}}\n'
    )
    found = place.run(data, sampling={"per_row": "s"})
    assert classes(found) == ["ok", "ok", "invalid_param"]
    assert found[1]["score"] is None


def test_c07_bigint(place: Place) -> None:
    ids = ["123456789012345678901234567890", "18446744073709551616", "18446744073709551617"]
    data = "".join(f'{{"id": {i}, "prompt": "a", "n": {i}}}\n' for i in ids).encode()
    place.run(data)
    raw = (place.folder / "out/data/part-000000.jsonl").read_text()
    assert all(f'"id": "{i}"' in raw or f'"id":"{i}"' in raw for i in ids)
    assert all(f'"n": {i}' in raw or f'"n":{i}' in raw for i in ids)


def test_c08_surrogate(place: Place) -> None:
    data = b'{"prompt": "ok \\ud83d"}\n{"prompt": "\\ud83d\\ude00"}\n'
    found = place.run(data)
    assert classes(found) == ["invalid_unicode", "ok"]
    assert found[1]["prompt"] == "\U0001f600"


def test_c08_surrogate_replaced(place: Place) -> None:
    found = place.run(b'{"prompt": "ok \\ud83d"}\n', input={"unicode": "replace"})
    assert found[0]["prompt"] == "ok \ufffd"


@pytest.mark.parametrize("bad", [b"\xff", b"\xed\xa0\xbd", b"\xc0\xaf"])
def test_c09_badutf8(place: Place, bad: bytes) -> None:
    found = place.run(b'{"prompt": "a"}\n{"prompt": "b' + bad + b'"}\n{"prompt": "c"}\n')
    assert classes(found) == ["ok", "invalid_unicode", "ok"]
    assert "byte 13" in found[1]["error"]["message"]


def test_c10_torn_input(place: Place) -> None:
    import random

    noise = random.Random(0)
    rows = lines(*({"prompt": f"{noise.getrandbits(9000):x}", "n": n} for n in range(5)))
    torn = gzip.compress(rows, mtime=0)[:-4000]
    said = place.refuse("run", torn, 3, name="in.jsonl.gz")
    assert "in.jsonl.gz" in said
    assert "byte" in said


def test_c10_torn_input_kept(place: Place) -> None:
    import random

    noise = random.Random(0)
    rows = lines(*({"prompt": f"{noise.getrandbits(9000):x}", "n": n} for n in range(5)))
    torn = gzip.compress(rows, mtime=0)[:-4000]
    found = place.run(torn, name="in.jsonl.gz", input={"on_truncated": "keep"})
    assert [row["n"] for row in found if row["status"] == "ok"] == list(range(len(found)))[: len(found)]
    assert 1 <= len(found) < 5


def test_c16_nullprompt(place: Place) -> None:
    found = place.run(lines(*({"prompt": p} for p in ("hi", None, "", "   "))))
    assert classes(found) == ["ok", "null_prompt", "empty_prompt", "ok"]


def test_c19_footer(place: Place) -> None:
    pq.write_table(pa.table({"prompt": ["a", "b"]}), place.folder / "x.parquet")
    torn = (place.folder / "x.parquet").read_bytes()[:-8]
    for verb in ("validate", "run"):
        said = place.refuse(verb, torn, 3, name="in.parquet")
        assert "in.parquet" in said
        assert "footer" in said


def test_c20_dup_id(place: Place) -> None:
    data = lines(*({"id": i, "prompt": "x"} for i in "aba"))
    said = place.refuse("validate", data, 2)
    assert "line 1" in said
    assert "line 3" in said


def test_c20_dup_id_suffix(place: Place) -> None:
    found = place.run(lines(*({"id": i, "prompt": "x"} for i in "aba")), input={"duplicate_ids": "suffix"})
    assert [row["id"] for row in found] == ["a", "b", "a#2"]


def test_c21_dup_prompt(place: Place) -> None:
    same = [{"prompt": p} for p in ("same", "x", "same", "y", "same")]
    found = place.run(lines(*same), sampling={"temperature": 1.0})
    assert len({row["generated_text"] for row in found}) == 5


def test_c22_id_missing(place: Place) -> None:
    rows = [{"key": "a", "prompt": "x"}, {"prompt": "x"}, {"key": "c", "prompt": "x"}]
    found = place.run(lines(*rows), input={"id": "key"})
    assert classes(found) == ["ok", "missing_column", "ok"]


def test_c22_id_missing_auto(place: Place) -> None:
    rows = [{"id": "a", "prompt": "x"}, {"prompt": "x"}, {"id": "c", "prompt": "x"}]
    assert [row["id"] for row in place.run(lines(*rows))] == ["a", "in.jsonl:1", "c"]


TRAPS: list[tuple[str, bytes, str]] = [
    ("overflowing float", b'{"prompt": "a", "x": 1e999}', "number_out_of_range"),
    ("5,000 digits", b'{"prompt": "a", "x": ' + b"9" * 5000 + b"}", "number_out_of_range"),
    ("deep", b'{"prompt": "a", "x": ' + b"[" * 3000 + b"]" * 3000 + b"}", "invalid_json"),
    ("deep and torn", b'{"prompt": "a", "x": ' + b"[" * 3000, "invalid_json"),
    ("infinite prompt", b'{"prompt": -Infinity}', "number_out_of_range"),
    ("duplicate key", b'{"prompt": "b", "prompt": "a"}', "ok"),
    ("trailing data", b'{"prompt": "a"} x', "invalid_json"),
    ("a list", b'["a"]', "invalid_json"),
    ("raw surrogate", b'{"prompt": "\xed\xa0\xbd"}', "invalid_unicode"),
]


@pytest.mark.parametrize(("data", "wanted"), [pytest.param(d, w, id=name) for name, d, w in TRAPS])
def test_parsers_traps(place: Place, data: bytes, wanted: str) -> None:
    found = place.run(b'{"prompt": "before"}\n' + data + b'\n{"prompt": "after"}\n')
    assert [row["prompt"] for row in (found[0], found[2])] == ["before", "after"]
    assert wanted in classes(found)[1] or (wanted == "ok" and found[1]["prompt"] == "a")


def test_traps_values_that_go_through(place: Place) -> None:
    """Numbers that JSON does not have are null; of a key given twice the last value counts; noted."""
    data = b'{"prompt": "a", "x": [NaN, -Infinity, {"y": Infinity}], "n": 18446744073709551616, "n": 2}\n'
    (found,) = place.run(data)
    assert (found["x"], found["n"]) == ([None, None, {"y": None}], 2)
    report = place.call(["report", str(place.output), "--json"], 0)
    assert all(note in report for note in ("duplicate_key", "nan_replaced"))


def test_traps_bare_carriage_return(place: Place) -> None:
    found = place.run(b'{"prompt": "a"}\r{"prompt": "b"}\n{"prompt": "c"}\n')
    assert classes(found) == ["invalid_json", "ok"]


def test_strict_json(place: Place) -> None:
    data = b'{"prompt": "b", "prompt": "a"}\n{"prompt": "a", "x": NaN}\n{"prompt": "c"}\n'
    found = place.run(data, input={"strict_json": True})
    assert classes(found) == ["invalid_json", "invalid_json", "ok"]


def test_c26_no_template(place: Place) -> None:
    from tiny_models import save_tokenizer

    save_tokenizer(place.folder / "model")
    for file in ("chat_template.jinja",):
        (place.folder / "model" / file).unlink()
    data = lines({"messages": [{"role": "user", "content": "hi"}]})
    said = place.refuse("validate", data, 2, prompt={"mode": "chat"})
    assert "completion" in said


def test_s1_no_permission(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write anywhere, so that the system's answer is made."""
    import errno

    from batchgen.job.files import FileOps

    def denied(*_: Any) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(FileOps, "create", denied)
    said = place.refuse("run", lines({"prompt": "a"}), 5)
    assert "Permission denied" in said
    assert "allow writing there" in said


@pytest.mark.parametrize(
    ("key", "value", "code"),
    [
        ("sampling.temperature", "0.5", 4),
        ("prompt.user", "'{{ prompt }}!'", 4),
        ("model.path", "other/", 4),
        ("output.part_rows", "7", 4),
        ("engine.max_num_seqs", "3", 0),
        ("run.checkpoint_seconds", "9", 0),
    ],
)
def test_c36_config_drift(place: Place, key: str, value: str, code: int, tmp_path: Path) -> None:
    data = lines({"prompt": "a"}, {"prompt": "b"})
    place.run(data)
    shutil.copytree(tmp_path / "model", tmp_path / "other")
    (tmp_path / "other" / "config.json").write_text('{"model_type": "llama", "hidden_size": 8}')
    value = str(tmp_path / value) if key == "model.path" else value
    said = place.call(["run", str(tmp_path / "job.yaml"), "--set", f"{key}={value}"], code)
    if code:
        # A model is known by what is in its files.
        about = "weights.config.json" if key == "model.path" else key
        shown = said[said.index(about) :].splitlines()[:3]
        assert [line.strip()[0] for line in shown[1:]] == ["-", "+"]
