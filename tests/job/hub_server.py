"""A stand-in for the hub's API, as much of it as one commit to a data set needs. Runs in a thread."""

from __future__ import annotations

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Hub(ThreadingHTTPServer):
    """Listens on a free port.

    Attributes:
        files: path to content, of the one branch.
        commits: paths of each commit.
        created: what repositories were asked for.
        tokens: that were sent.
        refuse_commits: answers commits with an error.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.uploads: dict[str, bytes] = {}
        self.commits: list[list[str]] = []
        self.created: list[dict[str, Any]] = []
        self.tokens: set[str] = set()
        self.refuse_commits = False
        self._thread = threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def close(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        found = self.path.partition("/resolve/main/")[2] in self.server.files
        self.answer({}, 200 if found else 404, {"X-Error-Code": "EntryNotFound"})

    def do_GET(self) -> None:
        self.answer({"id": "org/set", "sha": self.sha(), "siblings": [], "private": True, "tags": []})

    def do_PUT(self) -> None:
        self.server.uploads[self.path.rpartition("/")[2]] = self.body()
        self.answer({})

    def do_POST(self) -> None:
        body = self.body()
        if self.path.endswith("/repos/create"):
            self.server.tokens.add(self.headers["Authorization"])
            self.server.created.append(json.loads(body))
            self.answer({"url": f"{self.server.url}/datasets/org/set", "name": "org/set"})
        elif self.path.endswith("/validate-yaml"):
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            self.answer({"files": [self.mode(file["path"]) for file in json.loads(body)["files"]]})
        elif self.path.endswith("/objects/batch"):
            self.answer({"transfer": "basic", "objects": [*map(self.upload, json.loads(body)["objects"])]})
        elif "/commit/" in self.path:
            self.commit([json.loads(line) for line in body.splitlines()])

    def mode(self, path: str) -> dict[str, Any]:
        large = path.endswith(".parquet")
        return {"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}

    def upload(self, asked: dict[str, Any]) -> dict[str, Any]:
        if asked["oid"] in self.server.uploads:
            return asked
        return {**asked, "actions": {"upload": {"href": f"{self.server.url}/upload/{asked['oid']}"}}}

    def commit(self, lines: list[dict[str, Any]]) -> None:
        if self.server.refuse_commits:
            self.answer({"error": "the disk of the hub is full"}, 403)
            return
        changed = []
        for line in lines[1:]:
            value = line["value"]
            changed.append(value["path"])
            if line["key"] == "file":
                self.server.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.server.files[value["path"]] = self.server.uploads[value["oid"]]
            else:
                del self.server.files[value["path"]]
        self.server.commits.append(changed)
        url = f"{self.server.url}/datasets/org/set/commit/{self.sha()}"
        self.answer({"success": True, "commitOid": self.sha(), "commitUrl": url, "hookOutput": ""})

    def sha(self) -> str:
        return f"{len(self.server.commits):040x}"

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def answer(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, text)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
