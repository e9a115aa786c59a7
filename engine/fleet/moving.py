"""Moves streams between the engines of a fleet: away from one that is lost or leaves, and to the first that is back.
Streams for which there is no engine left are held until there is one again."""

import asyncio
import contextvars
import logging
from collections import Counter
from collections.abc import Iterator
from weakref import WeakKeyDictionary

from sluice.engine.client.base import EngineClient, Replica, StreamKeeper
from sluice.engine.client.stream import GenerationStream
from sluice.engine.client.supervision import Clock, Standing
from sluice.engine.config import EngineConfig
from sluice.engine.fleet.choosing import ReplicaChooser
from sluice.engine.fleet.waking import WakingRoom
from sluice.engine.frames import Command
from sluice.engine.types import RequestFailed
from sluice.errors import ErrorCode, SluiceError

log = logging.getLogger(__name__)

MOST_RESUMING_S = 2.0
"""How long a lost engine's successor waits for the streams that moved."""
_POLL_S = 0.02


class StreamHolder(EngineClient):
    """Holds the streams of engines that have left while no other serves.

    To whoever moves streams it is the client of one more replica, which never serves: what it adopts waits there, with
    the deadlines of its request, until it is released to another client."""

    def __init__(self, config: EngineConfig, room: WakingRoom | None, clock: Clock) -> None:
        """With a `room` each stream is held for as long as a request is that waits there, and counts as one; without,
        until the request's own time is over, or `abort_all`."""
        super().__init__(config, clock)
        self.is_restarting = True
        self.replica.name = "held"
        self._queue.close()
        self._room = room
        self._waits: dict[int, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Do nothing: there is no engine to load."""

    async def stop(self) -> None:
        self._die("the engine was stopped")

    def _send(self, command: Command) -> None:
        raise AssertionError(f"{command} has no engine to go to")

    def may_hold(self, stream: GenerationStream) -> bool:
        """Return whether to hold a stream rather than to end it. One without a token is a request like any other, which
        is held where requests are."""
        return bool(stream.output_token_ids) or self._room is not None

    def adopt(self, stream: GenerationStream, standing: Standing) -> None:
        """Hold a stream that another client has released."""
        stream.refusals.clear()
        stream.most_wait_s = None
        super().adopt(stream, standing)
        if self._room is not None:
            waiting = self._wait(stream, self._room)
            task = asyncio.create_task(waiting, name="held stream", context=contextvars.Context())
            self._waits[stream.stream_id] = task

    async def _wait(self, stream: GenerationStream, room: WakingRoom) -> None:
        """Wait until the stream is released, and end it where that takes too long. An engine that cannot take it wakes
        the others."""
        stream_id = stream.stream_id
        try:
            while stream_id in self._streams:
                await room.wait(has_begun=bool(stream.output_token_ids))
        except SluiceError as error:
            del self._waits[stream_id]  # this task
            self._fail(stream_id, error)

    def _forget(self, stream_id: int) -> GenerationStream | None:
        if (waiting := self._waits.pop(stream_id, None)) is not None:
            waiting.cancel()
        return super()._forget(stream_id)

    def give_up(self, reason: str, retry_after_s: float) -> None:
        """End all streams, because no engine is named any more that could come back, and none is waited for."""
        if self._room is None:
            self.abort_all(SluiceError(ErrorCode.UNAVAILABLE, reason, retry_after_s=retry_after_s))

    def wake(self) -> None:
        """Let the requests of the room go on, since there is an engine."""
        if self._room is not None:
            self._room.wake()


class StreamMover(StreamKeeper):
    """Moves the streams of a fleet's replicas.

    The streams of a lost engine go on in others at once, each behind its last token. Those that may have crashed it all
    go to one replica, which probes them one by one, while others take new requests: a request that crashes two engines
    fails as with one engine, and no third one gets it. Where no other replica serves, they wait for the first that
    does: those of a lost engine in its client, those of one that has left or ends in the holder."""

    def __init__(self, chooser: ReplicaChooser, holder: StreamHolder) -> None:
        self._replicas = chooser.replicas
        self._chooser = chooser
        self._holder = holder
        self._resuming: dict[Replica, WeakKeyDictionary[GenerationStream, int]] = {}
        """The streams that moved away from a lost replica, and how many tokens each had then. A remote replica's client
        asks for no successor, so nothing here may keep a stream."""

    def on_lost(self, lost: Replica) -> None:
        """Move the streams of a replica whose engine is lost, if another can take them."""
        self._chooser.index.forget(lost.number)
        may_wait_elsewhere = lost.engine.failure is not None
        if any(self._can_take(each, may_wait_elsewhere) for each in self._replicas if each is not lost):
            self._resuming[lost] = WeakKeyDictionary(self.move_all(lost, f"replica {lost.name} is lost"))

    async def until_resumed(self, lost: Replica) -> None:
        """Wait until each stream that moved away from a lost replica has brought a token where it is now, or has ended;
        2 s at most. An engine that loads takes cores from one that computes these streams' prompts again."""
        moved, clock = self._resuming.pop(lost, WeakKeyDictionary()), asyncio.get_running_loop().time
        end = clock() + MOST_RESUMING_S
        while clock() < end:
            if all(moved.get(each) != len(each.output_token_ids) for each in self._served()):
                return
            await asyncio.sleep(_POLL_S)

    def _served(self) -> Iterator[GenerationStream]:
        return (stream for each in self._replicas if each.engine.is_serving for stream in each.engine.open_streams)

    def on_back(self, back: Replica) -> None:
        """Move streams to a replica that serves now, from those that do not and from the holder. Requests that are held
        go on too."""
        for each in self._replicas:
            if not each.engine.is_serving and each is not back:
                self.move_all(each, f"replica {back.name} is back before replica {each.name}")
        self.move_all(self._holder.replica, f"replica {back.name} serves")
        self._holder.wake()

    def on_leaving(self, leaving: Replica) -> None:
        """Move the streams of a replica that leaves, and hold those for which there is no other."""
        self._resuming.pop(leaving, None)
        self.move_all(leaving, f"replica {leaving.name} leaves")
        if left := leaving.engine.open_streams:
            log.warning("replica %s leaves: %d requests wait for another engine", leaving.name, len(left))
            for stream in left:
                self._holder.adopt(stream, leaving.engine.release(stream))

    def on_refused(self, refusing: Replica, stream: GenerationStream, failure: RequestFailed) -> None:
        """Offer the stream to the next replica. Where all are full it ends in the error of the one that will have room
        first, and where all are about to end it is held."""
        if stream.on_move is not None:
            stream.fail(failure.to_error())
            return
        stream.refusals[refusing.name] = failure
        offer = self._chooser.next_offer(stream.request, stream.refusals)
        has_begun = bool(stream.output_token_ids)  # in an engine that ends, or before it was moved to one
        stream.was_sent = has_begun
        if offer is not None:
            stream.most_wait_s = offer.most_wait_s
            offer.replica.engine.adopt(stream, Standing(is_new=not has_begun))
            offer.replica.num_adopted += has_begun
            return
        full = [each for each in stream.refusals.values() if each.code is ErrorCode.OVERLOADED]
        if not full and self._holder.may_hold(stream):
            self._holder.adopt(stream, Standing(is_new=not has_begun))
            return
        stream.fail(min(full, key=lambda each: each.retry_after_s or 0.0, default=failure).to_error())

    def move_all(self, source: Replica, reason: str) -> dict[GenerationStream, int]:
        """Move every stream of a replica to the others. Those for which there is no other stay. Returns those that
        moved, with their numbers of tokens."""
        moved: Counter[str] = Counter()
        num_tokens: dict[GenerationStream, int] = {}
        prober: Replica | None = None
        for stream in source.engine.open_streams:
            if stream.on_move is not None:
                stream.on_move(source.engine.release(stream))
                continue
            target = self._chooser.find_home(stream.request, source)
            if target is None:
                continue
            standing = source.engine.release(stream)
            if standing.is_suspect:
                target = prober = prober or target
            target.engine.adopt(stream, standing)
            target.num_adopted += 1
            moved[target.name] += 1
            num_tokens[stream] = len(stream.output_token_ids)
        if moved:
            places = ", ".join(f"{number} in replica {name}" for name, number in sorted(moved.items()))
            log.warning("%s: %d requests go on elsewhere, %s", reason, moved.total(), places)
        return num_tokens

    @staticmethod
    def _can_take(replica: Replica, may_wait: bool) -> bool:
        return replica.engine.is_serving or (may_wait and replica.engine.failure is None)
