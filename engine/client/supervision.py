"""Decisions after an engine is lost: which requests caused it, and in which order the others go to the next engine.
Nothing here does I/O or reads a clock; `engine/client/process.py` acts on it."""

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from engine.types import GenerateRequest
from sluice.errors import ErrorCode, SluiceError

MAX_SHARED_CRASHES = 5
"""A request fails after this many crashes during its run, even if none of them can be attributed to a request."""


@dataclass(frozen=True, slots=True)
class AbandonedStreams:
    """Streams that are not retried: `poisonous` ones crashed the engine, `exhausted` ones ran in too many crashes."""

    poisonous: tuple[int, ...] = ()
    exhausted: tuple[int, ...] = ()


class RecoveryQueue:
    """The streams in the engine and those that wait for it, by stream id.

    A stream is unproven from when it is sent until it brings a token. If the engine crashes, the unproven streams are
    its suspects, and all others are innocent. The next engine gets the innocent streams at once, and the suspects one
    by one, each when the one before has proven itself, so that a second crash points at exactly one of them. Requests
    that come meanwhile wait behind them. `take_due` says which streams to send now.
    """

    def __init__(self) -> None:
        self._is_up = True
        self._sent: dict[int, None] = {}
        self.unproven: dict[int, None] = {}
        """Streams that were sent and have not brought a token since."""
        self._innocent: dict[int, None] = {}
        self._suspect: dict[int, None] = {}
        self._new: dict[int, None] = {}
        self._is_probing = False
        self._num_suspected: dict[int, int] = {}
        self._num_shared: dict[int, int] = {}

    @property
    def is_open(self) -> bool:
        """Whether a new request goes straight to the engine."""
        return self._is_up and not self._is_probing

    def is_sent(self, stream_id: int) -> bool:
        return stream_id in self._sent

    def add(self, stream_id: int) -> None:
        """Queue a new stream."""
        self._new[stream_id] = None

    def mark_proven(self, stream_id: int) -> None:
        """Clear a stream of suspicion, because it brought a token."""
        if stream_id in self.unproven:
            del self.unproven[stream_id]
            self._num_suspected.pop(stream_id, None)

    def remove(self, stream_id: int) -> None:
        """Forget a stream that has ended for whatever reason."""
        for group in (self._sent, self.unproven, self._innocent, self._suspect, self._new):
            group.pop(stream_id, None)
        self._num_suspected.pop(stream_id, None)
        self._num_shared.pop(stream_id, None)

    def open(self) -> None:
        """Start sending to the next engine, which is ready. The queue is open initially."""
        self._is_up = True
        self._is_probing = bool(self._suspect)

    def close(self) -> None:
        """Stop sending to a lost engine. `requeue_after_crash` follows once its last frames are read."""
        self._is_up = False

    def take_due(self) -> tuple[int, ...]:
        """Return the streams to send to the engine now, in order. They count as sent."""
        if not self._is_up:
            return ()
        due = [*self._innocent]
        self._innocent.clear()
        if not due and self._is_probing and not self.unproven:
            due = list(self._suspect)[:1]
            self._is_probing = bool(due)
            for stream_id in due:
                del self._suspect[stream_id]
        if not self._is_probing:
            due += self._new
            self._new.clear()
        self._sent.update(dict.fromkeys(due))
        self.unproven.update(dict.fromkeys(due))
        return tuple(due)

    def requeue_after_crash(self) -> AbandonedStreams:
        """Queue the streams of the lost engine again. Returns those that are not, which stay until `remove`."""
        self.close()
        abandoned = self._find_abandoned()
        excluded = {*abandoned.poisonous, *abandoned.exhausted}
        suspects = {s: None for s in (*self.unproven, *self._suspect) if s not in excluded}
        self._innocent = {s: None for s in self._sent if s not in suspects and s not in excluded} | self._innocent
        self._suspect = suspects
        self._sent, self.unproven = {}, {}
        return abandoned

    def _find_abandoned(self) -> AbandonedStreams:
        suspects = tuple(self.unproven)
        if not suspects:
            _count(self._num_shared, self._sent)
            exhausted = tuple(s for s in self._sent if self._num_shared[s] >= MAX_SHARED_CRASHES)
            return AbandonedStreams(exhausted=exhausted)
        _count(self._num_suspected, suspects)
        is_poisonous = len(suspects) == 1 and self._num_suspected[suspects[0]] > 1
        return AbandonedStreams(poisonous=suspects if is_poisonous else ())


def _count(counts: dict[int, int], stream_ids: Iterable[int]) -> None:
    for stream_id in stream_ids:
        counts[stream_id] = counts.get(stream_id, 0) + 1


def build_resumed_request(
    request: GenerateRequest, token_ids: list[int], elapsed_s: float, has_started: bool
) -> GenerateRequest:
    """Return `request` for an engine that gets it `elapsed_s` after its submit, when `token_ids` were already sent.
    Raises DEADLINE if no time is left."""
    sampling = request.sampling
    if token_ids and sampling.prompt_logprobs is not None:  # they were sent with the first token
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
    return msgspec.structs.replace(
        request,
        sampling=sampling,
        returns_context_logits=request.returns_context_logits and not token_ids,
        resume_token_ids=list(token_ids),
        timeout_s=_time_left(request.timeout_s, elapsed_s),
        queue_timeout_s=None if has_started else _time_left(request.queue_timeout_s, elapsed_s),
    )


def _time_left(timeout_s: float | None, elapsed_s: float) -> float | None:
    if timeout_s is None:
        return None
    if timeout_s <= elapsed_s:
        raise SluiceError(ErrorCode.DEADLINE, f"the {timeout_s:g} s of the request passed while the engine restarted")
    return timeout_s - elapsed_s
