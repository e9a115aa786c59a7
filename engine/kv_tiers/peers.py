"""Blocks between engines, such as the prefill replicas of a fleet and the others: `BlockExports` sends those that
another engine asks for by hash, `PeerBlocks` takes those that another one has computed."""

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

import numpy as np

from sluice.engine.arrays import ByteArray
from sluice.engine.blocks import DIGEST_BYTES, BlockHash, PromptOrigin
from sluice.engine.frames import BlockPiece, FetchBlocks
from sluice.engine.kv_cache import BlockPool
from sluice.engine.runners.base import Runner
from sluice.engine.types import BlockSource

PIECE_BYTES = 4 << 20
"""Bytes of one message, or one block where that is larger."""
Send = Callable[[BlockPiece, ByteArray | None], None]
"""Sends a piece and the content of its blocks."""


@dataclass(slots=True)
class _Export:
    """The blocks that are left to send for one question."""

    number: int
    hashes: list[BlockHash]


class BlockExports:
    """Answers questions for blocks, a few milliseconds' worth in each step. Used by the engine thread alone.

    Blocks are looked up when they are copied and not held until then, so that a question never takes blocks that
    running sequences have reserved. A block that the cache has given up meanwhile ends the answer.
    """

    def __init__(self, runner: Runner, pool: BlockPool, identity: str, send: Send) -> None:
        """`identity` is `EngineInfo.block_identity`."""
        self._runner = runner
        self._pool = pool
        self._identity = identity
        self._send = send
        self._waiting: deque[_Export] = deque()
        self._piece_blocks = max(PIECE_BYTES // runner.block_bytes, 1)
        self.num_sent = 0
        self.send_s = 0.0
        """Seconds that steps waited for the copies."""

    @property
    def sent_bytes(self) -> int:
        return self.num_sent * self._runner.block_bytes

    @property
    def is_sending(self) -> bool:
        """Whether a question is not answered yet."""
        return bool(self._waiting)

    def add(self, question: FetchBlocks) -> None:
        """Take a question. One of an engine that computes other bits is refused."""
        if question.identity != self._identity:
            refusal = (
                f"blocks of one engine are not those of the other: identity {question.identity or 'none'} asked for, "
                f"{self._identity} is here; both need the same model files, types of cache and computation, context "
                "length, versions of Sluice and runtime, and kind of CPU"
            )
            self._send(BlockPiece(question.number, 0, True, refusal), None)
            return
        content = question.hashes
        hashes = [BlockHash(content[at : at + DIGEST_BYTES]) for at in range(0, len(content), DIGEST_BYTES)]
        self._waiting.append(_Export(question.number, hashes))

    def send(self, max_seconds: float) -> None:
        """Send what is asked for, at least one piece, as far as the time of a step allows."""
        end = perf_counter() + max_seconds
        while self._waiting:
            started = perf_counter()
            self._send_piece(self._waiting[0])
            now = perf_counter()
            self.send_s += now - started
            if now >= end:
                return

    def _send_piece(self, export: _Export) -> None:
        """Send the next blocks of the first question, which ends with the last of them or the first that is gone."""
        wanted = export.hashes[: self._piece_blocks]
        blocks = self._pool.find(wanted)
        del export.hashes[: len(blocks)]
        is_last = not export.hashes or len(blocks) < len(wanted)
        content: ByteArray | None = None
        if blocks:
            content = np.empty((len(blocks), self._runner.block_bytes), np.uint8)
            self._runner.read_blocks(blocks, list(content))
        if is_last:
            self._waiting.popleft()
        self.num_sent += len(blocks)
        self._send(BlockPiece(export.number, len(blocks), is_last), content)


log = logging.getLogger(__name__)

PEER_BYTES = 256 << 20
"""Memory for blocks on their way from other engines, which is taken as they come."""
MIN_READING, MAX_READING = 4, 1024
"""Bounds of how many blocks that is."""
SILENT_S = 10.0
"""An engine that has been asked and sends nothing for this long has failed. It answers between its steps, which are
long with a large model. Sequences do not wait for that (`PrefixReturns`)."""
AVOID_S = 5.0
"""How long an engine that has failed is asked for nothing."""
AVOID_REFUSING_S = 60.0
"""The same for one that has refused."""


class BlockExchange(ABC):
    """Carries blocks between engines. Used by the engine thread alone."""

    @abstractmethod
    def send(self, piece: BlockPiece, content: ByteArray | None) -> None:
        """Answer a question that came as a command."""

    @abstractmethod
    def ask(self, source: BlockSource, question: FetchBlocks) -> None:
        """Send a question to another engine. Raises SluiceError where this one cannot connect to it."""

    @abstractmethod
    def receive(self) -> list[tuple[BlockPiece, memoryview]]:
        """Return the answers that have come, without waiting for any. The content is "" for no blocks."""

    @abstractmethod
    def forget(self, endpoint: str) -> None:
        """End the connection to an engine that has failed."""

    @abstractmethod
    def close(self) -> None: ...


class ArrivedBlock(NamedTuple):
    """A block that was asked for, whose row is filled, or not where it `is_missing`."""

    block_hash: BlockHash
    row: int
    is_missing: bool


@dataclass(slots=True)
class _Question:
    """Blocks that were asked for together and have not come yet, in order, and since when nothing has come from that
    engine."""

    origin: PromptOrigin
    blocks: list[tuple[BlockHash, int, ByteArray]]
    """Each with the row that it goes to, and that row's memory."""
    asked_at: float
    heard_at: float


class PeerBlocks:
    """The blocks that other engines have for this one, and those on their way. Used by the engine thread alone.

    Nothing that goes wrong here ends a request: the blocks are then missing, and what they hold is computed.
    """

    def __init__(self, exchange: BlockExchange, identity: str, block_bytes: int, clock: Callable[[], float]) -> None:
        """`identity` is `EngineInfo.block_identity`; `clock` gives seconds."""
        self._exchange = exchange
        self._identity = identity
        self._block_bytes = block_bytes
        self._clock = clock
        self.max_reading = min(max(PEER_BYTES // block_bytes, MIN_READING), MAX_READING)
        """Most blocks on their way."""
        self.num_received = self.num_missing = self.num_failed = 0
        self.receive_s = 0.0
        self._block_s = 0.0
        self._number = 0
        self._questions: dict[int, _Question] = {}
        self._reading: set[BlockHash] = set()
        self._avoided: dict[str, float] = {}
        """Endpoints of engines that have failed, and until when they are avoided."""

    @property
    def num_reading(self) -> int:
        return len(self._reading)

    @property
    def received_bytes(self) -> int:
        return self.num_received * self._block_bytes

    @property
    def read_s(self) -> float:
        """Seconds that a block takes to come; 0 before the first."""
        return self._block_s

    def is_reading(self, block_hash: BlockHash) -> bool:
        return block_hash in self._reading

    def has(self, origin: PromptOrigin | None, block_hash: BlockHash) -> bool:
        """Return whether the block may be had from there, as far as is known."""
        if origin is None or block_hash not in origin.hashes:
            return False
        return self._avoided.get(origin.source.endpoint, 0.0) <= self._clock()

    def read(self, origin: PromptOrigin, blocks: list[tuple[BlockHash, int, ByteArray]]) -> None:
        """Begin to fetch blocks in the order of their chain, each to its row, whose memory stays as it is until
        `finished` returns it."""
        self._number += 1
        now = self._clock()
        self._questions[self._number] = _Question(origin, blocks, now, now)
        self._reading.update(block_hash for block_hash, _, _ in blocks)
        hashes = b"".join(block_hash for block_hash, _, _ in blocks)
        try:
            self._exchange.ask(origin.source, FetchBlocks(self._number, self._identity, hashes))
        except Exception as error:
            self._avoid(origin.source, AVOID_REFUSING_S, str(error))
            origin.hashes.clear()  # `finished` ends the question

    def finished(self) -> list[ArrivedBlock]:
        """Return the blocks that have come since the last call, and those that will not come."""
        arrivals: list[ArrivedBlock] = []
        if not self._questions:
            return arrivals
        for piece, content in self._exchange.receive():
            if piece.number in self._questions:  # else it comes too late
                arrivals += self._take(piece, content)
        now = self._clock()
        for number, question in [*self._questions.items()]:
            if not question.origin.hashes:
                arrivals += self._end(number)
            elif now - question.heard_at > SILENT_S:
                self._avoid(question.origin.source, AVOID_S, f"nothing has come for {SILENT_S:g} s")
                question.origin.hashes.clear()
                arrivals += self._end(number)
        self._reading.difference_update(each.block_hash for each in arrivals)
        return arrivals

    def _take(self, piece: BlockPiece, content: memoryview) -> list[ArrivedBlock]:
        question, num_blocks = self._questions[piece.number], piece.num_blocks
        source = question.origin.source
        problem = piece.refusal
        if not 0 <= num_blocks <= len(question.blocks) or len(content) != num_blocks * self._block_bytes:
            problem = f"{len(content)} bytes came for {num_blocks} blocks of {self._block_bytes}"
        if problem:
            self._avoid(source, AVOID_REFUSING_S, problem)
            question.origin.hashes.clear()
            return self._end(piece.number)
        came, question.blocks = question.blocks[:num_blocks], question.blocks[num_blocks:]
        if came:
            rows = np.frombuffer(content, np.uint8).reshape(num_blocks, self._block_bytes)
            for (_, _, memory), row in zip(came, rows, strict=True):
                memory[:] = row
        now = self._clock()
        self._block_s += ((now - question.heard_at) / max(num_blocks, 1) - self._block_s) / 8
        self._note_heard(source.endpoint, now)
        self.num_received += num_blocks
        arrivals = [ArrivedBlock(block_hash, row, False) for block_hash, row, _ in came]
        if piece.is_last:
            self.num_missing += len(question.blocks)
            arrivals += self._end(piece.number)
        return arrivals

    def _note_heard(self, endpoint: str, now: float) -> None:
        """Note that an engine is alive, which answers one question after the other."""
        for question in self._questions.values():
            if question.origin.source.endpoint == endpoint:
                question.heard_at = now

    def _end(self, number: int) -> list[ArrivedBlock]:
        """End a question. What has not come is not to be had there."""
        question = self._questions.pop(number)
        self.receive_s += self._clock() - question.asked_at
        missing = [ArrivedBlock(block_hash, row, True) for block_hash, row, _ in question.blocks]
        question.origin.hashes.difference_update(each.block_hash for each in missing)
        return missing

    def _avoid(self, source: BlockSource, seconds: float, problem: str) -> None:
        self.num_failed += 1
        self._avoided[source.endpoint] = self._clock() + seconds
        self._exchange.forget(source.endpoint)
        log.warning(
            "the engine at %s hands over no blocks for %g s, and prompts are computed here: %s",
            *(source.endpoint, seconds, problem),
        )
