"""The processes of ranks 1 and up, as rank 0 starts them, and the messages between them over a pair of connected
sockets: frames, each an array of int32, and JSON. Nothing in them is executed.

torch is not imported here, so that the ranks begin to import it before rank 0 does: it takes seconds, and on busy cores
tens of them.
"""

import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import IntEnum, auto
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np

from sluice.engine.arrays import IntArray
from sluice.engine.runners.base import StepBatch
from sluice.errors import ErrorCode, SluiceError
from sluice.log_relay import ProcessLog


class RankTask(IntEnum):
    """A command from rank 0 to another rank."""

    LOAD = auto()
    """Load the model of the next message, an `EngineConfig`. Two answers are `Loaded`: with its part of the weights
    read, and with the cache made."""
    AGREED = auto()
    """Make a cache of that many blocks."""
    STEP = auto()
    """Run a step."""
    READ = auto()
    """Answer with the bytes of these blocks, a message for each."""
    WRITE = auto()
    """Write the next messages, one for each, to these blocks."""
    UNLOAD = auto()
    """Free the model."""


class Loaded(msgspec.Struct, frozen=True):
    """How far a rank has come with its part of a model, or the error that it was left with."""

    num_blocks: int = 0
    code: ErrorCode | None = None
    message: str = ""
    param: str | None = None

    @classmethod
    def failed(cls, error: SluiceError) -> "Loaded":
        return cls(code=error.code, message=error.message, param=error.param)

    def check(self) -> "Loaded":
        """Return itself. Raises the error."""
        if self.code is not None:
            raise SluiceError(self.code, self.message, param=self.param)
        return self


def pack(kind: RankTask, *arrays: Sequence[int] | IntArray) -> bytes:
    """Return a frame."""
    lengths = [len(each) for each in arrays]
    return np.concatenate(([kind, len(arrays), *lengths], *arrays), dtype=np.int32, casting="unsafe").tobytes()


def unpack(frame: bytes) -> tuple[RankTask, list[IntArray]]:
    """Return a frame's parts."""
    values = np.frombuffer(frame, np.int32).copy()  # torch wants arrays that could be written to
    kind, count = values[:2].tolist()
    begins = np.cumsum([2 + count, *values[2 : 2 + count]])
    return RankTask(kind), np.split(values, begins)[1:-1]


_ARRAYS = (
    *("token_ids", "position_ids", "past_lens", "subsequence_begins"),
    *("block_indices", "block_indices_begins", "sampled_rows"),
)


def pack_step(batch: StepBatch) -> bytes:
    """Return the frame of a step without adapters."""
    assert batch.adapters is None, "ranks have no adapters"
    return pack(RankTask.STEP, *(getattr(batch, name) for name in _ARRAYS), [batch.max_context_len])


def unpack_step(arrays: Sequence[IntArray]) -> StepBatch:
    """Return the step of a frame."""
    *ragged, longest = arrays
    fields: dict[str, Any] = dict(zip(_ARRAYS, ragged, strict=True))
    return StepBatch(**fields, max_context_len=int(longest[0]))


WORKER = "sluice.engine.runners.torch.worker"
TIMEOUT_S = 30.0
"""How long a rank waits for another within a step; ranks compute the same, and take as long."""
EXIT_WAIT_S = 3.0
ENDING_S = 0.5
"""How long the end of a rank may take to show, after its connections have ended."""


def start_followers(size: int, timeout_s: float = TIMEOUT_S) -> "list[Follower]":
    """Start the processes of the ranks from 1 to below `size`. Raises UNAVAILABLE if one cannot be started."""
    followers: list[Follower] = []
    try:
        for rank in range(1, size):
            followers.append(Follower(rank, timeout_s))
    except BaseException:
        close_all(followers)
        raise
    return followers


@contextmanager
def following(size: int) -> "Iterator[list[Follower]]":
    """Start them, and end them if loading a model with them fails."""
    followers = start_followers(size)
    try:
        yield followers
    except BaseException:
        close_all(followers)
        raise


def close_all(followers: "Iterable[Follower]") -> None:
    """End their processes."""
    for each in followers:
        each.close()


class Follower:
    """A rank's process, and the connection to it."""

    def __init__(self, rank: int, timeout_s: float) -> None:
        """Start the process. Raises UNAVAILABLE if it cannot be started."""
        ours, theirs = socket.socketpair()
        # A rank that has stopped takes no frames: sending must not wait for it forever.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(timeout_s), 0))
        self.rank = rank
        self._timeout_s = timeout_s
        self._has_started = False
        with ours, theirs:
            arguments = (str(theirs.fileno()), str(os.getpid()), ProcessLog.as_here().to_argument())
            command = [sys.executable, "-m", WORKER, *arguments]
            try:
                self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),))
            except OSError as error:
                message = f"rank {rank} cannot be started: {error.strerror}"
                raise SluiceError(ErrorCode.UNAVAILABLE, message, param="tensor_parallel_size") from error
            self._connection: Connection[bytes, bytes] = Connection(ours.detach())

    def send(self, message: bytes | memoryview) -> None:
        self._connection.send_bytes(message)

    def receive_block(self) -> bytes:
        """Return the next message. Raises TimeoutError where none comes."""
        if not self._connection.poll(self._timeout_s):
            raise TimeoutError(f"rank {self.rank} has not answered in {self._timeout_s:g} s")
        return self._connection.recv_bytes()

    def await_loaded(self) -> Loaded:
        """Wait until the rank has come as far. Raises its error, UNAVAILABLE if it ends."""
        try:
            answer = self._connection.recv_bytes()
        except (EOFError, OSError):
            code = self.process.wait()
            message = f"rank {self.rank} ended with code {code} while loading; its own lines in the log say more"
            raise SluiceError(ErrorCode.UNAVAILABLE, message) from None
        self._has_started = True
        return msgspec.json.decode(answer, type=Loaded).check()

    def ends(self) -> bool:
        """Return whether the process has ended, or does so just now."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(ENDING_S)
        return self.process.returncode is not None

    def close(self) -> None:
        """End the process: at its own pace if it can tell that it is to end, which it cannot while it starts."""
        self._connection.close()
        if self._has_started:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(EXIT_WAIT_S)
        self.process.kill()
        self.process.wait()
