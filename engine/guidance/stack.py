"""Calls that need more stack than a thread commonly has."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

STACK_BYTES = 256 << 20
"""Address space, not memory. The compiler recurses along chains of references and rules, at up to 4 kB for a link of
6 bytes; an overflow would end the process."""

_size_lock = threading.Lock()  # the size of new threads' stacks is the whole process's

T = TypeVar("T")


def call_with_large_stack(work: Callable[[], T]) -> T:
    """Run `work` on a thread of its own, whose stack's memory goes back to the system with it, and wait for it."""
    outcome: Future[T] = Future()
    thread = threading.Thread(target=_run, args=(work, outcome), name="compile-grammar", daemon=True)
    with _size_lock:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return outcome.result()


def _run(work: Callable[[], T], outcome: "Future[T]") -> None:
    try:
        outcome.set_result(work())
    except BaseException as error:  # a Rust panic is no Exception, and the waiter must hear of it
        outcome.set_exception(error)
