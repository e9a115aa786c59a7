"""How tests wait until something is so. There is one patience: a test that needs more waits for the wrong thing."""

import asyncio
import inspect
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

PATIENCE_S = 90.0
"""Far longer than anything that is waited for takes on a busy machine."""
_TURNS = 100
"""How often a claim is looked at, turn by turn of the loop, before time passes in between."""
_PAUSE_S = 0.005


async def until(claim: Callable[..., Any], explain: Callable[[], object] | str = "") -> Any:
    """Look on the event loop until what `claim` returns, awaited where it is to be, is true, and return it. `explain`
    says what was waited for, or what is there instead. Raises AssertionError after PATIENCE_S."""
    deadline, turns = time.monotonic() + PATIENCE_S, 0
    while True:
        found = claim()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return found
        assert time.monotonic() < deadline, _failure(explain)
        turns += 1
        await asyncio.sleep(0 if turns < _TURNS else _PAUSE_S)


async def turns_of(work: Coroutine[Any, Any, T], others: Callable[[], object] = bool) -> tuple[T, int]:
    """Return what `work` does, and in how many turns of the event loop, of which `others` have each."""
    task, num_turns = asyncio.ensure_future(work), 0

    def is_done() -> bool:
        nonlocal num_turns
        others()
        num_turns += not task.done()
        return task.done()

    await until(is_done)
    return task.result(), num_turns


def wait_until(claim: Callable[..., Any], explain: Callable[[], object] | str = "") -> Any:
    """Do what `until` does, blocking: for what other processes and threads bring about."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := claim()):
        assert time.monotonic() < deadline, _failure(explain)
        time.sleep(_PAUSE_S)
    return found


def wait_for(look: Callable[[], T], is_so: Callable[[T], object]) -> T:
    """Return the first of the values that `look` returns of which `is_so` holds."""
    seen: list[T] = []

    def claim() -> bool:
        seen[:] = [look()]
        return bool(is_so(seen[0]))

    wait_until(claim, lambda: seen)
    return seen[0]


def _failure(explain: Callable[[], object] | str) -> str:
    return f"it did not come true within {PATIENCE_S:g} s: {explain if isinstance(explain, str) else explain()}"
