"""The turns of clients to submit probes: requests that an engine on trial gets one at a time."""

from collections import deque
from collections.abc import Callable


class ProbeTurns:
    """Gives clients their turns to submit probes, in the order in which they ask, one at a time."""

    def __init__(self, give: Callable[[bytes, int], None]) -> None:
        self._give = give
        self._asked: deque[tuple[bytes, int]] = deque()
        """Clients with the stream that each asks for; the first has the turn."""

    def __bool__(self) -> bool:
        return bool(self._asked)

    def ask(self, client: bytes, stream_id: int) -> None:
        self._asked.append((client, stream_id))
        if len(self._asked) == 1:
            self._give(client, stream_id)

    def end(self, stream_id: int) -> None:
        """End the turn of a stream, or its waiting for one."""
        self._keep(lambda asked: asked[1] != stream_id)

    def forget(self, client: bytes) -> None:
        """End the turns of a client that is gone."""
        self._keep(lambda asked: asked[0] != client)

    def _keep(self, is_kept: Callable[[tuple[bytes, int]], bool]) -> None:
        if not self._asked:
            return
        first = self._asked[0]
        self._asked = deque(filter(is_kept, self._asked))
        if self._asked and self._asked[0] != first:
            self._give(*self._asked[0])
