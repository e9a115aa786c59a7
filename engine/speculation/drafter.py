"""How many draft tokens are worth their time: as many as are likely enough to be accepted."""

from dataclasses import dataclass, field
from typing import Protocol

from engine.sequence import Sequence


class Drafter(Protocol):
    """Used from the engine's thread. Drafts change no output: a wrong one costs its time and nothing else."""

    def propose(self, decoding: list[Sequence], prices: TokenPrices) -> None:
        """Set the `drafts` of each sequence before a step is planned; at most `max_drafts` of each."""
        ...

    def observe(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """A step checked the first `num_drafts` drafts of the sequence."""
        ...

    def forget(self, stream_id: int) -> None:
        """The sequence has ended; unknown ones are no error."""
        ...


FIRST_RATE = 0.6
"""What is thought of a sequence of which nothing is known."""
MEMORY = 0.8
"""Weight of what was known after one more draft was checked."""
LEAST_CHANCE = 0.2
"""Drafts less likely than that are not worth it, however cheap a step seems: what it costs is an estimate."""
FIRST_PAUSE, LONGEST_PAUSE = 8, 256
"""Steps between two attempts at a sequence whose drafts are refused; doubled each time that fails."""


@dataclass(frozen=True, slots=True)
class TokenPrices:
    """What the next step says of time: a token gained is worth its share of a step, a draft checked costs some."""

    value_s: float
    cost_s: float


@dataclass(slots=True)
class Gate:
    """One sequence's record of accepted drafts. Where few are accepted, it closes."""

    rate: float = FIRST_RATE
    _pause: int = field(default=FIRST_PAUSE)
    _steps_to_wait: int = 0

    def num_drafts(self, most: int, prices: TokenPrices) -> int:
        """How many of at most `most` drafts to check in this step.

        The n-th is reached with probability rate^n, and is worth checking while rate^n * value >= cost. A closed gate
        lets one draft through now and then, to learn whether the text has changed.
        """
        worth, chance = 0, self.rate
        while worth < most and chance > LEAST_CHANCE and chance * prices.value_s >= prices.cost_s:
            worth += 1
            chance *= self.rate
        if worth:
            return worth
        self._steps_to_wait -= 1
        return min(most, 1) if self._steps_to_wait < 0 else 0

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """So many drafts were checked. The first that was refused says nothing of those behind it."""
        num_tried = min(num_accepted + 1, num_drafts)
        for position in range(num_tried):
            self.rate = MEMORY * self.rate + (1 - MEMORY) * (position < num_accepted)
        if num_accepted:
            self._pause = FIRST_PAUSE
        else:
            self._steps_to_wait = self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
