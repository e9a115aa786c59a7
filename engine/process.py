"""The engine as a process of its own: `python -m engine.process ENDPOINT PARENT_PID LOG_LEVEL CONFIG_JSON`.

It binds a ZeroMQ ROUTER socket; each client is a DEALER. The loop itself polls the socket between
steps, so there is no second thread that would fight it for Python's lock.
"""

import logging
import os
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import zmq

from engine.config import EngineConfig
from engine.errors import ErrorCode, SluiceError
from engine.executor import InflightExecutor, engine_info
from engine.frames import Command, LoadFailed, Ready, Report, StepFrame, Submit
from engine.runners.base import Runner
from engine.runners.loader import load_draft_runner, load_runner
from engine.types import RequestFailed, TokenEvent

log = logging.getLogger(__name__)

PARENT_CHECK_S = 1.0


class Transport:
    """The engine's end of the socket: commands in, one frame a step out to each client concerned."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        # No bound here: a dropped token event is a broken stream, and what can pile up is bounded by
        # the max_tokens of the sequences that run.
        self._socket.set_hwm(0)
        self._socket.linger = 1000
        self._socket.bind(endpoint)
        self._clients: set[bytes] = set()
        self._client_of: dict[int, bytes] = {}
        self._decoder = msgspec.msgpack.Decoder(Command)
        self._encoder = msgspec.msgpack.Encoder()

    def await_client(self) -> None:
        """Wait for the first client's greeting, an empty message."""
        client, _ = self._socket.recv_multipart()
        self._clients.add(client)

    def receive(self, timeout_s: float) -> list[Command]:
        commands: list[Command] = []
        if timeout_s > 0 and not self._socket.poll(int(timeout_s * 1000)):
            return commands
        while True:
            try:
                client, payload = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return commands
            self._clients.add(client)
            if payload:
                commands.append(self._decode(client, payload))

    def _decode(self, client: bytes, payload: bytes) -> Command:
        command: Command = self._decoder.decode(payload)
        if isinstance(command, Submit):
            self._client_of[command.stream_id] = client
        return command

    def emit(self, frame: StepFrame) -> None:
        """Send each client its part of the frame; those without news get the statistics as a heartbeat."""
        events: dict[bytes, list[TokenEvent]] = defaultdict(list)
        failures: dict[bytes, list[RequestFailed]] = defaultdict(list)
        for event in frame.events:
            is_last = event.finish_reason is not None
            events[self._client(event.stream_id, is_last)].append(event)
        for failure in frame.failures:
            failures[self._client(failure.stream_id, True)].append(failure)
        for client in self._clients:
            self.send(client, StepFrame(events[client], failures[client], frame.stats))

    def _client(self, stream_id: int, is_last: bool) -> bytes:
        return self._client_of.pop(stream_id) if is_last else self._client_of[stream_id]

    def send(self, client: bytes, report: Report) -> None:
        self._socket.send_multipart((client, self._encoder.encode(report)))

    def send_all(self, report: Report) -> None:
        for client in self._clients:
            self.send(client, report)

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def serve(config: EngineConfig, transport: Transport, load: Callable[[EngineConfig], Runner]) -> int:
    """Load, report, run until told to stop. Returns the exit code."""
    started = time.perf_counter()
    try:
        runner = load(config)
        draft_runner = load_draft_runner(config, runner.info)
    except SluiceError as error:
        transport.send_all(LoadFailed(error.code, error.message))
        return 1
    except Exception as error:
        log.exception("loading %s failed", config.model_path)
        transport.send_all(LoadFailed(ErrorCode.INTERNAL, f"loading {config.model_path} failed: {error}"))
        return 1
    try:
        _run(runner, draft_runner, config, transport, time.perf_counter() - started)
    finally:
        runner.close()
        if draft_runner is not None:
            draft_runner.close()
    return 0


def _run(
    runner: Runner, draft_runner: Runner | None, config: EngineConfig, transport: Transport, load_seconds: float
) -> None:
    executor = InflightExecutor(runner, config, transport, transport.emit, draft_runner=draft_runner)
    transport.send_all(Ready(engine_info(runner, config, load_seconds)))
    executor.run()


def _end_with_parent(parent: int, socket_file: Path) -> None:
    """Never outlive the gateway: an engine without one would keep its memory and its cores for nobody.

    The socket and its folder, which the gateway would have removed, go too.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_CHECK_S)
        with suppress(OSError):
            socket_file.unlink(missing_ok=True)
            socket_file.parent.rmdir()
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def main(argv: list[str], load: Callable[[EngineConfig], Runner] = load_runner) -> int:
    """Serve the runner that `load` makes, until told to stop or left alone. Returns the exit code."""
    endpoint, parent, log_level, config_json = argv
    logging.basicConfig(level=log_level, format="%(asctime)s %(levelname)s %(name)s [engine] %(message)s")
    # The gateway decides when the engine ends; a terminal's Ctrl-C reaches both.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _end_with_parent(int(parent), Path(endpoint.removeprefix("ipc://")))
    transport = Transport(endpoint)
    try:
        transport.await_client()
        return serve(msgspec.json.decode(config_json, type=EngineConfig), transport, load)
    finally:
        transport.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
