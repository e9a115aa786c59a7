"""Starts `sluice` commands by a fork of a process that has their imports, which are most of what a start costs.

What starts is a process of its own as ever, with its command's arguments, ports and end. Tests of the start itself, and
those that change the environment, start the command anew: `command_process` in tests/server_process.py.
"""

import contextlib
import gc
import json
import os
import secrets
import select
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache, cached_property
from importlib import import_module
from typing import TextIO

from tests.paths import RILL_TOKENIZER, ROOT

_IMPORTED = (
    "sluice.cli.serve",
    "sluice.gateway.lifecycle",
    "sluice.gateway.assembly",
    "sluice.gateway.answers.batches.service",
    "sluice.gateway.api.v2.grpc.server",
    "sluice.pipelines.llm.backend",
)
_IGNORED = ("PYTEST_CURRENT_TEST",)
"""Variables that tests set and no command reads."""
_MAX_REQUEST_BYTES = 1 << 16
_FIRST_OTHER_FD = 3
_STATUS_BYTES = 4


class ForkedProcess(subprocess.Popen[str]):
    """A child of the fork server with the interface of `subprocess.Popen`. Its standard output is a pipe."""

    def __init__(self, arguments: list[str], pid: int, stdout: TextIO, status_fd: int) -> None:
        self.args = arguments
        self.pid = pid
        self.stdin = self.stderr = None
        self.stdout = stdout
        self.returncode: int | None = None
        self._status_fd = status_fd
        self._child_created = False  # nothing is left to do for Popen's own __del__
        self._communication_started = False

    def __del__(self) -> None:
        os.close(self._status_fd)

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status_fd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            status = os.read(self._status_fd, _STATUS_BYTES)
            assert status, "the fork server has ended"
            self.returncode = int.from_bytes(status, "little", signed=True)
        return self.returncode

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it may end at this moment, as for subprocess.Popen
                os.kill(self.pid, sig)


class ForkServer:
    """The fork server of this process: it begins with the first command, and ends with this process."""

    def __init__(self) -> None:
        self._environment = _environment()

    @cached_property
    def _requests(self) -> socket.socket:
        requests, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            self._process = subprocess.Popen([sys.executable, "-m", __name__], stdin=other.fileno(), cwd=ROOT)
        return requests

    def suits(self, environment: Mapping[str, str] | None) -> bool:
        """Say whether a command is to have the environment in which this server imports."""
        return environment is None and _environment() == self._environment

    def start(self, arguments: list[str], stderr: TextIO) -> ForkedProcess:
        """Start `sluice` with these arguments."""
        output, child_output = os.pipe()
        status, child_status = os.pipe()
        request = json.dumps({"arguments": arguments, "folder": os.getcwd()}).encode()
        try:
            socket.send_fds(self._requests, [request], [child_output, stderr.fileno(), child_status])
        finally:
            os.close(child_output)
            os.close(child_status)
        pid = int(self._requests.recv(_MAX_REQUEST_BYTES))
        return ForkedProcess(arguments, pid, open(output), status)


@cache
def fork_server() -> ForkServer:
    """Return the fork server, whose environment is that of the first call."""
    return ForkServer()


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _IGNORED}  # noqa: TID251 - not read


def main() -> None:
    """Fork on request, and tell how children end. A child runs its command, and ends as if it had been started."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _import_all()
    command = _serve(socket.socket(fileno=os.dup(0)))
    if command is not None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        from sluice.cli.__main__ import main as run

        sys.exit(run(command))


def _import_all() -> None:
    gc.disable()
    for name in _IMPORTED:
        import_module(name)
    from sluice.pipelines.text.tokenizer import Tokenizer

    Tokenizer.load(RILL_TOKENIZER)
    gc.freeze()
    gc.enable()


def _serve(requests: socket.socket) -> list[str] | None:
    """Return None once nobody asks any more, and the arguments of its command in each child."""
    with selectors.DefaultSelector() as waiting:
        waiting.register(requests, selectors.EVENT_READ)
        while True:
            for key, _ in waiting.select():
                if key.fileobj is not requests:
                    waiting.unregister(key.fileobj)
                    _report_end(key.fd, *key.data)
                    continue
                message, fds, _, _ = socket.recv_fds(requests, _MAX_REQUEST_BYTES, 3)
                if not message:
                    return None
                request = json.loads(message)
                *streams, status = fds
                if (pid := os.fork()) == 0:
                    waiting.close()
                    requests.detach()
                    _become_new(request["folder"], *streams)
                    arguments: list[str] = request["arguments"]
                    return arguments
                for fd in streams:
                    os.close(fd)
                waiting.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, status))
                requests.send(str(pid).encode())


def _report_end(pidfd: int, pid: int, status: int) -> None:
    _, ended = os.waitpid(pid, 0)
    with suppress(BrokenPipeError):
        os.write(status, os.waitstatus_to_exitcode(ended).to_bytes(_STATUS_BYTES, "little", signed=True))
    os.close(status)
    os.close(pidfd)


def _become_new(folder: str, stdout: int, stderr: int) -> None:
    """Give a child what a process has at its start: its streams, its folder and its own random marks."""
    for number, fd in enumerate((os.open(os.devnull, os.O_RDONLY), stdout, stderr)):
        os.dup2(fd, number)
    os.closerange(_FIRST_OTHER_FD, os.sysconf("SC_OPEN_MAX"))
    os.chdir(folder)
    from sluice.gateway.front.http import request

    request._PROCESS_MARK = secrets.token_hex(len(request._PROCESS_MARK) // 2)


if __name__ == "__main__":
    main()
