"""One sequence under way."""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from serving.batching.sequences.lanes import Lane, Life
from serving.job import Job
from serving.tensors.tensor import Tensor


class Place(NamedTuple):
    """One of the sequences that an instance has at a time."""

    lane: Lane
    slot: int


@dataclass(slots=True, eq=False)
class Sequence:
    """`current` is queued or running, `line` are its requests behind that one. Times are perf_counter_ns."""

    correlation_id: int | str
    id_tensor: Tensor | None
    place: Place | None = None
    """None while it waits for one, and once it is lost."""
    line: deque[Job] = field(default_factory=deque)
    current: Job | None = None
    touched_ns: int = 0
    deadline_ns: int = 0
    """When its wait for a place is over; 0 is never."""
    is_ended: bool = False
    """Whether the last of its requests so far ends it: the next one has to begin it anew."""
    is_broken: bool = False
    """Whether one of its requests was cancelled before it ran: the model's state is not what it should be."""
    loss: str = ""
    """Why it cannot go on, in words for its client; "" while it can."""
    life: Life | None = None
    """Which of the instance's processes has its state; None: none of them yet."""
    states: dict[str, Tensor] = field(default_factory=dict)
    """What its next request gets as inputs, by name."""
    fresh_states: dict[str, Tensor] = field(default_factory=dict)
    """What the present request has given so far: it counts once the request has succeeded."""

    @property
    def is_busy(self) -> bool:
        return self.current is not None or bool(self.line)

    @property
    def has_lost_state(self) -> bool:
        """Whether the process that had its state is gone."""
        if self.place is None or self.life is None:
            return False
        lane = self.place.lane
        return not lane.is_ready or lane.life != self.life

    def notice_life(self) -> bool:
        """One of its requests has ended. False where that took the process, and the state, with it."""
        if self.place is None:
            return True
        lane = self.place.lane
        if not lane.is_ready:
            lane.note_death()
            return False
        if self.life is None:
            self.life = lane.life
        return self.life == lane.life

    def commit_states(self) -> None:
        """What the present request has given is what the next one gets."""
        if self.fresh_states:
            self.states = self.states | self.fresh_states
            self.fresh_states = {}
