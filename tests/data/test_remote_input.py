"""Input behind URLs: found, described, entered in the middle, retried; and no credentials in any message."""

import gzip
import io
import json
import os
import uuid
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from range_server import COMMITS, Site, serve
from stand_in_s3 import serve_s3

from batchgen.data import remote
from batchgen.data.fingerprint import describe_changes
from batchgen.data.row import Row
from batchgen.data.source import open_input
from batchgen.types import InputError, UsageError

ROWS = 1000
LINES = b"".join(b'{"n": %d, "t": "%s"}\n' % (i, b"x" * 300) for i in range(ROWS))
TABLE = pa.table({"n": list(range(ROWS)), "t": [os.urandom(100).hex() for i in range(ROWS)]})


def parquet_bytes(table: pa.Table = TABLE, **options) -> bytes:
    out = io.BytesIO()
    pq.write_table(table, out, row_group_size=200, **options)
    return out.getvalue()


FILES = {
    "a.jsonl": LINES,
    "a.jsonl.gz": gzip.compress(LINES),
    "a.csv": b"n,t\n" + b"".join(b'%d,"x\ny"\n' % i for i in range(ROWS)),
    "a.json": b"[" + LINES.replace(b"\n", b",\n")[:-2] + b"]",
    "a.parquet": parquet_bytes(),
}


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "BACKOFF_SECONDS", (0.0, 0.0, 0.0))
    monkeypatch.setattr(remote.RangeReader, "block_bytes", 50_000)


@pytest.fixture
def site() -> Iterator[Site]:
    with serve(Site({f"/{name}": data for name, data in FILES.items()})) as site:
        yield site


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with serve_s3("bucket"):
        for name, data in FILES.items():
            fsspec.filesystem("s3").pipe_file(f"bucket/in/{name}", data)
        yield "s3://bucket/in"


def facts(row: Row) -> tuple:
    return row.ordinal, row.id, dict(row.values), row.error, row.line, row.digest, row.next_position


def check_reading(url: str) -> None:
    """All rows, and the rows from any position by a reader that has seen nothing before."""
    with open_input(url) as inputs:
        rows = list(inputs.rows())
    assert [int(row.values["n"]) for row in rows] == list(range(ROWS))
    for ordinal in (0, 199, ROWS - 2):
        with open_input(url) as inputs:
            again = list(islice(inputs.rows(rows[ordinal].next_position), 3))
        assert list(map(facts, again)) == list(map(facts, rows[ordinal + 1 : ordinal + 4]))


@pytest.mark.parametrize("name", FILES)
def test_in_memory(name: str) -> None:
    folder = f"memory:///{uuid.uuid4().hex}"
    fsspec.filesystem("memory").pipe_file(f"{folder}/{name}", FILES[name])
    check_reading(f"{folder}/{name}")


@pytest.mark.parametrize("name", FILES)
def test_on_a_web_server(site: Site, name: str) -> None:
    check_reading(f"{site.address}/{name}")


@pytest.mark.parametrize("name", FILES)
def test_on_s3(bucket: str, name: str) -> None:
    check_reading(f"{bucket}/{name}")


def test_patterns_on_s3_and_in_memory(bucket: str) -> None:
    folder = f"memory:///{uuid.uuid4().hex}"
    for name in ("b.jsonl", "a.jsonl", "c.txt"):
        fsspec.filesystem("memory").pipe_file(f"{folder}/{name}", b'{"p": 1}\n')
    inputs = open_input([f"{bucket}/*.jsonl*", f"{folder}/*.jsonl"])
    names = [file.path for file in inputs.files]
    assert names == [
        f"{bucket}/a.jsonl", f"{bucket}/a.jsonl.gz", f"{folder}/a.jsonl", f"{folder}/b.jsonl"
    ]  # fmt: skip
    for missing in (f"{bucket}/none.jsonl", f"{folder}/none.jsonl"):
        with pytest.raises(InputError, match=f"{missing} cannot be read: there is no such file"):
            open_input(missing)
        with pytest.raises(InputError, match="matches no file"):
            open_input(f"{missing}*")
        with pytest.raises(UsageError, match="is a folder; name files or a pattern"):
            open_input(missing.rpartition("/")[0])


def test_local_urls(tmp_path: Path) -> None:
    path = tmp_path / "a b.jsonl"
    path.write_bytes(LINES)
    inputs = open_input([path.as_uri()])
    assert inputs.files[0].path == str(path)
    assert inputs.files[0].url is None
    with pytest.raises(UsageError, match="listed twice"):
        open_input([str(path), f"local://{path}"])


def test_plain_text_and_parquet_are_entered_without_reading_what_lies_before(site: Site) -> None:
    for name in ("a.jsonl", "a.parquet"):
        with open_input(f"{site.address}/{name}") as inputs:
            rows = list(inputs.rows())
            site.asked.clear()
        with open_input(f"{site.address}/{name}") as inputs:
            site.asked.clear()
            assert next(inputs.rows(rows[900].next_position)).ordinal == 901
        starts = [int(asked[2].removeprefix("bytes=").partition("-")[0]) for asked in site.asked if asked[2]]
        assert min(starts) > len(FILES[name]) // 2, name


def test_the_version_is_in_the_fingerprint(site: Site) -> None:
    url = f"{site.address}/a.jsonl"
    old = json.loads(json.dumps(open_input(url).fingerprint()))
    assert old["files"][0]["path"] == url
    assert describe_changes(old, open_input(url).fingerprint()) == []
    site.files["/a.jsonl"] = LINES[::-1]
    (change,) = describe_changes(old, open_input(url).fingerprint())
    assert change.startswith(f"{url}: version (etag or time stamp) was ")


