"""How far a worker has come, in memory that outlives it: what it had not begun when it ended is another one's to do."""

import os

import numpy as np

from serving.backends.python.mapping import Mapping

_SIZE = 8


class Progress:
    """How many batches the model was given. Written by the worker, read by the gateway."""

    def __init__(self, fd: int) -> None:
        """In the file that the other side has too; the caller may close it afterwards."""
        self._count = Mapping(fd, _SIZE).array(_SIZE).view(np.uint64)

    @property
    def num_begun(self) -> int:
        return int(self._count[0])

    def begin(self) -> None:
        """One more is about to be given to the model."""
        self._count[0] += 1


def progress_file() -> int:
    """A file for a worker that has begun nothing; the caller closes it."""
    fd = os.memfd_create("sluice-progress")
    os.ftruncate(fd, _SIZE)
    return fd
