"""Names what a client tells whoever serves with several engines."""

from collections.abc import Callable
from typing import Protocol

from sluice.engine.client.stream import GenerationStream
from sluice.engine.frames import PrefixChanges
from sluice.engine.types import RequestFailed

OnPrefixes = Callable[[PrefixChanges], None]
"""Hears what enters and leaves the engine's prefix index."""


class StreamKeeper(Protocol):
    """Hears of one client's engine, and moves streams between it and others."""

    def on_lost(self) -> None:
        """Hear that the engine is lost, and that its streams are queued again. The client's `failure` says if there is
        no next one."""

    async def until_resumed(self) -> None:
        """Wait until the streams that moved away from the lost engine have gone on, for a moment at most."""

    def on_back(self) -> None:
        """Hear that a new engine serves in place of one that was lost."""

    def on_refused(self, stream: GenerationStream, failure: RequestFailed) -> None:
        """Hear that the engine had no room for a new stream, which the client has forgotten: it ends in an error, or
        goes on elsewhere."""
