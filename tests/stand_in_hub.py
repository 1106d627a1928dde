"""A server that speaks as much of the hub's language as `snapshot_download` and `model_info` need."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


class StandInHub:
    """Repositories with commits and branches.

    Attributes:
        url: for `HF_ENDPOINT`.
        fetched: file names that were downloaded, in order.
    """

    def __init__(self) -> None:
        self.fetched: list[str] = []
        self.url = ""
        self._commits: dict[str, dict[str, dict[str, bytes]]] = {}
        self._branches: dict[str, dict[str, str]] = {}
        self.gated: set[str] = set()

    def push(self, repo: str, files: dict[str, bytes], branch: str = "main") -> str:
        """Add a commit, let a branch point to it, and return it."""
        text = json.dumps([repo, branch, {name: content.hex() for name, content in files.items()}])
        commit = hashlib.sha1(text.encode()).hexdigest()
        self._commits.setdefault(repo, {})[commit] = files
        self._branches.setdefault(repo, {})[branch] = commit
        return commit

    def push_folder(self, repo: str, folder: Path, branch: str = "main") -> str:
        """Add what a folder holds."""
        return self.push(repo, {file.name: file.read_bytes() for file in folder.iterdir()}, branch)

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of a request."""
        parts = [unquote(part) for part in urlsplit(path).path.strip("/").split("/")]
        if parts[:2] == ["api", "models"]:
            repo, rest = "/".join(parts[2:4]), parts[4:]
        else:
            repo, rest = "/".join(parts[:2]), parts[2:]
        if repo in self.gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b"{}"
        if repo not in self._commits:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        revision = rest[1] if len(rest) > 1 else "main"
        commit = self._branches[repo].get(revision, revision)
        files = self._commits[repo].get(commit)
        if files is None:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        if rest[:1] == ["resolve"]:
            return self._file(files, "/".join(rest[2:]), commit)
        if rest[:1] == ["tree"]:
            return self._json(
                [{"type": "file", "path": n, "size": len(c), "oid": self._etag(c)} for n, c in files.items()]
            )
        return self._json({"id": repo, "sha": commit, "siblings": [{"rfilename": name} for name in files]})

    def _file(self, files: dict[str, bytes], name: str, commit: str) -> tuple[int, dict[str, str], bytes]:
        if name not in files:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, b""
        return 200, {"X-Repo-Commit": commit, "ETag": f'"{self._etag(files[name])}"'}, files[name]

    def _json(self, value: Any) -> tuple[int, dict[str, str], bytes]:
        return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()

    def _etag(self, content: bytes) -> str:
        return hashlib.sha1(content).hexdigest()


@contextmanager
def serve_hub() -> Iterator[StandInHub]:
    """A hub on a port of this machine, while the context lasts."""
    hub = StandInHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._reply(body=False)

        def do_GET(self) -> None:
            if "/resolve/" in self.path:
                hub.fetched.append(self.path.rsplit("/", 1)[1])
            self._reply(body=True)

        def _reply(self, body: bool) -> None:
            status, headers, content = hub.answer(self.path)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
