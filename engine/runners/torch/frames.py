"""Messages between rank 0 and the others, over a pair of connected sockets: frames, each an array of int32, and JSON.
Nothing in them is executed."""

from collections.abc import Sequence
from enum import IntEnum, auto
from typing import Any

import msgspec
import numpy as np

from sluice.engine.arrays import IntArray
from sluice.engine.runners.base import StepBatch
from sluice.errors import ErrorCode, SluiceError


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
