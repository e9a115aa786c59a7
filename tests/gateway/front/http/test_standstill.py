"""A process that did not run for a while, as under SIGSTOP: what came meanwhile is read before connections close."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from sluice.gateway.front.listeners import listen, listener_url
from tests.paths import ROOT
from tests.waiting import PATIENCE_S

IDLE_S = 0.4
NUM_ROUNDS = 3
"""Which of what is due comes first after a stop is chance."""
REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
SERVER = """
import asyncio, socket, sys
import uvloop
from starlette.responses import Response
from sluice.gateway.front.http import protocol, server

server._IDLE_S = server._KEEP_ALIVE_S = float(sys.argv[2])
protocol.HEAD_TIMEOUT_S = server._IDLE_S / 4

async def serve():
    http = server.HttpServer(Response(b"hello"), socket.socket(fileno=int(sys.argv[1])))
    http.start()
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        if line == "drain\\n":
            asyncio.ensure_future(http.drain(60))

uvloop.run(serve())
"""


@contextmanager
def serving_elsewhere() -> Iterator[tuple[subprocess.Popen[str], socket.socket]]:
    """Serve in another process, and yield it with a connection that has had an answer."""
    with listen("127.0.0.1", 0, "--http-port") as listener:
        arguments = [sys.executable, "-c", SERVER, str(listener.fileno()), str(IDLE_S)]
        address = urlsplit(listener_url(listener))
        with subprocess.Popen(
            arguments, stdin=subprocess.PIPE, text=True, cwd=ROOT, pass_fds=(listener.fileno(),)
        ) as process:
            try:
                with socket.create_connection((address.hostname, address.port), PATIENCE_S) as client:
                    client.sendall(REQUEST)
                    read_answer(client)
                    yield process, client
            finally:
                process.kill()


def read_answer(client: socket.socket) -> bytes:
    received = b""
    while not received.endswith(b"hello"):
        piece = client.recv(65536)
        assert piece, "closed without an answer"
        received += piece
    return received


def test_a_request_that_came_to_an_idle_connection_meanwhile_is_answered() -> None:
    with serving_elsewhere() as (process, client):
        for _ in range(NUM_ROUNDS):
            assert b"connection: close" not in ask_while_stopped(process, client)


def test_a_request_that_came_while_the_server_drained_is_answered() -> None:
    with serving_elsewhere() as (process, client):
        assert process.stdin is not None
        print("drain", file=process.stdin, flush=True)
        assert b"connection: close" in ask_while_stopped(process, client)


def ask_while_stopped(process: subprocess.Popen[str], client: socket.socket) -> bytes:
    """Send a request while the server is stopped, for longer than it lets a connection be idle. Return the answer."""
    time.sleep(IDLE_S / 4)  # it waits for what comes
    process.send_signal(signal.SIGSTOP)
    client.sendall(REQUEST)
    time.sleep(2 * IDLE_S)
    process.send_signal(signal.SIGCONT)
    return read_answer(client)
