"""Which replica a request is offered to next, and how long it may wait there.

Statistics are old by the time that a request arrives, and several gateways send at once, so the engine alone admits. It
is told how long the request would wait at the next best replica, and refuses it where it would take longer itself. When
all have refused, the request is queued where its wait was predicted to be the shortest.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sluice.engine.fleet.choosing import Pick, ReplicaChooser, find_candidates
from sluice.engine.fleet.replica import Replica
from sluice.engine.types import GenerateRequest, RequestFailed

log = logging.getLogger(__name__)

SLACK_S = 0.05
"""Another replica must save at least this much: asking it takes time too, and predictions are not exact."""


class Offer(NamedTuple):
    """A replica to send a request to, and the longest wait that it may have there; None for any."""

    replica: Replica
    most_wait_s: float | None
    num_cached_tokens: int = 0
    """Tokens of the prompt that the replica is thought to have in its prefix cache."""


class OfferMaker:
    """Makes the offers of a fleet's requests. Belongs to its event loop."""

    def __init__(self, replicas: Sequence[Replica], chooser: ReplicaChooser) -> None:
        """`replicas` may change later."""
        self._replicas = replicas
        self._chooser = chooser

    def make_next(self, request: GenerateRequest, refusals: Mapping[str, RequestFailed]) -> Offer | None:
        """Return the next offer of a request that these replicas have refused; None where there is nobody left to ask,
        because all are full or given up."""
        waits = {name: each.predicted_wait_s for name, each in refusals.items() if each.predicted_wait_s is not None}
        able = (each for each in self._replicas if each.has_adapter(request.adapter))
        candidates = find_candidates(each for each in able if each.name in waits or each.name not in refusals)
        if refusals:  # who was asked already does not wait for an engine: that queue has another limit
            candidates = [each for each in candidates if each.engine.is_serving]
        untried = [each for each in candidates if each.name not in refusals]
        best = self._chooser.choose(request, untried)
        if best is not None:
            others = [each for each in untried if each is not best.replica]
            other = self._chooser.choose(request, others) if self._chooser.compares_waits else None
            bound = _bound(best, other, refusals) if self._chooser.compares_waits else None
            self._chooser.note_sent(request, best)
            log.debug(
                "request %s goes to replica %s, with %d of its tokens cached and %s: %s",
                *(request.request_id, best.replica.name, best.num_cached_tokens, _bound_text(bound), best.choice.parts),
            )
            return Offer(best.replica, bound, best.num_cached_tokens)
        if not candidates:
            return None
        soonest = min(candidates, key=lambda each: waits[each.name])
        self._chooser.note_place(request, soonest)
        return Offer(soonest, None)

    def find_home(self, request: GenerateRequest, source: Replica) -> Replica | None:
        """Return where a stream of `source` goes on; None where no other replica can take it."""
        candidates = find_candidates(e for e in self._replicas if e is not source and e.has_adapter(request.adapter))
        pick = self._chooser.choose(request, candidates)
        if pick is None:
            return None
        self._chooser.note_sent(request, pick)
        return pick.replica


def _bound_text(bound: float | None) -> str:
    return "however long it waits" if bound is None else f"if it waits for at most {bound:.2f} s"


def _bound(best: Pick, other: Pick | None, refusals: Mapping[str, RequestFailed]) -> float | None:
    """Return the wait from which on another replica would be better than the best one; None without another."""
    waits = [each.predicted_wait_s for each in refusals.values() if each.predicted_wait_s is not None]
    if other is not None:
        waits.append(other.cost_s - (best.cost_s - best.wait_s))
    return max(min(waits), 0.0) + SLACK_S if waits else None
