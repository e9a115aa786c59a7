"""How long a request that comes now will wait until it is admitted. Pure: times are measured elsewhere."""

from collections.abc import Collection
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.config import SchedulerPolicy
from engine.forecast.learning import QUANTILES, StepTime, Usage
from engine.types import EngineInfo


class Queued(Protocol):
    """What the queue reads of a sequence, once, when it is added."""

    @property
    def stream_id(self) -> int: ...

    @property
    def priority(self) -> int: ...

    @property
    def tenant(self) -> str: ...

    @property
    def num_tokens(self) -> int:
        """Tokens to compute before the first new one: prompt, and output to resume."""
        ...

    @property
    def max_tokens(self) -> int: ...

    @property
    def worst_case_blocks(self) -> int: ...

    @property
    def start_deadline(self) -> float:
        """When it must have been admitted; `math.inf` for never."""
        ...

    @property
    def deadline(self) -> float: ...


class Backlog(NamedTuple):
    """Sums over sequences that wait."""

    num_requests: float = 0
    num_tokens: float = 0
    num_blocks: float = 0
    max_tokens: float = 0
    block_tokens: float = 0
    """Each one's blocks times its `max_tokens`: what it holds, for as long as it may."""

    @classmethod
    def of(cls, sequence: Queued) -> "Backlog":
        blocks, max_tokens = sequence.worst_case_blocks, sequence.max_tokens
        return cls(1, sequence.num_tokens, blocks, max_tokens, blocks * max_tokens)

    def plus(self, other: "Backlog", share: float = 1.0) -> "Backlog":
        """This and `share` of the other; a share of -1 takes it off."""
        return Backlog(
            self.num_requests + share * other.num_requests,
            self.num_tokens + share * other.num_tokens,
            self.num_blocks + share * other.num_blocks,
            self.max_tokens + share * other.max_tokens,
            self.block_tokens + share * other.block_tokens,
        )


MIN_STEPS = 32
"""Steps to have seen before a prediction is worth acting on."""
OVERHEAD_RATE = 1.0 / 256
"""Weight of one more step in the mean of what a step takes besides its runner."""


class Running(Protocol):
    """What the forecast reads of a sequence that runs."""

    @property
    def num_tokens_left(self) -> int:
        """Tokens of its context still to run before the next one is sampled: 1 while it decodes."""
        ...

    @property
    def num_output(self) -> int: ...

    @property
    def max_tokens(self) -> int: ...

    @property
    def worst_case_blocks(self) -> int: ...


class _Crowd(NamedTuple):
    """The sequences that the queue makes once it runs."""

    num_seqs: float
    max_tokens: float
    """In the mean over the blocks, so that long ones count for more."""
    num_tokens: float
    """That they all run through the model in their lives."""
    life: float
    """Of a sequence, in steps."""
    block_life: float
    """Of a block in a sequence's hands: those of long sequences are held for longer."""


class _Room(NamedTuple):
    """When there is room for more."""

    places: Openings
    blocks: Openings
    running: Backlog
    """Sums over those who run."""


