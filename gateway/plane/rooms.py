"""How the rooms of a server join it: keys, quotas, ledger, streams, batches and the others beside the data plane."""

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from sluice.gateway.plane.live_requests import RequestsElsewhere
from sluice.pipelines.text.sessions import SessionRow
from sluice.record.timelines import Timeline, TimelineOwner

Close = Callable[[], Awaitable[None]]


class Rooms:
    """Holds what a server's rooms registered: metrics, notices, watchers and closers. Belongs to the event loop."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._notices: list[Callable[[], str]] = []
        self._watchers: list[Callable[[], None]] = []
        self._leavers: list[Close] = []
        self._closers: list[Close] = []

    def join(
        self,
        collector: Collector | None = None,
        *,
        notice: Callable[[], str] | None = None,
        watch: Callable[[], None] | None = None,
        leave: Close | None = None,
        close: Close | None = None,
    ) -> None:
        """Register a room: its metrics, `notice`, which says what is not as it should be, or "", `watch`, which is
        called about once a second while the server serves, `leave`, which is awaited before open requests are aborted,
        and `close`, which is awaited at the end, after those of rooms that joined before."""
        if collector is not None:
            self.registry.register(collector)
        if notice is not None:
            self._notices.append(notice)
        if watch is not None:
            self._watchers.append(watch)
        if leave is not None:
            self._leavers.append(leave)
        if close is not None:
            self._closers.append(close)

    def degradations(self) -> list[str]:
        """Say what is not as it should be while requests are served."""
        return [problem for each in self._notices if (problem := each())]

    def watch(self) -> None:
        for each in self._watchers:
            each()

    async def leave(self) -> None:
        """Leave to other gateways the requests that they can go on with."""
        for each in self._leavers:
            await each()

    async def close(self) -> None:
        for each in self._closers:
            await each()


class OtherProcesses(RequestsElsewhere, Protocol):
    """The other processes of a server with HTTP workers."""

    async def find_timelines(self, request_id: str, owner: TimelineOwner | None) -> list[Timeline]:
        """Return their timelines of a request id, or all for "", as far as they answer in time."""

    async def list_sessions(self) -> list[SessionRow]:
        """Return the sessions that sent them a request last, as far as they answer in time."""

    async def settle(self) -> None:
        """Wait until none of them serves other models than this process."""

    async def statistics(self) -> list[dict[str, Any]]:
        """Return the statistics of their models, as the v2 protocol has them."""

    def families(self) -> Iterable[Metric]:
        """Return what they have counted until a moment ago."""

    async def gather(self, own: CollectorRegistry) -> CollectorRegistry:
        """Return the metrics of the whole server, of which `own` are those of this process."""
