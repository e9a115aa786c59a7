"""The heap: the C library's, which keeps freed memory until it is told to give it back, and what Python collects."""

import ctypes
import gc

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
"""glibc's function. Other C libraries have none, and keep less memory."""


def trim_heap() -> None:
    """Return memory that glibc keeps, up to three times a model's size. Takes 0.1 s a GB: call it on a thread."""
    if _trim is not None:
        _trim(0)


_COLLECTED_AFTER = 10_000
"""New objects after which the garbage collector looks at them. Python's 700 are those of a few open requests: it would
look at each of them many times, and nearly all are freed without it."""


def settle_objects() -> None:
    """Freeze the current objects: the garbage collector skips those of the start, which stay."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECTED_AFTER)