class Forecast:
    """Predicts waits from what is reserved, what usually is used of it, and how long steps take.

    Of places and of blocks, those ahead and the newcomer need so many; the wait is until that much has come free,
    counting what is taken and comes free again meanwhile (`Openings`). O(running), however many wait.
    """

    def __init__(self, limits: EngineInfo) -> None:
        self._limits = limits
        self._steps = StepTime()
        self._overhead_s = 0.0
        self._usage = Usage()
        self._room: _Room | None = None
        self._room_key = (0, 0, 0.0)
        self.waits_total = 0
        self.wait_seconds_total = 0.0
        self.wait_error_seconds_total = 0.0

    @property
    def is_warm(self) -> bool:
        """Whether it has seen enough to be acted on."""
        return self._steps.num_observed >= MIN_STEPS

    def observe_step(self, num_tokens: int, num_seqs: int, seconds: float) -> None:
        """The runner took so long for a step of so many tokens of so many sequences."""
        self._steps.observe(num_tokens, num_seqs, seconds)

    def observe_overhead(self, seconds: float) -> None:
        """What a step took besides."""
        rate = max(OVERHEAD_RATE, 1.0 / max(self._steps.num_observed, 1))
        self._overhead_s += rate * (seconds - self._overhead_s)

    def token_prices(self, num_seqs: int) -> tuple[float, float]:
        """What a token gained is worth while `num_seqs` decode, and what one more in a step costs; in seconds."""
        step_s = self._steps.seconds(num_seqs, num_seqs)
        return step_s / num_seqs, self._steps.seconds(num_seqs + 1, num_seqs) - step_s

    def observe_end(self, max_tokens: int, num_output: int) -> None:
        """A sequence that ran has ended, by itself or cancelled: that is how a stop string ends it."""
        self._usage.observe(max_tokens, num_output)

    def record_wait(self, predicted_s: float, actual_s: float) -> None:
        """A request was admitted; keeps the sums for `EngineStats`."""
        self.waits_total += 1
        self.wait_seconds_total += actual_s
        self.wait_error_seconds_total += abs(predicted_s - actual_s)

    def wait_s(self, running: Collection[Running], ahead: Backlog, num_blocks: int, free_blocks: int) -> float:
        """Seconds until a request of `num_blocks` is admitted, with `ahead` before it.

        `free_blocks`: those that are not reserved. 0 where it would start at once, and before any step ran.
        """
        share = self._held_share(running)
        free_places = self._limits.max_num_seqs - len(running)
        free = self._limits.num_blocks - share * (self._limits.num_blocks - free_blocks)
        needed = share * (ahead.num_blocks + num_blocks)
        is_static = self._limits.scheduler_policy == SchedulerPolicy.STATIC_BATCH
        if ahead.num_requests < free_places and needed <= free and not (is_static and running):
            return 0.0
        room = self._room_of(running, free_places, free, share)
        crowd = self._crowd(ahead if ahead.num_requests >= 1 else room.running, num_blocks, share)
        if is_static:
            return self._wait_for_batch(running, ahead, crowd, room.places)
        variation = self._usage.variation
        to_place = room.places.steps_to(ahead.num_requests + 1, crowd.life, variation)
        to_blocks = room.blocks.steps_to(needed, crowd.block_life, variation)
        return max(to_place, to_blocks) * self._step_s(crowd.num_tokens / crowd.life, crowd.num_seqs)

    def _step_s(self, num_tokens: float, num_seqs: float) -> float:
        return self._steps.seconds(num_tokens, num_seqs) + self._overhead_s

    def _wait_for_batch(self, running: Collection[Running], ahead: Backlog, crowd: _Crowd, places: Openings) -> float:
        """Until this batch has ended, and as many whole ones as are ahead."""
        of_batch = max(self._usage.share_at(_longest_of(crowd.num_seqs)) * crowd.max_tokens, crowd.life)
        steps = places.end_at(_longest_of(len(running))) + ahead.num_requests // crowd.num_seqs * of_batch
        return steps * self._step_s(crowd.num_tokens / of_batch, crowd.num_seqs)

    def _held_share(self, running: Collection[Running]) -> float:
        """What of its worst case a sequence is reckoned to hold: under `max_utilization` its prompt, what it has of
        its output on the average of its life, and the block that is kept free for it."""
        if self._limits.scheduler_policy != SchedulerPolicy.MAX_UTILIZATION or not running:
            return 1.0
        block_size = self._limits.block_size
        worst_case = sum(s.worst_case_blocks for s in running) * block_size
        max_tokens = sum(s.max_tokens for s in running)
        # Long lives are met more often than short ones, so that of uneven ones more than half is over.
        output = max_tokens * self._usage.mean * (1.0 + self._usage.variation) / 2.0
        return min((worst_case - max_tokens + output + len(running) * block_size) / worst_case, 1.0)

    def _room_of(self, running: Collection[Running], free_places: int, free_blocks: float, share: float) -> _Room:
        """Worked out once between two steps, however many requests come."""
        key = (self._steps.num_observed, free_places, free_blocks)
        if self._room is None or key != self._room_key:
            self._room = self._work_out_room(running, free_places, free_blocks, share)
            self._room_key = key
        return self._room

    def _work_out_room(self, running: Collection[Running], free_places: int, free_blocks: float, share: float) -> _Room:
        columns = [(s.num_output, s.max_tokens, s.num_tokens_left - 1, s.worst_case_blocks) for s in running]
        num_output, max_tokens, to_prefill, held = np.array(columns, np.float64).reshape(-1, 4).T
        prefill_steps = to_prefill / self._limits.max_num_batched_tokens
        ends = (self._usage.left(num_output, max_tokens) + prefill_steps[:, None]).ravel()
        order = np.argsort(ends)
        part = 1.0 / len(QUANTILES)
        prompts = held * self._limits.block_size - max_tokens
        sums = (column.sum() for column in (prompts, held, max_tokens, held * max_tokens))
        return _Room(
            Openings(free_places, ends[order], np.full(len(ends), part)),
            Openings(free_blocks, ends[order], np.repeat(held, len(QUANTILES))[order] * part * share),
            Backlog(len(running), *map(float, sums)),
        )

    def _crowd(self, of: Backlog, num_blocks: int, share: float) -> _Crowd:
        """Of such sequences as `of` sums up, as many as there is room for; `num_blocks` each where it is empty."""
        limits, usage = self._limits, self._usage.mean
        count = max(of.num_requests, 1.0)
        blocks = share * max(of.num_blocks, num_blocks) / count
        num_seqs = max(min(limits.max_num_seqs, limits.num_blocks / blocks), 1.0)
        prompt = of.num_tokens / count
        output = max(of.max_tokens / count * usage, 1.0)
        block_max_tokens = of.block_tokens / max(of.num_blocks, 1.0)
        block_output = max(block_max_tokens * usage, 1.0)
        batch = limits.max_num_batched_tokens
        num_tokens = num_seqs * (prompt + output)
        life = max(output + prompt / batch, num_tokens / batch)
        return _Crowd(num_seqs, block_max_tokens, num_tokens, life, life + block_output - output)


