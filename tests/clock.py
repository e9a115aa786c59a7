"""A clock that tests move."""

from typing import Generic, TypeVar

N = TypeVar("N", int, float)


class ManualClock(Generic[N]):
    """Shows what it was set to; time that passes is added to `now`."""

    def __init__(self, now: N) -> None:
        self.now: N = now

    def __call__(self) -> N:
        return self.now
