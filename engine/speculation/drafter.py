"""The interface of a drafter, and the gate that decides how many draft tokens are worth their time."""

from dataclasses import dataclass, field
from typing import Protocol

from sluice.engine.sequence import Sequence

FIRST_RATE = 0.6
"""Acceptance rate assumed of a new sequence."""
MEMORY = 0.8
"""Factor by which each checked draft reduces the weight of earlier ones."""
MIN_CHANCE = 0.2
"""Drafts less likely to be accepted are not worth it, however cheap a step seems, because its cost is an estimate."""
FIRST_PAUSE, LONGEST_PAUSE = 8, 256
"""Steps between two attempts at a sequence whose drafts are rejected; doubled after each failed attempt."""


@dataclass(frozen=True, slots=True)
class TokenPrices:
    """Value and cost of draft tokens in the next step, in seconds for each token gained and each draft checked."""

    value_s: float
    cost_s: float


class Drafter(Protocol):
    """Proposes draft tokens. They never change the output: a wrong one only costs time. Used from the engine thread."""

    def propose(self, decoding: list[Sequence], prices: TokenPrices) -> None:
        """Set the `drafts` of each sequence, at most its `max_drafts`. Called before a step is planned."""
        ...

    def observe(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Learn how many of the sequence's first `num_drafts` drafts the step accepted."""
        ...

    def forget(self, stream_id: int) -> None:
        """Drop the state of a sequence that has ended. An unknown one is no error."""
        ...


@dataclass(slots=True)
class DraftGate:
    """Tracks how many drafts of one sequence are accepted. It closes when few are."""

    rate: float = FIRST_RATE
    _pause: int = field(default=FIRST_PAUSE)
    _steps_to_wait: int = 0

    def num_drafts(self, most: int, prices: TokenPrices) -> int:
        """Return how many of at most `most` drafts to check. The n-th is reached with probability rate^n, and is worth
        it while rate^n * value >= cost. A closed gate lets a draft through now and then: the text may have changed."""
        worth, chance = 0, self.rate
        while worth < most and chance > MIN_CHANCE and chance * prices.value_s >= prices.cost_s:
            worth += 1
            chance *= self.rate
        if worth:
            return worth
        self._steps_to_wait -= 1
        return min(most, 1) if self._steps_to_wait < 0 else 0

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """Learn from a check of `num_drafts`. The drafts behind the first rejected one tell nothing."""
        num_tried = min(num_accepted + 1, num_drafts)
        for position in range(num_tried):
            self.rate = MEMORY * self.rate + (1 - MEMORY) * (position < num_accepted)
        if num_accepted:
            self._pause = FIRST_PAUSE
        else:
            self._steps_to_wait = self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
