"""The newest of many items, and how many there were."""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Generic, TypeVar

T = TypeVar("T")


class Recent(Generic[T]):
    """Keeps the last items and counts all of them, so that who knows the first `count` gets those after it."""

    def __init__(self, most: int) -> None:
        self.count = 0
        self._kept: deque[T] = deque(maxlen=most)

    def __iter__(self) -> Iterator[T]:
        return iter(self._kept)

    def append(self, item: T) -> None:
        self.count += 1
        self._kept.append(item)

    def since(self, count: int) -> list[T]:
        """Return the items after the first `count`, as far as they are kept; all where there were never as many."""
        num_new = self.count - count if count <= self.count else self.count
        return list(islice(self._kept, max(0, len(self._kept) - num_new), None))

    def merge(self, count: int, items: Sequence[T]) -> None:
        """Take over what another has: it counts to `count`, and `items` are its last ones. Some may be known."""
        num_new = count - self.count
        if num_new > 0:
            self._kept.extend(items[-num_new:])
        self.count = max(count, self.count)

    def clear(self) -> None:
        """Begin anew."""
        self.count = 0
        self._kept.clear()
