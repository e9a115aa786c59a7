"""`sluice top` over a real server: a frame for pipes, and the screen with its keys in a terminal of its own."""

import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from select import select
from time import monotonic

import pytest
from rich.console import Console

from sluice.cli.server import RunningServer
from sluice.cli.top import ORDERS, Top, View, command
from tests.server_process import MODEL, ServerProcess
from tests.waiting import PATIENCE_S

SAMPLE = {"sequences": {"items": [{"id": "a", "age_s": 1.0}, {"id": "b", "age_s": 3.0}, {"id": "c", "age_s": 2.0}]}}


class Terminal:
    """A terminal in which the command runs."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.written = ""

    def type(self, keys: str) -> None:
        self.written = ""
        os.write(self._descriptor, keys.encode())

    def wait_for(self, text: str) -> None:
        until = monotonic() + PATIENCE_S
        while text not in self.written:
            assert monotonic() < until, self.written[-4000:]
            if select([self._descriptor], [], [], 0.2)[0]:
                try:
                    self.written += os.read(self._descriptor, 1 << 16).decode(errors="replace")
                except OSError:  # the command has ended
                    assert text in self.written, self.written[-4000:]


@contextmanager
def top(url: str) -> Iterator[tuple[Terminal, "subprocess.Popen[bytes]"]]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 140, 0, 0))
    arguments = [sys.executable, "-m", "sluice.cli", "top", url, "--interval", "0.25"]
    environment = {**os.environ, "TERM": "xterm"}  # noqa: TID251 - a command of its own
    process = subprocess.Popen(arguments, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    try:
        yield Terminal(ours), process
    finally:
        process.kill()
        process.wait()
        os.close(ours)


@contextmanager
def open_stream(server: ServerProcess) -> Iterator[list[str]]:
    """Keep a long stream open; its lines come into the list."""
    lines: list[str] = []
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 20_000, "ignore_eos": True, "stream": True}
    begun = threading.Event()

    def read() -> None:
        with server.client() as client, client.stream("POST", "/v1/completions", json=body) as response:
            for line in response.iter_lines():
                lines.append(line)
                begun.set()

    thread = threading.Thread(target=read)
    thread.start()
    assert begun.wait(PATIENCE_S), "no token has come"
    yield lines
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_one_frame_for_pipes(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["--once", "--interval", "0.25", server.base_url]) == 0
    written = capsys.readouterr().out
    assert "ready" in written and MODEL in written and "serving" in written and "sorted by age; 0 open" in written
    assert "\x1b" not in written, "no colours where there is no terminal"


def test_a_sequence_is_cancelled_from_the_screen(server: ServerProcess) -> None:
    with open_stream(server) as lines, top(server.base_url) as (terminal, process):
        terminal.wait_for("gen-")
        terminal.type("c")
        terminal.wait_for("select a sequence first")
        terminal.type("p")
        terminal.wait_for("PAUSED")
        terminal.type("ps")
        terminal.wait_for("sorted by generated")
        terminal.type("\x1b[Bc")  # one read may bring both
        terminal.wait_for("is cancelled")
        terminal.type("q")
        assert process.wait(PATIENCE_S) == 0
    assert any("cancelled by an administrator" in line for line in lines)


def test_keys_come_several_at_once_and_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []
    top = Top(RunningServer("http://127.0.0.1:1"), 1.0, Console(file=io.StringIO()))
    monkeypatch.setattr(top, "_on_key", found.append)
    for typed in ("\x1b[Bc", "\x1b", "[Aq", "\x1b[", "B\x1bOA", "\x1b", "p"):
        top._on_keys(typed)
    assert found == ["\x1b[B", "c", "\x1b[A", "q", "\x1b[B", "\x1bOA", "\x1b", "p"]


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["--once", "http://127.0.0.1:1"]) == 1
    assert "cannot be reached" in capsys.readouterr().err


def test_the_selection_moves_in_the_order_shown() -> None:
    view = View()
    assert ORDERS[view.order].name == "age"
    moves = []
    for step in (1, 1, 1, 1, -1):
        view.move(SAMPLE, step)
        moves.append(view.selected)
    assert moves == ["b", "c", "a", "a", "c"], "the first key selects the first row"
