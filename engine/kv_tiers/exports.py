"""Sends blocks of the KV cache to other engines that ask for them by hash."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from sluice.engine.arrays import ByteArray
from sluice.engine.blocks import DIGEST_BYTES, BlockHash
from sluice.engine.frames import BlockPiece, FetchBlocks
from sluice.engine.kv_cache import BlockPool
from sluice.engine.runners.base import BlockRunner

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

    def __init__(self, runner: BlockRunner, pool: BlockPool, identity: str, send: Send) -> None:
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
