"""Starts and watches one engine of a fleet: the part of an actor that needs no Ray."""

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from enum import StrEnum

import httpx
import msgspec

from sluice.addresses import host_and_port

log = logging.getLogger(__name__)

HEALTH_TIMEOUT_S = 2.0
FIRST_DELAY_S, LONGEST_DELAY_S = 1.0, 60.0
"""Delay before an engine that has ended is started again; each further one is twice as long, up to the longest."""
STABLE_S = 60.0
"""An engine that ran for this long is started again after the first delay."""
END_S = 10.0
"""Seconds that a killed engine may take to end."""


class HostedEngineState(StrEnum):
    """The states of a fleet's engine. Only a ready one is a member."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    ENDED = "ended"


class EngineStatus(msgspec.Struct, frozen=True):
    """An engine as its host sees it. `address` is where gateways reach it, "" before its first start."""

    state: HostedEngineState
    address: str = ""
    pid: int = 0
    num_restarts: int = 0
    problem: str = ""


class EngineHost:
    """Runs `command` in this Python as one engine of a fleet at `host`, and starts it again where it ends.

    It gets `--listen` and `--health-port`, each with a free port. It is one of `sluice engine`: it answers
    /health/ready and drains at SIGTERM. All methods are for one thread and return at once.
    """

    def __init__(self, command: Sequence[str], host: str) -> None:
        self._command = tuple(command)
        self._host = host
        self._process: subprocess.Popen[bytes] | None = None
        self._address = ""
        self._health_url = ""
        self._started_at = 0.0
        self._delay_s = 0.0
        self._next_start = 0.0
        self._num_starts = 0
        self._is_draining = False
        self._problem = ""

    def status(self) -> EngineStatus:
        """Look at the engine, and start it where it shall run and does not."""
        if self._process is not None and (code := self._process.poll()) is not None:
            self._on_exit(code)
        if self._process is None and self._is_draining:
            return self._status(HostedEngineState.ENDED)
        if self._process is None and time.monotonic() >= self._next_start:
            self._start()
        if self._is_draining:
            return self._status(HostedEngineState.DRAINING)
        return self._status(HostedEngineState.READY if self._is_ready() else HostedEngineState.STARTING)

    def drain(self) -> None:
        """Tell the engine to finish its requests and end. It is not started again. Idempotent."""
        if not self._is_draining and self._process is not None:
            self._process.send_signal(signal.SIGTERM)
        self._is_draining = True

    def kill(self) -> None:
        """End the engine now."""
        self._is_draining = True
        if self._process is not None:
            self._process.kill()
            self._process.wait(END_S)

    def _status(self, state: HostedEngineState) -> EngineStatus:
        pid = 0 if self._process is None else self._process.pid
        return EngineStatus(state, self._address, pid, max(self._num_starts - 1, 0), self._problem)

    def _start(self) -> None:
        port, health_port = free_port(self._host), free_port("127.0.0.1")
        self._address = f"tcp://{host_and_port(self._host, port)}"
        self._health_url = f"http://127.0.0.1:{health_port}/health/ready"
        where = ("--listen", self._address, "--health-port", str(health_port))
        leash = (sys.executable, "-m", "sluice.cli.fleet.leash", str(os.getpid()))
        # Its session is its own, so that a Ctrl-C on the node's terminal does not reach it.
        self._process = subprocess.Popen(
            (*leash, sys.executable, *self._command, *where), stdin=subprocess.DEVNULL, start_new_session=True
        )
        self._started_at = time.monotonic()
        self._num_starts += 1

    def _on_exit(self, code: int) -> None:
        self._process = None
        if self._is_draining:
            return
        is_stable = time.monotonic() - self._started_at >= STABLE_S
        self._delay_s = FIRST_DELAY_S if is_stable else min(max(2 * self._delay_s, FIRST_DELAY_S), LONGEST_DELAY_S)
        self._next_start = time.monotonic() + self._delay_s
        self._problem = f"the engine ended with code {code}; its own lines in the log say more"
        log.error("%s; another starts in %g s", self._problem, self._delay_s)

    def _is_ready(self) -> bool:
        if self._process is None:
            return False
        try:
            is_ready = httpx.get(self._health_url, timeout=HEALTH_TIMEOUT_S, trust_env=False).status_code == 200
        except httpx.TransportError:
            return False
        if is_ready:
            self._problem = ""
        return is_ready


def free_port(host: str) -> int:
    """Return a free port of `host`. An engine that finds it taken after all is started again."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
