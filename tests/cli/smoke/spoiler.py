"""A server between client and server, which changes what answers say."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

_OWN_HEADERS = ("content-length", "transfer-encoding", "connection", "date", "server")


class Spoiler:
    """Passes requests on, and replaces a text in the answers of the paths that begin as `replaced` says."""

    def __init__(self, url: str, target: str) -> None:
        self.url = url
        self.target = target
        self.replaced = ("", b"", b"")

    def spoiled(self, path: str, content: bytes) -> bytes:
        prefix, old, new = self.replaced
        return content.replace(old, new) if path.startswith(prefix) else content


@contextmanager
def spoil(target: str) -> Iterator[Spoiler]:
    """Serve the answers of `target`, on a port of its own."""
    client = httpx.Client(timeout=60.0)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
            headers["accept-encoding"] = "identity"
            with client.stream(self.command, target + self.path, content=body, headers=headers) as answer:
                self.send_response(answer.status_code)
                for name, value in answer.headers.items():
                    if name not in _OWN_HEADERS:
                        self.send_header(name, value)
                self.send_header("connection", "close")
                self.end_headers()
                # The pieces are passed on as they come: a client that leaves is then noticed.
                for piece in answer.iter_raw():
                    try:
                        self.wfile.write(spoiler.spoiled(self.path, piece))
                    except OSError:
                        break

        do_GET = do_POST = do_PUT = do_DELETE = handle_any

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    spoiler = Spoiler(f"http://127.0.0.1:{server.server_port}", target)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), name="spoiler")
    thread.start()
    try:
        yield spoiler
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        client.close()
