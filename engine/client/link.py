"""The socket to an engine's process, and the clients that live at its end."""

import asyncio
from abc import abstractmethod
from collections.abc import Iterable
from contextlib import suppress
from time import perf_counter

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from sluice.engine.client.base import EngineClient
from sluice.engine.client.supervision import Clock
from sluice.engine.client.viewing import EngineViewer
from sluice.engine.config import EngineConfig
from sluice.engine.frames import Attach, Command, EngineView, PrefixChanges, ProbeTurn, Ready, Report, StepFrame
from sluice.engine.process.curve import ENGINE_SILENT_MS, ClientCurve, watch_connection
from sluice.errors import ErrorCode, SluiceError

WATCH_S = 0.1
"""Seconds between two checks of the engine's heartbeat."""
DRAIN_S = 0.02
"""How long the socket of an engine that is lost must be silent until all its messages are read."""
CONNECT_MS = 2000
_REFUSALS: dict[int, str] = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it does not allow the key of this client",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it wants CURVE keys where this client has none, or the other way round",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it did not answer the handshake, or its public key is another one",
}
_POLLIN = int(zmq.POLLIN)  # pyzmq's enumeration takes microseconds to compare


class EngineLink:
    """A DEALER socket on the event loop, connected to one engine. It is `open`ed once and `close`d once."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Report)
        self._socket = context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        self._monitor: zmq.Socket[bytes] | None = None
        self._arrival: asyncio.Future[None] | None = None
        self._disconnection: asyncio.Future[None] | None = None
        self.refusal: str | None = None
        """Why the engine has refused the connection; None where it has not."""

    def open(self, endpoint: str, curve: ClientCurve | None = None) -> None:
        """Connect, over TCP with the keys of `curve`. An engine that is not there yet gets what is sent once it is."""
        if endpoint.startswith("tcp://"):
            watch_connection(self._socket, endpoint, ENGINE_SILENT_MS)
            self._socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
        if curve is not None:
            self._socket.curve_publickey, self._socket.curve_secretkey = curve.keys
            self._socket.curve_serverkey = curve.server
        # pyzmq's own asyncio sockets take several times as long for a message.
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._on_change)
        self._socket.connect(endpoint)

    def greet(self) -> None:
        """Tell the engine that its launcher is there."""
        self._socket.send(b"", zmq.NOBLOCK)

    async def receive(self) -> Report:
        """Return the engine's next report. One task at a time may wait for it."""
        while True:
            try:
                report: Report = self._decoder.decode(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                self._arrival = asyncio.get_running_loop().create_future()
                await self._arrival
            else:
                return report

    async def read_remaining(self) -> list[Report]:
        """Return the unread reports of an engine that is lost, as far as they can be decoded."""
        reports = []
        with suppress(TimeoutError, ValueError, RecursionError):
            while True:
                async with asyncio.timeout(DRAIN_S):
                    reports.append(await self.receive())
        return reports

    def send(self, command: Command | Attach) -> None:
        self._socket.send(self._encoder.encode(command), zmq.NOBLOCK)  # no high-water mark: it never waits
        self._on_change()

    def close(self, linger_s: float = 0.0) -> None:
        """Free the socket, within `linger_s` of which unsent commands still leave. Idempotent."""
        if self._socket.closed:
            return
        self._socket.linger = int(linger_s * 1000)
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._socket.fileno())
        if self._monitor is not None:
            loop.remove_reader(self._monitor.fileno())
            self._socket.disable_monitor()
            self._monitor.close(0)
        self._socket.close()

    def disconnection(self) -> "asyncio.Future[None]":
        """Return what is done once the engine's end of the socket is gone. To be called before `open`."""
        if self._disconnection is None:
            self._disconnection = asyncio.get_running_loop().create_future()
            self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | sum(_REFUSALS))
            asyncio.get_running_loop().add_reader(self._monitor.fileno(), self._on_disconnect)
            self._on_disconnect()  # ZeroMQ signals a change only to who has seen that there was nothing before
        return self._disconnection

    def _on_disconnect(self) -> None:
        assert self._monitor is not None
        assert self._disconnection is not None
        while int(self._monitor.get(zmq.EVENTS)) & _POLLIN:
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
            self.refusal = self.refusal or _REFUSALS.get(event)
            if not self._disconnection.done():
                self._disconnection.set_result(None)

    def _on_change(self) -> None:
        """Wake `receive` where something has come. ZeroMQ signals each change once, and sending takes the signal."""
        has_message = int(self._socket.get(zmq.EVENTS)) & _POLLIN
        if has_message and self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)


class LinkedEngineClient(EngineClient):
    """A client of an engine in another process, which it notices to be silent."""

    can_restart = True

    def __init__(self, config: EngineConfig, heartbeat_timeout_s: float, clock: Clock = perf_counter) -> None:
        super().__init__(config, clock)
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self.viewer = EngineViewer(self._send)

    def _begin_recovery(self) -> None:
        super()._begin_recovery()
        if self.viewer is not None:
            self.viewer.forget()

    def restart_prefixes(self) -> None:
        if self.on_prefixes is not None and self._info is not None and not self.is_restarting and self.failure is None:
            self._send_attach(Attach())
            self._ask_prefixes()

    def _ask_prefixes(self) -> None:
        if self._info is not None and not self.is_restarting and self.failure is None:
            self._send_attach(self._attachment())

    def _attachment(self) -> Attach:
        return Attach(wants_prefixes=self.on_prefixes is not None)

    @abstractmethod
    def _send_attach(self, command: Attach) -> None:
        """Send what a client says beside commands."""

    @abstractmethod
    async def _receive(self) -> Report:
        """Return the engine's next report."""

    async def _read(self) -> None:
        """Process the engine's reports until cancelled."""
        while True:
            self._process_reports((await self._receive(),))

    def _process_reports(self, reports: Iterable[Report]) -> None:
        for report in reports:
            match report:
                case StepFrame():
                    self._on_frame(report)
                case ProbeTurn(stream_id):
                    self._on_probe_turn(stream_id)
                case PrefixChanges():
                    if self.on_prefixes is not None:
                        self.on_prefixes(report)
                case EngineView() if self.viewer is not None:
                    self.viewer.take(report)
                case Ready():  # it had taken this client for dead, and cancelled its requests
                    raise SluiceError(ErrorCode.UNAVAILABLE, "it has forgotten this client")

    async def _until_silent(self) -> None:
        """Return when the engine has sent nothing for too long."""
        while self.heartbeat_age_s() < self._heartbeat_timeout_s:
            before = self._clock()
            await asyncio.sleep(WATCH_S)
            # Time in which this process itself did not run, or was late to read, does not count as silence.
            now = self._clock()
            self._last_report = min(self._last_report + max(now - before - 2 * WATCH_S, 0.0), now)
