"""The engine's side of the socket to its clients."""

import errno
import logging
import secrets
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec
import zmq

from sluice.engine.arrays import ByteArray
from sluice.engine.config import Listening
from sluice.engine.frames import (
    CLIENT_SILENT_S,
    AskProbe,
    AskView,
    Attach,
    BlockPiece,
    Cancel,
    Command,
    Drain,
    EngineView,
    FetchBlocks,
    ProbeTurn,
    Ready,
    Report,
    Shutdown,
    StepFrame,
    Submit,
    hand_back_cancelled,
    request_failed,
)
from sluice.engine.process.curve import CLIENT_SILENT_MS, DOMAIN, ClientKeys, RareLog, read_pair, watch_connection
from sluice.engine.process.prefix_feed import FollowedIndex, PrefixFeed
from sluice.engine.statistics import EngineStats
from sluice.engine.types import RequestFailed, TokenEvent
from sluice.errors import ErrorCode, SluiceError

log = logging.getLogger(__name__)

STATS_S = 0.05
"""How old the statistics may be that a client without events has, where there are several clients."""
MAX_UNSENT = 4096
"""Frames that wait for a client over TCP, which takes no more of them. It is dropped with the next one."""
MAX_UNREAD = 4096
"""Commands of a client over TCP that wait to be read. The rest waits at the client."""
MAX_READ = 256
"""Most messages read at once, so that no client stops the others, however much it sends."""
MAX_COMMAND_BYTES = 256 << 20
"""A longer command over TCP ends its connection. Images and long prompts stay far below."""
_NO_STATS = EngineStats(0, 0, 0, 0, 0, 0, 0.0, 0.0, 0, 0)


class ProbeTurns:
    """Gives clients their turns to submit probes, in the order in which they ask, one at a time."""

    def __init__(self, give: Callable[[bytes, int], None]) -> None:
        self._give = give
        self._asked: deque[tuple[bytes, int]] = deque()
        """Clients with the stream that each asks for; the first has the turn."""

    def __bool__(self) -> bool:
        return bool(self._asked)

    def ask(self, client: bytes, stream_id: int) -> None:
        self._asked.append((client, stream_id))
        if len(self._asked) == 1:
            self._give(client, stream_id)

    def end(self, stream_id: int) -> None:
        """End the turn of a stream, or its waiting for one."""
        self._keep(lambda asked: asked[1] != stream_id)

    def forget(self, client: bytes) -> None:
        """End the turns of a client that is gone."""
        self._keep(lambda asked: asked[0] != client)

    def _keep(self, is_kept: Callable[[tuple[bytes, int]], bool]) -> None:
        if not self._asked:
            return
        first = self._asked[0]
        self._asked = deque(filter(is_kept, self._asked))
        if self._asked and self._asked[0] != first:
            self._give(*self._asked[0])


