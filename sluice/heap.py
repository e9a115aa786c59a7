"""The C library's heap, which keeps freed memory until it is told to give it back."""

import ctypes

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
"""glibc's function. Other C libraries have none, and keep less memory."""


def trim_heap() -> None:
    """Return memory that glibc keeps, up to three times a model's size. Takes 0.1 s a GB: call it on a thread."""
    if _trim is not None:
        _trim(0)