def _longest_of(count: float) -> float:
    """At which quantile of their lengths the longest of so many is expected; near for even and for random lengths."""
    return count / (count + 0.7)


Floats = NDArray[np.float64]


class Openings:
    """So much of one kind of capacity (places, blocks) is free now, and more comes free at `ends`, in steps from now.

    What has come free is taken by others, who give it back after a life. Either all lives are alike: then what came
    free by t comes free again at t + life. Or they end at random: then each has the chance 1 / life in each step. With
    D(t) free by t, the capacity that was to be had by t is D(t) + D(t - life) + ... in the first case and
    D(t) + integral of D / life in the second; real crowds are taken to be between the two.
    """

    def __init__(self, free: float, ends: Floats, amounts: Floats) -> None:
        """`ends` ascending, and what comes free at each."""
        self._ends = np.append(0.0, ends)
        self._freed = free + np.append(0.0, np.cumsum(amounts))
        self._area = np.append(0.0, np.cumsum(self._freed[:-1] * np.diff(self._ends)))

    def steps_to(self, amount: float, life: float, variation: float) -> float:
        """Until so much was to be had. `variation`: 0 for lives that are alike to 1 for lives that end at random."""
        randomness = min(variation, 1.0)
        alike = self._steps_if_alike(amount, life)
        return alike + randomness * (self._steps_if_random(amount, life) - alike)

    def end_at(self, quantile: float) -> float:
        """When that part of those who run has ended."""
        return float(self._ends[round(quantile * (len(self._ends) - 1))])

    def _steps_if_alike(self, amount: float, life: float) -> float:
        # What is asked of the last round is more than nothing, so that a multiple of all is no round too many.
        rounds = max(-(-amount // self._freed[-1]) - 1.0, 0.0)
        index = int(self._freed.searchsorted(amount - rounds * self._freed[-1]))
        # Where some go on for longer than a life, what others took has been given back by then.
        return float(min(self._ends[min(index, len(self._ends) - 1)], life) + rounds * life)

    def _steps_if_random(self, amount: float, life: float) -> float:
        had = self._freed + self._area / life
        index = int(had.searchsorted(amount))
        if index == 0:
            return 0.0
        before = index - 1  # between two ends it grows by what is free, a life at a time
        steps = float(self._ends[before] + (amount - had[before]) * life / max(self._freed[before], 1e-9))
        return steps if index == len(had) else min(steps, float(self._ends[index]))
