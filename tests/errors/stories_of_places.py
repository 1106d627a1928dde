"""What goes wrong with places: object stores, web servers, the hub, disks."""

from __future__ import annotations

import dataclasses
import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import fsspec
import pyarrow as pa
from huggingface_hub import constants
from range_server import Site, serve
from stage import Stage, rows
from stand_in_hub import serve_hub

from batchgen.data import hub as data_hub
from batchgen.data import raw_file, remote, sink
from batchgen.job import files, object_store
from batchgen.job import remote as job_remote
from batchgen.job.lease import Owner
from batchgen.job.object_store import ObjectStore

RUN = "run job.yaml --progress none"


def _failing(number: int) -> Any:
    def fail(*arguments: Any, **named: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


def results_in_a_store(stage: Stage) -> None:
    """An output folder in an object store that is not there, fails, or is another's."""
    url = "memory://catalogue/results"
    fsspec.filesystem("memory").store.clear()
    stage.batchgen("validate job.yaml", 2, None, f"output.path={url}")
    stage.batchgen("validate job.yaml", 2, None, "output.path=gs://bucket/results")
    with mock.patch.dict(object_store.PROTOCOLS, {"memory": "fsspec"}):
        _in_a_store(stage, url)


def _in_a_store(stage: Stage, url: str) -> None:
    stage.batchgen(f"status {url}", 2)
    stage.batchgen("status ftp://there/results", 2)
    line, to = RUN, f"output.path={url}"
    with stage.patched((ObjectStore, "create", lambda *arguments: False)):
        stage.batchgen(line, 6, None, to)
    memory = type(fsspec.filesystem("memory"))
    with stage.patched((memory, "pipe_file", _failing(errno.EACCES))):
        stage.batchgen(line, 5, None, to)
    stage.batchgen(line, 0, None, to, "input.limit=1")
    stage.batchgen(f"report {url}", 2)
    stage.batchgen(f"status {url} --watch", 2)
    with stage.patched((job_remote, "_epochs", lambda objects: [7])):
        stage.batchgen(line, 6, None, to)
    listed = ObjectStore.sizes

    def taken_over(store: ObjectStore, below: str = "") -> dict[str, int]:
        return listed(store, below) | ({f"{below}000099.json": 1} if below == job_remote._CLAIMS else {})

    with stage.patched((ObjectStore, "sizes", taken_over)):
        stage.batchgen(line, 6, None, to)
    beats = iter(range(50, 99))

    def beating(store: ObjectStore) -> Any:
        owner = dataclasses.replace(Owner.myself(locked=False), host="gpu7", pid=77, boot="another boot")
        return SimpleNamespace(owner=owner, beat=next(beats), released=False)

    with stage.patched((job_remote, "_read_lease", beating)):
        stage.batchgen(line, 6, None, to, "run.lease_seconds=5")


def servers_that_fail(stage: Stage) -> None:
    """Input on a web server without ranges or sizes, that fails, and on the hub in odd shapes."""
    with serve(Site()) as site, stage.patched((remote, "BACKOFF_SECONDS", ())):
        site.files["/a.jsonl"] = rows(2).encode()
        site.failures[:] = [503] * 9
        stage.batchgen("validate job.yaml", 3, None, f"input={site.address}/a.jsonl")
        site.failures.clear()
        for names in (("x/train.parquet", "y/train.parquet"), ("data/test.parquet",)):
            listed = ["hf://datasets/org/name@abc/" + name for name in names]
            with stage.patched(
                (data_hub, "_commit", lambda *arguments: "abc"),
                (data_hub, "list_folder", lambda pinned, listed=listed: listed),
            ):
                stage.batchgen("validate job.yaml", 2, None, "input=hf://datasets/org/name")
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/folder/a.jsonl", rows(2).encode())
    with stage.patched((type(memory), "info", lambda *given, **named: {"type": "file", "size": None})):
        stage.batchgen("validate job.yaml", 3, None, "input=memory://folder/a.jsonl")
    stage.batchgen("validate job.yaml", 2, None, "input=memory://folder")
    sink_ = pa.BufferOutputStream()
    with pa.ipc.new_file(sink_, pa.schema([("prompt", pa.string())])) as writer:
        writer.write_table(pa.table({"prompt": ["a"]}))
    memory.pipe_file("/folder/a.arrow", sink_.getvalue().to_pybytes())
    stage.batchgen("validate job.yaml", 2, None, "input=memory://folder/a.arrow")
    with stage.patched((type(memory), "cat_file", lambda *arguments, **named: b"x" * 9_000_000)):
        stage.batchgen("validate job.yaml", 3, None, "input=memory://folder/a.jsonl")


def models_on_the_hub(stage: Stage) -> None:
    """Models that are not there, ask for consent, or are in the cache by half."""
    model = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"\2\0\0\0\0\0\0\0{}"}
    with serve_hub() as hub:
        places = "/{repo_id}/resolve/{revision}/{filename}"
        hub.push("org/m", model)
        hub.gated.add("org/gated")
        with stage.patched(
            (constants, "ENDPOINT", hub.url),
            (constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + places),
            (constants, "HF_HUB_CACHE", str(Path("cache").absolute())),
            (constants, "HF_HUB_OFFLINE", False),
        ):
            for name in ("org/none", "org/gated"):
                stage.batchgen("validate job.yaml", 2, None, f"model={name}")
            stage.batchgen("validate job.yaml", 2, None, "model.path=org/m", "model.revision=v9")
            stage.batchgen("validate job.yaml", 2, None, "model=org/m")
            with stage.patched((constants, "HF_HUB_OFFLINE", True)):
                stage.batchgen("validate job.yaml", 2, None, "model=org/m")


