"""A small server that answers like a Hugging Face hub."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import urlsplit

COMMIT = "c" * 40
REVISION = "v1"
Files = Mapping[str, bytes]


@dataclass(slots=True)
class FakeHub:
    """The hub's address, and the files that were fetched from it."""

    url: str
    fetched: list[str] = field(default_factory=list)


@contextmanager
def fake_hub(models: Mapping[str, Files], gated: str = "") -> Iterator[FakeHub]:
    """Serves `models` (ORG/NAME to their files), each in one revision; the model `gated` asks for a licence."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.answer(with_body=True)

        def do_HEAD(self) -> None:
            self.answer(with_body=False)

        def answer(self, *, with_body: bool) -> None:
            parts = urlsplit(self.path).path.strip("/").split("/")
            if parts[:2] == ["api", "models"]:
                self.describe("/".join(parts[2:4]), parts[4:])
            elif parts[2:3] == ["resolve"]:
                self.send_file("/".join(parts[:2]), "/".join(parts[4:]), with_body=with_body)
            else:
                self.send(404, b"", {})

        def describe(self, model: str, what: list[str]) -> None:
            if model == gated:
                self.send(403, b"", {"X-Error-Code": "GatedRepo"})
            elif model not in models:
                self.send(404, b"", {"X-Error-Code": "RepoNotFound"})
            elif what[1:] not in ([], ["main"], [REVISION], [COMMIT]):
                self.send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            elif what[:1] == ["tree"]:
                entries = [
                    {"type": "file", "path": path, "size": len(content), "oid": _digest(content)}
                    for path, content in models[model].items()
                ]
                self.send_json(entries)
            else:
                siblings = [{"rfilename": path} for path in models[model]]
                self.send_json({"id": model, "sha": COMMIT, "siblings": siblings})

        def send_file(self, model: str, path: str, *, with_body: bool) -> None:
            content = models[model][path]
            if with_body:
                hub.fetched.append(path)
            self.send(200, content, {"ETag": f'"{_digest(content)}"', "X-Repo-Commit": COMMIT}, with_body=with_body)

        def send_json(self, value: object) -> None:
            self.send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def send(self, status: int, body: bytes, headers: Mapping[str, str], *, with_body: bool = True) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub = FakeHub(f"http://127.0.0.1:{server.server_address[1]}")
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
