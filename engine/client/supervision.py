"""What to do when an engine is lost: whom to blame, who goes first to the next one, and when to give up.

Nothing here does I/O or reads a clock; `engine/client/process.py` acts on it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from engine.types import GenerateRequest
from sluice.errors import ErrorCode, SluiceError

MAX_SHARED_CRASHES = 5
"""A request fails when so many engines crashed while it ran and none of the crashes could be laid on anyone."""


@dataclass(frozen=True, slots=True)
class AbandonedStreams:
    """Streams that a crash leaves behind: `poisonous` crashed the engine themselves, `unlucky` ran in too many."""

    poisonous: tuple[int, ...] = ()
    unlucky: tuple[int, ...] = ()


class RecoveryQueue:
    """Who is in the engine and who waits outside, by stream id.

    A stream is unproven from when it is sent until it brings a token. A crash is laid on the unproven: they are its
    suspects, and all others are innocent. The next engine gets the innocent at once and the suspects one by one,
    each after the one before has proven itself, so that a second crash points at exactly one. Requests that come
    meanwhile wait behind them. `take_due` says who is to be sent now.
    """

    def __init__(self) -> None:
        self._is_up = True
        self._sent: dict[int, None] = {}
        self.unproven: dict[int, None] = {}
        """Sent, and without a token since."""
        self._innocent: dict[int, None] = {}
        self._suspect: dict[int, None] = {}
        self._fresh: dict[int, None] = {}
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
        """A new request; it waits until `take_due` names it."""
        self._fresh[stream_id] = None

    def prove(self, stream_id: int) -> None:
        """The stream brought a token."""
        if stream_id in self.unproven:
            del self.unproven[stream_id]
            self._num_suspected.pop(stream_id, None)

    def drop(self, stream_id: int) -> None:
        """The stream has ended, however."""
        for group in (self._sent, self.unproven, self._innocent, self._suspect, self._fresh):
            group.pop(stream_id, None)
        self._num_suspected.pop(stream_id, None)
        self._num_shared.pop(stream_id, None)

    def open(self) -> None:
        """The next engine is ready. (The first one is, before there can be requests.)"""
        self._is_up = True
        self._is_probing = bool(self._suspect)

    def close(self) -> None:
        """The engine is lost; `crash` follows when its last words are heard."""
        self._is_up = False

    def take_due(self) -> tuple[int, ...]:
        """Streams to send to the engine now, in order; they count as sent."""
        if not self._is_up:
            return ()
        due = [*self._innocent]
        self._innocent.clear()
        if not due and self._is_probing and not self.unproven:
            due += self._next_suspect()
        if not self._is_probing:
            due += self._fresh
            self._fresh.clear()
        self._sent.update(dict.fromkeys(due))
        self.unproven.update(dict.fromkeys(due))
        return tuple(due)

    def _next_suspect(self) -> list[int]:
        for stream_id in self._suspect:
            del self._suspect[stream_id]
            return [stream_id]
        self._is_probing = False
        return []

    def crash(self) -> AbandonedStreams:
        """The engine is lost with all it was sent. Whoever is guilty stays until `drop`ped, and is not sent again."""
        self.close()
        verdict = self._judge()
        guilty = {*verdict.poisonous, *verdict.unlucky}
        suspects = {s: None for s in (*self.unproven, *self._suspect) if s not in guilty}
        self._innocent = {s: None for s in self._sent if s not in suspects and s not in guilty} | self._innocent
        self._suspect = suspects
        self._sent, self.unproven = {}, {}
        return verdict

    def _judge(self) -> AbandonedStreams:
        suspects = tuple(self.unproven)
        if not suspects:
            _count(self._num_shared, self._sent)
            return AbandonedStreams(unlucky=tuple(s for s in self._sent if self._num_shared[s] >= MAX_SHARED_CRASHES))
        _count(self._num_suspected, suspects)
        is_guilty = len(suspects) == 1 and self._num_suspected[suspects[0]] > 1
        return AbandonedStreams(poisonous=suspects if is_guilty else ())


def _count(counts: dict[int, int], stream_ids: Iterable[int]) -> None:
    for stream_id in stream_ids:
        counts[stream_id] = counts.get(stream_id, 0) + 1


def build_resumed_request(
    request: GenerateRequest, token_ids: list[int], elapsed_s: float, has_started: bool
) -> GenerateRequest:
    """`request` for an engine that gets it `elapsed_s` after its submit, when `token_ids` were sent already.

    Raises DEADLINE where no time is left.
    """
    sampling = request.sampling
    if token_ids and sampling.prompt_logprobs is not None:  # they went out with the first token
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
    return msgspec.structs.replace(
        request,
        sampling=sampling,
        resume_token_ids=list(token_ids),
        timeout_s=_left(request.timeout_s, elapsed_s),
        queue_timeout_s=None if has_started else _left(request.queue_timeout_s, elapsed_s),
    )


def _left(timeout_s: float | None, elapsed_s: float) -> float | None:
    if timeout_s is None:
        return None
    if timeout_s <= elapsed_s:
        raise SluiceError(ErrorCode.DEADLINE, f"the {timeout_s:g} s of the request passed while the engine restarted")
    return timeout_s - elapsed_s