def pushes_that_fail(stage: Stage) -> None:
    """Results that are done, and a hub that does not take them."""
    from batchgen.job import push

    def refuse(*arguments: Any) -> Any:
        raise OSError("403 Forbidden: you may not write here")

    with stage.patched((push, "_commit", refuse)):
        os.environ["HF_TOKEN"] = "hf_abc"
        try:
            stage.batchgen(RUN, 5, None, "output.push_to_hub=me/results")
        finally:
            del os.environ["HF_TOKEN"]


def places_without_room(stage: Stage) -> None:
    """Output folders where no file can be."""
    # As for root.
    with stage.patched((os, "access", lambda *arguments: True)):
        stage.batchgen("validate job.yaml", 5, None, "output.path=/proc/out")
    only_readable = SimpleNamespace(f_flag=os.ST_RDONLY, f_blocks=1)
    with stage.patched((os, "statvfs", lambda place: only_readable)):
        stage.batchgen("validate job.yaml", 5)


def disks_that_fail(stage: Stage) -> None:
    """Files that cannot be read or written any more."""
    failing = _failing(errno.EIO)
    with stage.patched((raw_file.os, "pread", failing)):
        stage.batchgen("validate job.yaml", 3)
    opened = os.open

    def closed(path: Any, *arguments: Any, **named: Any) -> int:
        if str(path).endswith("prompts.jsonl"):
            return failing()
        return opened(path, *arguments, **named)

    with stage.patched((raw_file.os, "open", closed)):
        stage.batchgen("validate job.yaml", 3)
    with stage.patched((raw_file._LocalFile, "read_at", lambda self, offset, size: b"")):
        stage.batchgen("validate job.yaml", 3)
    stage.batchgen(RUN, 0)
    full = _failing(errno.ENOSPC)
    with stage.patched((sink.os, "write", full)):
        stage.batchgen(f"{RUN} --overwrite", 5)
        stage.batchgen("export out --format csv", 5)
    with stage.patched((files.FileOps, "fsync", full)):
        stage.batchgen(f"{RUN} --overwrite", 5)
    from batchgen import file_hash

    with stage.patched((file_hash.hashlib, "file_digest", failing)):
        Path("model2").mkdir()
        for file in Path("model").iterdir():
            Path("model2", file.name).write_bytes(file.read_bytes())
        stage.batchgen(RUN, 2, None, "model=./model2")


ALL = [
    *(results_in_a_store, servers_that_fail, models_on_the_hub, pushes_that_fail),
    *(places_without_room, disks_that_fail),
]
