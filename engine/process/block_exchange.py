"""Carries KV blocks between engine processes: questions go to the other engine's own socket, as commands of clients."""

from contextlib import suppress
from pathlib import Path

import msgspec
import zmq

from sluice.engine.arrays import ByteArray
from sluice.engine.config import Listening
from sluice.engine.frames import BlockPiece, FetchBlocks
from sluice.engine.kv_tiers.peers import BlockExchange
from sluice.engine.process.curve import CLIENT_SILENT_MS, CurveKeys, read_pair, watch_connection
from sluice.engine.process.transport import Transport
from sluice.engine.types import BlockSource
from sluice.errors import invalid

MAX_READ = 64
"""Most messages taken from an engine between two steps."""


class SocketExchange(BlockExchange):
    """Answers through the engine's transport, and asks through a DEALER socket for each other engine. Used by
    the engine thread alone."""

    def __init__(self, transport: Transport, listening: Listening | None) -> None:
        """`listening` has this engine's keys, by which others know it."""
        self._transport = transport
        self._curve_key = None if listening is None else listening.curve_key
        self._keys: CurveKeys | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(BlockPiece)

    def send(self, piece: BlockPiece, content: ByteArray | None) -> None:
        self._transport.send_blocks(piece, content)

    def ask(self, source: BlockSource, question: FetchBlocks) -> None:
        socket = self._sockets.get(source.endpoint)
        if socket is None:
            socket = self._sockets[source.endpoint] = self._connect(source)
        socket.send(self._encoder.encode(question), zmq.NOBLOCK)

    def _connect(self, source: BlockSource) -> "zmq.Socket[bytes]":
        """Connect to an engine. Raises INVALID where it wants keys and this one has none."""
        if source.server_key and self._curve_key is None:
            raise invalid(
                "curve_key", f"the engine at {source.endpoint} wants CURVE keys; start this one with --curve-key"
            )
        self._context = self._context or zmq.Context()
        socket = self._context.socket(zmq.DEALER)
        socket.set_hwm(0)
        socket.linger = 0
        if source.endpoint.startswith("tcp://"):
            watch_connection(socket, source.endpoint, CLIENT_SILENT_MS)
        if source.server_key and self._curve_key is not None:
            self._keys = self._keys or read_pair(Path(self._curve_key))
            socket.curve_publickey, socket.curve_secretkey = self._keys
            socket.curve_serverkey = source.server_key.encode()
        socket.connect(source.endpoint)
        return socket

    def receive(self) -> list[tuple[BlockPiece, memoryview]]:
        return [answer for socket in self._sockets.values() for answer in self._read(socket)]

    def _read(self, socket: "zmq.Socket[bytes]") -> list[tuple[BlockPiece, memoryview]]:
        answers: list[tuple[BlockPiece, memoryview]] = []
        while len(answers) < MAX_READ:
            try:
                parts = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            with suppress(msgspec.MsgspecError, ValueError):  # what is no answer to a question
                header, content = parts
                answers.append((self._decoder.decode(header.buffer), content.buffer))
        return answers

    def forget(self, endpoint: str) -> None:
        socket = self._sockets.pop(endpoint, None)
        if socket is not None:
            socket.close(0)

    def close(self) -> None:
        for endpoint in [*self._sockets]:
            self.forget(endpoint)
        if self._context is not None:
            self._context.term()
