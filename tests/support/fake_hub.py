"""A hub on loopback that speaks as much of the Hugging Face hub's protocol as fetching a model needs."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field


def commit_of(repository: str) -> str:
    """The only commit of a repository. No two have the same one, as on the real hub."""
    return hashlib.sha1(repository.encode()).hexdigest()


@dataclass
class FakeHub:
    """Repositories: name -> files by path. `fetched` are the files whose bytes were sent."""

    repositories: dict[str, dict[str, bytes]]
    gated: set[str] = field(default_factory=set)
    architectures: dict[str, str] = field(default_factory=dict)  # of GGUF files, where the hub knows them
    fetched: list[str] = field(default_factory=list)
    endpoint: str = ""

    def answer(self, method: str, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers, body."""
        parts = path.split("?")[0].strip("/").split("/")
        name = "/".join(parts[2:4] if parts[:2] == ["api", "models"] else parts[:2])
        if name not in self.repositories:
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        if name in self.gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        files = self.repositories[name]
        if parts[0] == "api":
            if len(parts) > 4 and parts[5:6] not in (["main"], [commit_of(name)]):
                return 404, {"X-Error-Code": "RevisionNotFound"}, b""
            kind = parts[4] if len(parts) > 4 else "info"
            return 200, {"Content-Type": "application/json"}, self._listing(name, kind, files)
        content = files["/".join(parts[4:])]
        if method == "GET":
            self.fetched.append("/".join(parts[4:]))
        etag = f'"{hashlib.sha1(content).hexdigest()}"'
        return 200, {"ETag": etag, "X-Repo-Commit": commit_of(name)}, content

    def _listing(self, name: str, kind: str, files: dict[str, bytes]) -> bytes:
        if kind == "tree":
            entries = [
                {"type": "file", "path": f, "size": len(c), "oid": hashlib.sha1(c).hexdigest()}
                for f, c in files.items()
            ]
            return json.dumps(entries).encode()
        siblings = [{"rfilename": f, "size": len(c)} for f, c in files.items()]
        listing = {"id": name, "sha": commit_of(name), "private": False, "siblings": siblings}
        if name in self.architectures:
            listing["gguf"] = {"architecture": self.architectures[name]}
        return json.dumps(listing).encode()


@contextlib.contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, body = hub.answer(self.command, self.path)
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *args: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
