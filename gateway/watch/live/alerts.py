"""Names what is not as it should be, and what bounds the server, as `sluice doctor --live` judges it."""

from collections.abc import Mapping
from time import monotonic

from sluice.gateway.front.path_masking import hide_paths
from sluice.gateway.server import Server
from sluice.gateway.watch.live.bounds import BoundKind, Health, LiveFinding, Observation, judge, judge_health
from sluice.gateway.watch.live.sample import AlertPart
from sluice.gateway.watch.live.scrape import Change, Scrape, read_families

JUDGED_S = 5.0
"""Seconds between two judgements, each of which reads all metrics."""
_STALE_S = 30.0
"""Metrics that are older say nothing about now."""


class AlertJudge:
    """Judges a server, its health at each call and its bounds every few seconds. Belongs to the event loop."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._scrape: Scrape | None = None
        self._bounds: list[LiveFinding] = []

    async def judge(self) -> list[AlertPart]:
        """Return the alerts, the gravest first. Bounds need two readings of the metrics."""
        await self._update_bounds()
        return [_tell(each) for each in (*judge_health(self._health()), *self._bounds)]

    def _health(self) -> Health:
        problem = self._server.plane.health.why_not_ready()
        return Health(hide_paths(problem)) if problem else Health("", self._server.rooms.degradations())

    async def _update_bounds(self) -> None:
        now, before = monotonic(), self._scrape
        if before is not None and now - before.at < JUDGED_S:
            return
        self._scrape = after = read_families((await self._server.gather()).collect(), now)
        if before is None or now - before.at > _STALE_S:
            self._bounds = []
            return
        found = judge(Observation(Change(before, after), Health(), self._num_instances()))
        self._bounds = [each for each in found if each.bound is not BoundKind.NONE]

    def _num_instances(self) -> Mapping[str, int]:
        models = self._server.plane.repository.models()
        return {each.name: sum(max(1, group.count) for group in each.config.instance_group) or 1 for each in models}


def _tell(finding: LiveFinding) -> AlertPart:
    return AlertPart(finding.level.value, finding.bound.value, finding.subject, finding.text, finding.remedy)
