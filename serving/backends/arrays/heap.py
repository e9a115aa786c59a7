"""Memory that libraries have freed, given back to the system."""

import ctypes

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
"""glibc's. Other C libraries have none, and keep less."""


def give_back_freed_memory() -> None:
    """To be called where a model was read or freed; blocks, up to 0.1 s for a gigabyte: for threads.

    glibc keeps what threads have freed, of a model three times its size: what reading it took, and then its weights.
    """
    if _trim is not None:
        _trim(0)