def test_bad_moments_are_survived(site: Site) -> None:
    with open_input(f"{site.address}/a.jsonl") as inputs:
        site.failures = [503, 500, 429]
        assert sum(1 for _ in inputs.rows()) == ROWS
        assert not site.failures
        site.failures = [503] * 4
        with pytest.raises(InputError, match=r"a.jsonl: cannot be read, 4 attempts failed") as caught:
            list(inputs.rows())
        assert caught.value.exit_code == 3


def test_what_will_not_get_better_is_not_retried(site: Site) -> None:
    with open_input(f"{site.address}/a.jsonl") as inputs:
        site.failures = [403, 403, 403]
        with pytest.raises(InputError, match=r"a.jsonl cannot be read: 403, .*check address and credentials"):
            list(inputs.rows())
        assert len(site.failures) >= 1


def test_no_server() -> None:
    with pytest.raises(InputError, match=r"http://127.0.0.1:1/a.jsonl: cannot be read, 4 attempts failed"):
        open_input("http://127.0.0.1:1/a.jsonl")


def test_a_server_without_ranges(site: Site) -> None:
    site.with_ranges = False
    with pytest.raises(InputError, match="does not answer range requests, so a run could not"):
        list(open_input(f"{site.address}/a.jsonl").rows())


def test_a_file_that_becomes_shorter_while_it_is_read(site: Site) -> None:
    with open_input(f"{site.address}/a.jsonl") as inputs:
        site.files["/a.jsonl"] = LINES[:100_000]
        with pytest.raises(InputError, match=r"a.jsonl"):
            list(inputs.rows())


def test_credentials_are_never_shown(site: Site) -> None:
    secrets = ("hunter2", "AKIA", "f00d", "t0ken")
    query = "X-Amz-Credential=AKIA&X-Amz-Signature=f00d&part=1&access_token=t0ken"
    host = site.address.removeprefix("http://")
    url = f"http://bob:hunter2@{host}/a.jsonl?{query}"
    with open_input(url) as inputs:
        assert inputs.files[0].path == f"{site.address}/a.jsonl?part=1"
        assert sum(1 for _ in inputs.rows()) == ROWS
        assert any(query in asked[1] for asked in site.asked)
        texts = [repr(inputs.files), json.dumps(inputs.fingerprint()), repr(next(inputs.rows()))]
    site.failures = [403] * 9
    for bad in (url, url.replace("/a.jsonl", "/none"), url.replace(host, "127.0.0.1:1")):
        with pytest.raises((InputError, UsageError)) as caught:
            list(open_input(bad).rows())
        texts.append(str(caught.value))
    for secret in secrets:
        assert not [text for text in texts if secret in text], secret


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("gs://bucket/a.jsonl", r"gs://bucket/a.jsonl: reading gs:// needs a package .*; pip install gcsfs"),
        ("nothing://a/b.jsonl", "nothing://a/b.jsonl cannot be opened: Protocol not known: nothing"),
        ("simplecache::s3://b/a.jsonl", "chained URLs are not supported"),
        ("hf://org/name/a.jsonl", "write hf://datasets/ORG/NAME"),
        ("hf://datasets/name", "write hf://datasets/ORG/NAME"),
    ],
)
def test_what_cannot_be_opened(url: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        open_input(url)


@pytest.fixture
def hub(site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setenv("HF_ENDPOINT", site.address)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for name, data in FILES.items():
        site.add_hub_file(f"data/{name}", data)
        site.add_hub_file(f"data/{name}", data, "v1")
    return site


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
@pytest.mark.parametrize(("revision", "commit"), [("", "main"), ("@v1", "v1")])
def test_on_the_hub(hub: Site, name: str, revision: str, commit: str) -> None:
    url = f"hf://datasets/org/name{revision}/data/{name}"
    check_reading(url)
    with open_input(url) as inputs:
        entry = inputs.fingerprint()["files"][0]
    assert entry["path"] == url
    assert entry["commit"] == COMMITS[commit]
    assert len(entry["version"]) == 40


def test_a_pattern_on_the_hub(hub: Site) -> None:
    with open_input("hf://datasets/org/name/data/*.jsonl*") as inputs:
        assert [file.path for file in inputs.files] == [
            "hf://datasets/org/name/data/a.jsonl",
            "hf://datasets/org/name/data/a.jsonl.gz",
        ]
    with pytest.raises(InputError, match="hf://datasets/org/other"):
        open_input("hf://datasets/org/other/a.jsonl")


def test_a_bare_data_set_is_its_train_split(hub: Site) -> None:
    with pytest.raises(UsageError, match=r"has no files of a train split; .* it has data/a.csv, data/a.json"):
        open_input("hf://datasets/org/name")
    for name in ("data/train-00001-of-00002.parquet", "data/train-00000-of-00002.parquet"):
        hub.add_hub_file(name, parquet_bytes(TABLE.slice(0, 3)))
    hub.add_hub_file("data/constraints.parquet", parquet_bytes(TABLE.slice(0, 5)))
    hub.add_hub_file("train.jsonl", LINES)
    with open_input("hf://datasets/org/name") as inputs:
        assert [file.name for file in inputs.files] == [
            "train-00000-of-00002.parquet",
            "train-00001-of-00002.parquet",
        ]
        assert inputs.num_rows() == 6
    hub.add_hub_file("other/train.parquet", parquet_bytes(TABLE.slice(0, 3)))
    with pytest.raises(UsageError, match="has train files in several folders"):
        open_input("hf://datasets/org/name")
