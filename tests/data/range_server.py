"""A web server for tests of remote input: files with ranges, a stand-in for the hub, bad moments."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote, urlsplit

COMMITS = {"main": "1" * 40, "v1": "2" * 40}


@dataclass
class Site:
    """What the server knows.

    Args:
        files: path to content. Those of the hub lie under `/datasets/org/name/resolve/COMMIT/`.
        failures: status codes that the next requests for ranges get.
        with_ranges: whether ranges are answered.
        asked: method, path with query, and Range header of every request.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    failures: list[int] = field(default_factory=list)
    with_ranges: bool = True
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)
    address: str = ""

    def add_hub_file(self, path: str, data: bytes, revision: str = "main") -> None:
        self.files[f"/datasets/org/name/resolve/{COMMITS[revision]}/{path}"] = data


@contextmanager
def serve(site: Site) -> Iterator[Site]:
    class Handler(_Handler):
        pass

    Handler.site = site
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    site.address = f"http://127.0.0.1:{server.server_port}"
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    site: Site
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        wanted = self.headers.get("Range")
        self.site.asked.append((self.command, self.path, wanted))
        if path.startswith("/api/datasets/"):
            self._hub(path)
        elif wanted is not None and self.site.failures:
            self._send(self.site.failures.pop(0), b"a bad moment")
        elif path in self.site.files:
            self._file(self.site.files[path], wanted)
        else:
            self._send(404, b"")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.site.asked.append((self.command, self.path, None))
        commit = self.path.rpartition("/paths-info/")[2]
        paths = json.loads(body)["paths"] if body.startswith("{") else [unquote(body.partition("paths=")[2])]
        self._json([entry for entry in self._entries(commit) if entry["path"] in paths])

    def log_message(self, *_: object) -> None: ...

    def _file(self, data: bytes, wanted: str | None) -> None:
        headers = {"ETag": f'"{hashlib.md5(data).hexdigest()}"'}
        if not self.site.with_ranges or wanted is None:
            more = {"Accept-Ranges": "bytes"} if self.site.with_ranges else {}
            self._send(200, data, headers | more)
            return
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last) + 1 if last else len(data), len(data))
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
        self._send(206, data[start:end], headers)

    def _hub(self, path: str) -> None:
        rest = path.removeprefix("/api/datasets/org/name")
        revision = rest.removeprefix("/revision/") if rest.startswith("/revision/") else "main"
        commit = COMMITS.get(revision, revision if revision in COMMITS.values() else None)
        if not path.startswith("/api/datasets/org/name") or commit is None:
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
        elif rest.startswith("/tree/"):
            commit, _, folder = rest.removeprefix("/tree/").partition("/")
            self._json(
                [e for e in self._entries(commit) if e["path"].startswith(f"{folder}/" if folder else "")]
            )
        else:
            self._json({"id": "org/name", "sha": commit, "siblings": [], "private": False, "tags": []})

    def _entries(self, commit: str) -> list[dict]:
        prefix = f"/datasets/org/name/resolve/{commit}/"
        files = {p.removeprefix(prefix): d for p, d in self.site.files.items() if p.startswith(prefix)}
        folders = {p.rpartition("/")[0] for p in files} - {""}
        return [
            *({"type": "directory", "path": p, "oid": "0" * 40, "size": 0} for p in folders),
            *(
                {"type": "file", "path": p, "oid": hashlib.sha1(d).hexdigest(), "size": len(d)}
                for p, d in files.items()
            ),
        ]

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
