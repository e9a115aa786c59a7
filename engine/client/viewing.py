"""A client's view of its engine while somebody watches."""

import asyncio
from collections.abc import Callable, Mapping

from sluice.engine.frames import AskView, BlockMap, EngineView, StepRecord, TenantTokens
from sluice.engine.recent import Recent

MAX_KEPT = 1024
"""Most steps, and most waits, that are kept for watchers to fetch."""


class EngineViewer:
    """Asks an engine for views, and keeps what they bring. Belongs to the client's event loop."""

    def __init__(self, send: Callable[[AskView], None]) -> None:
        self._send = send
        self._answer: asyncio.Future[None] | None = None
        self.steps: Recent[StepRecord] = Recent(MAX_KEPT)
        self.waits: Recent[float] = Recent(MAX_KEPT)
        """Seconds that requests have waited until they were admitted."""
        self.tenants: Mapping[str, TenantTokens] = {}
        self.block_map: BlockMap | None = None

    def forget(self) -> None:
        """Begin anew: another engine is to come."""
        self.steps.clear()
        self.waits.clear()
        self.tenants, self.block_map = {}, None

    def ask(self, keep_s: float) -> "asyncio.Future[None]":
        """Ask for a view; the engine records for another `keep_s`. Returns what is done once one has come, which is
        never where the engine is lost."""
        if self._answer is None or self._answer.done():
            self._answer = asyncio.get_running_loop().create_future()
        self._send(AskView(self.steps.count, self.waits.count, keep_s))
        return self._answer

    def take(self, view: EngineView) -> None:
        """Take an answer, parts of which an earlier one may have brought."""
        if view.num_steps < self.steps.count or view.num_waits < self.waits.count:  # the engine records anew
            self.forget()
        self.steps.merge(view.num_steps, view.steps)
        self.waits.merge(view.num_waits, view.waits)
        self.tenants, self.block_map = view.tenants, view.block_map
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(None)
