"""The processes of ranks 1 and up, as rank 0 starts them. torch is not imported here, so that they begin to import it
before rank 0 does: it takes seconds, and on busy cores tens of them."""

import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection

import msgspec

from sluice.engine.runners.torch.frames import Loaded
from sluice.errors import ErrorCode, SluiceError
from sluice.log_relay import ProcessLog

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
