"""The engine's side of the socket to its clients."""

from collections import defaultdict

import msgspec
import zmq

from engine.frames import Command, Report, StepFrame, Submit
from engine.types import RequestFailed, TokenEvent


class Transport:
    """A ZeroMQ ROUTER socket: receives commands, and sends one frame a step to each client, which is a DEALER."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        # No limit, because a dropped event breaks a stream. The max_tokens of the running sequences bound the backlog.
        self._socket.set_hwm(0)
        self._socket.linger = 1000
        self._socket.bind(endpoint)
        self._clients: set[bytes] = set()
        self._client_of: dict[int, bytes] = {}
        self._decoder = msgspec.msgpack.Decoder(Command)
        self._encoder = msgspec.msgpack.Encoder()

    def fileno(self) -> int:
        """Return a file descriptor for an event loop, readable when something has changed. It signals each change once,
        and sending resets it. So the caller must `receive` until nothing comes, and after each send."""
        return int(self._socket.fileno())

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
        """Send each client its part of the frame. Clients without events get the statistics as a heartbeat."""
        events: dict[bytes, list[TokenEvent]] = defaultdict(list)
        failures: dict[bytes, list[RequestFailed]] = defaultdict(list)
        for event in frame.events:
            is_last = event.finish_reason is not None
            events[self._client(event.stream_id, is_last)].append(event)
        for failure in frame.failures:
            failures[self._client(failure.stream_id, True)].append(failure)
        for client in self._clients:
            self.send(client, StepFrame(events[client], failures[client], frame.stats, frame.adapters))

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
