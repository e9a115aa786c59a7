"""Moves streams between the engines of a fleet: away from one that is lost, and to the first that is back."""

import logging
from collections import Counter
from collections.abc import Sequence

from engine.client.stream import GenerationStream
from engine.client.supervision import Standing
from engine.fleet.offering import OfferMaker
from engine.fleet.prefix_index import PrefixIndex
from engine.fleet.replica import Replica
from engine.types import RequestFailed
from sluice.errors import ErrorCode

log = logging.getLogger(__name__)


class StreamMover:
    """Moves the streams of a fleet's replicas.

    The streams of a lost engine go on in others at once, each behind its last token. Those that may have crashed it all
    go to one replica, which probes them one by one, while others take new requests: a request that crashes two engines
    fails as with one engine, and no third one gets it. Where no other replica serves, they wait for the first that
    does."""

    def __init__(self, replicas: Sequence[Replica], offers: OfferMaker, index: PrefixIndex) -> None:
        """`replicas` may change later. `index` knows what their prefix caches have."""
        self._replicas = replicas
        self._offers = offers
        self._index = index

    def on_lost(self, lost: Replica) -> None:
        """Move the streams of a replica whose engine is lost, if another can take them."""
        self._index.forget(lost.number)
        may_wait_elsewhere = lost.engine.failure is not None
        if any(self._can_take(each, may_wait_elsewhere) for each in self._replicas if each is not lost):
            self.move_all(lost, f"replica {lost.name} is lost")

    def on_back(self, back: Replica) -> None:
        """Move streams to a replica that serves again, from those that do not."""
        for each in self._replicas:
            if not each.engine.is_serving and each is not back:
                self.move_all(each, f"replica {back.name} is back before replica {each.name}")

    def on_refused(self, refusing: Replica, stream: GenerationStream, failure: RequestFailed) -> None:
        """Offer the stream to the next replica. Where all are full it ends in the error of the one that will have room
        first."""
        if stream.on_move is not None:
            stream.fail(failure.to_error())
            return
        stream.refusals[refusing.name] = failure
        offer = self._offers.make_next(stream.request, stream.refusals)
        if offer is None:
            full = [each for each in stream.refusals.values() if each.code is ErrorCode.OVERLOADED]
            least = min(full, key=lambda each: each.retry_after_s or 0.0, default=failure)
            stream.fail(least.to_error())
            return
        has_begun = bool(stream.output_token_ids)  # and was moved to an engine that drains
        stream.was_sent, stream.most_wait_s = has_begun, offer.most_wait_s
        offer.replica.engine.adopt(stream, Standing(is_new=not has_begun))

    def move_all(self, source: Replica, reason: str) -> None:
        """Move every stream of a replica to the others. Those for which there is no other stay."""
        moved: Counter[str] = Counter()
        prober: Replica | None = None
        for stream in source.engine.open_streams:
            if stream.on_move is not None:
                stream.on_move(source.engine.release(stream))
                continue
            target = self._offers.find_home(stream.request, source)
            if target is None:
                continue
            standing = source.engine.release(stream)
            if standing.is_suspect:
                target = prober = prober or target
            target.engine.adopt(stream, standing)
            target.num_adopted += 1
            moved[target.name] += 1
        if moved:
            places = ", ".join(f"{number} in replica {name}" for name, number in sorted(moved.items()))
            log.warning("%s: %d requests go on elsewhere, %s", reason, moved.total(), places)

    @staticmethod
    def _can_take(replica: Replica, may_wait: bool) -> bool:
        return replica.engine.is_serving or (may_wait and replica.engine.failure is None)


class ReplicaKeeper:
    """The keeper of one replica's client."""

    def __init__(self, mover: StreamMover, replica: Replica) -> None:
        self._mover = mover
        self._replica = replica

    def on_lost(self) -> None:
        self._mover.on_lost(self._replica)

    def on_back(self) -> None:
        self._mover.on_back(self._replica)

    def on_refused(self, stream: GenerationStream, failure: RequestFailed) -> None:
        self._mover.on_refused(self._replica, stream, failure)
