"""A stand-in for `sluice engine`: it listens at its endpoint, answers the probe, and drains at SIGTERM for as long as a
stream is open. It imports nothing but the standard library, so that it starts fast."""

import signal
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import FrameType


class Probe(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def value(flag: str) -> str:
    return sys.argv[sys.argv.index(flag) + 1]


def main() -> None:
    is_draining = threading.Event()
    streams: set[threading.Thread] = set()

    def drain(signum: int, frame: FrameType | None) -> None:
        is_draining.set()

    signal.signal(signal.SIGTERM, drain)
    host, _, port = value("--listen").removeprefix("tcp://").rpartition(":")
    probes = ThreadingHTTPServer(("127.0.0.1", int(value("--health-port"))), Probe)
    threading.Thread(target=probes.serve_forever, daemon=True).start()
    listener = socket.create_server((host, int(port)))
    listener.settimeout(0.1)
    while not (is_draining.is_set() and not any(each.is_alive() for each in streams)):
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        thread = threading.Thread(target=stream, args=(connection,), daemon=True)
        thread.start()
        streams.add(thread)


def stream(connection: socket.socket) -> None:
    """Echo until the client says that it has enough."""
    with connection:
        while data := connection.recv(1024):
            connection.sendall(data)


if __name__ == "__main__":
    main()
