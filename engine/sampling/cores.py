"""Shares the rows of a step among the cores. numpy leaves Python's lock while it computes, so threads suffice."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from sluice.engine.arrays import FloatArray, Rows
from sluice.machine import num_cores

Work = Callable[[slice], None]
"""Computes the rows of a block."""

_MOST_CORES = 8
"""More do not help: what is computed on a logit takes little longer than to read it."""

_LEAST_COST = 2**19
"""Fewer exponentials are computed by the caller alone: they take 200 microseconds, to wake another thread 60."""


class Cores:
    """Threads that compute beside the one that calls. Used by one thread at a time."""

    def __init__(self, num_threads: int | None = None) -> None:
        """`num_threads` counts the caller's; by default there is one for each core that this process may use."""
        self._num_helpers = min(num_threads or num_cores(), _MOST_CORES) - 1
        self._helpers = ThreadPoolExecutor(self._num_helpers, "sampling") if self._num_helpers > 0 else None

    def share(self, blocks: Iterable[slice], cost: int, begin: Callable[[], Work]) -> None:
        """Compute all `blocks`, in any order; they take as long as `cost` exponentials. Each thread calls `begin` once,
        for memory of its own, and what that returns for each block. Raises what any of these calls raises, when all
        have returned."""
        left = iter(list(blocks))  # a list's iterator gives an element to one thread only
        if self._helpers is None or cost < _LEAST_COST:
            _work_off(left, begin)
            return
        helping = [self._helpers.submit(_work_off, left, begin) for _ in range(self._num_helpers)]
        try:
            _work_off(left, begin)
        finally:
            errors = [future.exception() for future in helping if not future.cancel()]
        for error in errors:
            if error is not None:
                raise error

    def close(self) -> None:
        """End the threads."""
        if self._helpers is not None:
            self._helpers.shutdown()


def _work_off(blocks: Iterator[slice], begin: Callable[[], Work]) -> None:
    work = begin()
    for block in blocks:
        work(block)


ONE_CORE = Cores(1)
"""The caller's thread alone."""


# -- blocks of rows, which stay in a core's cache

_BLOCK = 2**17
"""Logits processed at a time: half a megabyte, and as much for their weights. Four times as many take twice as long."""
_LEAST_BLOCK = 4
"""Rows processed at a time at least: the calls themselves take as long as 30,000 logits."""


def block_size(num_rows: int, row_size: int) -> int:
    """Return how many of `num_rows` rows of `row_size` numbers are in a block."""
    return min(max(_LEAST_BLOCK, _BLOCK // row_size), num_rows)


def row_blocks(num_rows: int, row_size: int) -> list[slice]:
    """Return the blocks of `num_rows` rows of `row_size` numbers."""
    size = block_size(num_rows, row_size)
    return [slice(begin, min(begin + size, num_rows)) for begin in range(0, num_rows, max(size, 1))]


def row_picker(logits: FloatArray, rows: Rows) -> Callable[[slice], FloatArray]:
    """Return what gives the logits of a slice of `rows`. Consecutive rows are not copied."""
    if len(rows) and (rows == np.arange(rows[0], rows[0] + len(rows))).all():
        return logits[rows[0] : rows[0] + len(rows)].__getitem__
    return lambda which: logits[rows[which]]