class Transport:
    """A ZeroMQ ROUTER socket: receives commands, and sends one frame a step to each client, which is a DEALER.

    The first client is the launcher, whose process the engine never outlives. Others attach and say that they live,
    over the launcher's own endpoint or over TCP (`listen`). What one of those sends or leaves unread harms no other.
    """

    def __init__(
        self, endpoint: str, context: zmq.Context[Any] | None = None, clock: Callable[[], float] = perf_counter
    ) -> None:
        self._clock = clock
        self._context = context or zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        # No limit, because a dropped event breaks a stream. The max_tokens of the running sequences bound the backlog.
        self._socket.set_hwm(0)
        self._socket.linger = 1000
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # it says which clients cannot be reached
        self._socket.bind(endpoint)
        self._keys: ClientKeys | None = None
        self._endpoints: tuple[str, ...] = ()
        self._clients: set[bytes] = set()
        self._heard: dict[bytes, float] = {}
        """When each attached client last said that it lives."""
        self._sent: dict[bytes, float] = {}
        """When each client last got a frame."""
        self._client_of: dict[int, bytes] = {}
        self._renamed: dict[int, int] = {}
        """The client's own number of a stream whose number was taken, by the engine's."""
        self._questions: dict[int, tuple[bytes, int]] = {}
        """Engines that have asked for blocks, and the numbers that they have given, by this engine's."""
        self._turns = ProbeTurns(self._give_turn)
        self._due: list[Command] = []
        """Commands that no client has sent."""
        self.has_more = False
        """Whether `receive` has left messages for the next call."""
        self._ready: Ready | None = None
        self._engine_id = secrets.randbits(62)
        self._stats = _NO_STATS
        self._index: FollowedIndex | None = None
        self._prefixes: PrefixFeed | None = None
        """Holds the changes of the index for clients; None while none has asked."""
        self._view: Callable[[AskView], EngineView] | None = None
        self._is_draining = False
        self._is_ending = False
        """Whether the launcher ends the engine, which cancels what it still has."""
        self._decoder = msgspec.msgpack.Decoder(Command | Attach)
        self._encoder = msgspec.msgpack.Encoder()
        self._rare_log = RareLog()

    def listen(self, listening: Listening | None) -> None:
        """Take clients over TCP. Raises INVALID for keys or a folder that cannot be read, UNAVAILABLE for an endpoint
        that cannot be bound."""
        if listening is None:
            return
        if listening.curve_key is not None and listening.allowed_clients is not None:
            keys = read_pair(Path(listening.curve_key))
            self._keys = ClientKeys(self._context, Path(listening.allowed_clients))
            # Options hold for the endpoints bound after them, so the launcher's stays without keys.
            self._socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
            self._socket.curve_server = True
            self._socket.curve_publickey, self._socket.curve_secretkey = keys
        self._socket.sndhwm, self._socket.rcvhwm = MAX_UNSENT, MAX_UNREAD
        self._socket.maxmsgsize = MAX_COMMAND_BYTES
        bound = []
        for endpoint in listening.endpoints:
            watch_connection(self._socket, endpoint, CLIENT_SILENT_MS)
            try:
                self._socket.bind(endpoint)
            except zmq.ZMQError as error:
                message = f"the engine cannot listen at {endpoint}: {error.strerror}"
                raise SluiceError(ErrorCode.UNAVAILABLE, message) from error
            bound.append(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))
        self._endpoints = tuple(bound)

    def offer_prefixes(self, index: FollowedIndex) -> None:
        """Tell clients that want to know it what is in the prefix index. It changes on this thread alone."""
        self._index = index

    def offer_view(self, view: Callable[[AskView], EngineView]) -> None:
        """Answer clients that want to see the engine. `view` is called on this thread, while it receives."""
        self._view = view

    def filenos(self) -> tuple[int, ...]:
        """Return file descriptors for an event loop, readable when something has changed. They signal each change once,
        and sending resets that. So the caller must `receive` until there is no more, and after each send."""
        sockets = (self._socket,) if self._keys is None else (self._socket, self._keys.socket)
        return tuple(int(socket.fileno()) for socket in sockets)

    def await_launcher(self) -> None:
        """Wait for the launcher's greeting, an empty message. To be called before `listen`."""
        while not self._clients:
            client, *payload = self._socket.recv_multipart()
            if payload != [b""]:
                self._take(client, payload)
            else:
                self._clients.add(client)

    def receive(self, timeout_s: float) -> list[Command]:
        commands, self._due = self._due, []
        if not commands and timeout_s > 0:
            self._wait(timeout_s)
        elif self._keys is not None:
            self._keys.answer()
        for _ in range(MAX_READ):
            try:
                client, *payload = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                self.has_more = False
                return commands
            command = self._take(client, payload)
            if command is not None:
                commands.append(command)
            if self._due:  # what a client's message has caused comes in its place
                commands, self._due = [*commands, *self._due], []
        self.has_more = True
        return commands

    def _wait(self, timeout_s: float) -> None:
        """Wait for a message, and answer meanwhile which clients may connect."""
        if self._keys is None:
            self._socket.poll(int(timeout_s * 1000))
            return
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._keys.socket, zmq.POLLIN)
        end = self._clock() + timeout_s
        while (left_s := end - self._clock()) > 0:
            ready = dict(poller.poll(int(left_s * 1000) + 1))
            self._keys.answer()
            if self._socket in ready:
                return

    def _take(self, client: bytes, payload: list[bytes]) -> Command | None:
        """Return the command for the engine; None where there is none."""
        try:
            [content] = payload
            command: Command | Attach = self._decoder.decode(content)
        except (ValueError, msgspec.MsgspecError, RecursionError) as error:
            self._drop(client, f"its message cannot be understood: {error}")
            return None
        if isinstance(command, Attach):
            self._attach(client)
            self._tell_prefixes(client, command.wants_prefixes)
            return None
        if isinstance(command, FetchBlocks):
            return self._take_question(client, command)
        if client not in self._clients and client not in self._heard:
            return None  # it was taken for dead, and hears so when it says that it lives
        match command:
            case AskProbe(stream_id):
                self._turns.ask(client, stream_id)
                return None
            case AskView():
                if self._view is not None:
                    self.send(client, self._view(command))
                return None
            case Shutdown() | Drain() if client in self._heard:
                return None
            case Shutdown():
                self._is_draining = self._is_ending = True
            case Drain():
                self._is_draining = True
                return None
            case Submit():
                return self._take_request(client, command)
            case Cancel(stream_id):
                self._turns.end(stream_id)
                own = self._own_number(client, stream_id)
                return None if own is None else Cancel(own)
        return command

    def _take_request(self, client: bytes, command: Submit) -> Submit | None:
        stream_id = command.stream_id
        if self._is_draining:
            error = SluiceError(ErrorCode.UNAVAILABLE, "the engine takes no new requests: it is about to end")
            stats = msgspec.structs.replace(self._stats, is_draining=True)
            self.send(client, StepFrame([], [request_failed(stream_id, error)], stats))
            return None
        if stream_id not in self._client_of:
            self._client_of[stream_id] = client
            return command
        if self._own_number(client, stream_id) is not None:
            self._drop(client, f"it has submitted stream {stream_id} twice")
            return None
        # A client that was cut off comes back with streams whose sequences have not ended yet, as another one.
        own = secrets.randbits(62)
        self._client_of[own], self._renamed[own] = client, stream_id
        return msgspec.structs.replace(command, stream_id=own)

    def _take_question(self, client: bytes, question: FetchBlocks) -> FetchBlocks:
        own = secrets.randbits(62)
        self._questions[own] = client, question.number
        return msgspec.structs.replace(question, number=own)

    def send_blocks(self, piece: BlockPiece, content: ByteArray | None) -> None:
        """Answer a question for blocks. Who asks does not wait for ever, so that an answer may be lost."""
        client, number = self._questions[piece.number]
        if piece.is_last:
            del self._questions[piece.number]
        header = self._encoder.encode(msgspec.structs.replace(piece, number=number))
        parts = (client, header, b"" if content is None else content.data)
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EHOSTUNREACH, errno.EAGAIN):
                raise

    def _own_number(self, client: bytes, stream_id: int) -> int | None:
        """Return the engine's number of a client's stream; None where it has none."""
        if self._client_of.get(stream_id) == client and stream_id not in self._renamed:
            return stream_id
        renamed = self._renamed.items()
        return next((own for own, name in renamed if name == stream_id and self._client_of[own] == client), None)

    def _attach(self, client: bytes) -> None:
        is_new = client not in self._heard
        if is_new and client in self._clients:
            return  # the launcher
        self._heard[client] = self._clock()
        if is_new and self._ready is not None:
            self._clients.add(client)
            self.send(client, self._ready)

    def _tell_prefixes(self, client: bytes, is_wanted: bool) -> None:
        """Begin or end to tell a client what is in the prefix index."""
        if is_wanted and self._prefixes is None and self._index is not None:
            self._prefixes = PrefixFeed(self._index, self.send)
        if self._prefixes is not None and client in self._clients:
            self._prefixes.follow(client, is_wanted)

    def _give_turn(self, client: bytes, stream_id: int) -> None:
        self.send(client, ProbeTurn(stream_id))

    def emit(self, frame: StepFrame) -> None:
        """Send each client its part of the frame. Clients without events get the statistics as a heartbeat, of several
        clients not at each step: each frame costs its reader some 50 microseconds."""
        if self._is_ending:
            frame = hand_back_cancelled(frame)
        if self._is_draining:
            frame = msgspec.structs.replace(frame, stats=msgspec.structs.replace(frame.stats, is_draining=True))
        self._stats = frame.stats
        heard_of = self._names_in(frame) if self._turns else ()
        events: dict[bytes, list[TokenEvent]] = defaultdict(list)
        failures: dict[bytes, list[RequestFailed]] = defaultdict(list)
        for event in frame.events:
            is_last = event.finish_reason is not None
            client, name = self._client(event.stream_id, is_last)
            named = event if name == event.stream_id else msgspec.structs.replace(event, stream_id=name)
            events[client].append(named)
        for failure in frame.failures:
            client, name = self._client(failure.stream_id, True)
            failures[client].append(msgspec.structs.replace(failure, stream_id=name))
        for outcome in frame.adapters:
            if outcome.code is None and self._ready is not None:
                changed = {"adapters": outcome.adapters, "adapter_digests": outcome.digests}
                info = msgspec.structs.replace(self._ready.info, **changed)
                self._ready = msgspec.structs.replace(self._ready, info=info)
        now = self._clock()
        is_for_all = bool(frame.adapters or frame.sleep or frame.profile) or len(self._clients) == 1
        for client in tuple(self._clients):
            has_part = is_for_all or client in events or client in failures
            if not has_part and now < self._sent.get(client, 0.0) + STATS_S:
                continue
            self._sent[client] = now
            self.send(client, msgspec.structs.replace(frame, events=events[client], failures=failures[client]))
        if self._prefixes is not None:
            self._prefixes.flush()
        for stream_id in heard_of:
            self._turns.end(stream_id)
        if self._heard:
            self._drop_silent()

    def _names_in(self, frame: StepFrame) -> list[int]:
        """Return the streams of a frame by their clients' numbers."""
        own = (*(each.stream_id for each in frame.events), *(each.stream_id for each in frame.failures))
        return [self._renamed.get(stream_id, stream_id) for stream_id in own]

    def _drop_silent(self) -> None:
        """Drop the clients that no longer say that they live."""
        limit = self._clock() - CLIENT_SILENT_S
        for client in [client for client, heard in self._heard.items() if heard < limit]:
            self._forget(client)

    def _drop(self, client: bytes, reason: str) -> None:
        self._rare_log.warn("a client was dropped: %s", reason)
        self._forget(client)

    def _forget(self, client: bytes) -> None:
        """Cancel the requests of a client, and send it nothing more. The launcher stays: it alone can end the
        engine."""
        if client in self._clients and client not in self._heard:
            return
        self._heard.pop(client, None)
        self._sent.pop(client, None)
        self._clients.discard(client)
        self._turns.forget(client)
        if self._prefixes is not None:
            self._prefixes.follow(client, False)
        self._due += [Cancel(stream_id) for stream_id, owner in self._client_of.items() if owner == client]

    def _client(self, stream_id: int, is_last: bool) -> tuple[bytes, int]:
        """Return the client of a stream, and its number there."""
        if not is_last:
            return self._client_of[stream_id], self._renamed.get(stream_id, stream_id)
        return self._client_of.pop(stream_id), self._renamed.pop(stream_id, stream_id)

    def send(self, client: bytes, report: Report) -> None:
        try:
            self._socket.send_multipart((client, self._encoder.encode(report)), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            match error.errno:
                case errno.EHOSTUNREACH:  # it has left, or its connection was cut: it will come back as another one
                    self._forget(client)
                case errno.EAGAIN:
                    self._drop(client, f"it has left {MAX_UNSENT} frames unread")
                case _:
                    raise

    def send_all(self, report: Report) -> None:
        """Send the outcome of loading to everybody. Who attaches from now on is greeted by it."""
        if isinstance(report, Ready):
            self._ready = report = Ready(report.info, self._engine_id, self._endpoints)
            for endpoint in self._endpoints:
                log.info("clients can connect to this engine at %s", endpoint)
        self._clients |= self._heard.keys()
        for client in tuple(self._clients):
            self.send(client, report)

    def close(self) -> None:
        self._socket.close()
        if self._keys is not None:
            self._keys.close()
        self._context.term()
