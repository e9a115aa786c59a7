"""The cache transceiver: a context server's blocks go to the generation server that asks for them by the request's id.

What goes over the wire are the tokens of the context, of which the stand-in's next token is a hash. As with the real
one the context server keeps the blocks until they are fetched, or for `kv_transfer_timeout_ms`; who asks for an id that
it does not have waits for as long.
"""

import json
import socket
import socketserver
import threading
import time
from collections import deque
from typing import Any

from .settings import settings

_FAILED = "Error in kv cache transfer for generation requests"


class Transceiver:
    """Offers are made and taken back by the worker's thread; other engines fetch them by a socket."""

    def __init__(self, timeout_ms: int | None) -> None:
        self._limit_s = None if timeout_ms is None else timeout_ms / 1000
        self._changed = threading.Condition()
        self._offers: dict[int, tuple[int, list[int], float]] = {}
        self._fetched: deque[int] = deque()
        self._arrived: deque[tuple[int, list[int] | str]] = deque()
        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._address = "{}:{}".format(*self._server.server_address[:2]).encode()
        threading.Thread(target=self._server.serve_forever, name="stand-in-transceiver", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def offer(self, request_id: int, transfer_id: int, token_ids: list[int]) -> bytes:
        """Keep a request's blocks for a generation server. Returns the opaque state, by which it finds them."""
        with self._changed:
            if settings().claims("transfer_lost"):
                transfer_id = -transfer_id
            self._offers[transfer_id] = request_id, token_ids, time.monotonic()
            self._changed.notify_all()
        return self._address

    def released(self) -> list[int]:
        """Return the requests whose blocks have been fetched, or have been kept for too long."""
        with self._changed:
            now = time.monotonic()
            for transfer_id, (request_id, _, since) in [*self._offers.items()]:
                if self._limit_s is not None and now - since > self._limit_s:
                    del self._offers[transfer_id]
                    self._fetched.append(request_id)
            released = list(self._fetched)
            self._fetched.clear()
            return released

    def fetch(self, request_id: int, params: Any) -> None:
        """Begin to fetch a request's blocks; `arrived` tells of it."""
        threading.Thread(target=self._fetch, args=(request_id, params), daemon=True).start()

    def arrived(self) -> list[tuple[int, list[int] | str]]:
        """Return the requests whose blocks have come, with the tokens of their contexts, or why they have not."""
        with self._changed:
            arrived = list(self._arrived)
            self._arrived.clear()
            return arrived

    def _fetch(self, request_id: int, params: Any) -> None:
        transfer_id = getattr(params, "disagg_request_id", None) or params.ctx_request_id
        try:
            host, _, port = (params.opaque_state or b"").decode().rpartition(":")
            with socket.create_connection((host, int(port)), self._limit_s) as connection:
                connection.sendall(b"%d\n" % transfer_id)
                answer: list[int] | str = json.loads(connection.makefile().readline() or json.dumps(_FAILED))
        except TimeoutError:
            answer = f"Request {request_id} timed out"
        except (OSError, ValueError):
            answer = _FAILED
        with self._changed:
            self._arrived.append((request_id, answer))

    def _take(self, transfer_id: int) -> list[int] | None:
        with self._changed:
            patience_s = None if self._limit_s is None else 2 * self._limit_s  # who asks gives up before
            if not self._changed.wait_for(lambda: transfer_id in self._offers, patience_s):
                return None
            request_id, token_ids, _ = self._offers.pop(transfer_id)
            self._fetched.append(request_id)
            return token_ids

    def _handler(self) -> type[socketserver.StreamRequestHandler]:
        transceiver = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                token_ids = transceiver._take(int(self.rfile.readline()))
                if token_ids is not None:
                    self.wfile.write(json.dumps(token_ids).encode() + b"\n")

        return Handler


def make_transceiver(args: Any) -> Transceiver | None:
    """Make the transceiver that the arguments of an LLM ask for."""
    config = args.cache_transceiver_config
    if config is None or config.backend is None:
        return None
    return Transceiver(config.kv_transfer_timeout_ms)
