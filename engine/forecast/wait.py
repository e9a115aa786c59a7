"""Predicts how long a new request waits until it is admitted. Pure: times are measured elsewhere."""

from collections.abc import Collection
from typing import NamedTuple, Protocol

import numpy as np

from engine.forecast.learning import QUANTILES, Floats, OutputLengths, StepTimeModel
from engine.scheduling.policies import find_policy
from engine.types import EngineInfo

MIN_STEPS = 32
"""Steps to observe before a prediction is reliable enough to reject requests by it."""
OVERHEAD_RATE = 1.0 / 256
"""Weight of the latest step in the running mean of the overhead."""


class QueuedSequence(Protocol):
    """The properties of a sequence that the queue reads, once, when the sequence is added."""

    stream_id: int
    priority: int
    tenant: str

    @property
    def num_tokens(self) -> int:
        """Tokens to compute before the first new one: the prompt, and output to resume."""
        ...

    max_tokens: int

    @property
    def worst_case_blocks(self) -> int: ...

    start_deadline: float
    """Time by which it must be admitted; `math.inf` for none."""
    deadline: float


class RunningSequence(Protocol):
    """The properties of a running sequence that the forecast reads."""

    @property
    def num_tokens_left(self) -> int:
        """Tokens of its context to compute before the next one is sampled: 1 during decode."""
        ...

    num_output: int
    max_tokens: int

    @property
    def worst_case_blocks(self) -> int: ...


class QueuedWork(NamedTuple):
    """Sums over sequences, usually those that wait."""

    num_requests: float = 0
    num_tokens: float = 0
    num_blocks: float = 0
    max_tokens: float = 0
    block_tokens: float = 0
    """Sum of each sequence's blocks times its `max_tokens`: what it occupies, times how long it may."""

    @classmethod
    def of(cls, sequence: QueuedSequence) -> "QueuedWork":
        blocks, max_tokens = sequence.worst_case_blocks, sequence.max_tokens
        return cls(1, sequence.num_tokens, blocks, max_tokens, blocks * max_tokens)

    def plus(self, other: "QueuedWork", share: float = 1.0) -> "QueuedWork":
        """Return the sum of this and `share` of the other; a share of -1 subtracts it."""
        return QueuedWork(
            self.num_requests + share * other.num_requests,
            self.num_tokens + share * other.num_tokens,
            self.num_blocks + share * other.num_blocks,
            self.max_tokens + share * other.max_tokens,
            self.block_tokens + share * other.block_tokens,
        )


class FreedCapacity:
    """One kind of capacity (places, blocks) over time: free now, or freed when running sequences end.

    Freed capacity is taken by other sequences, which free it again at the end of their lives. If all lives are equal,
    what is freed by t is freed again at t + life. If lives end at random, each ends with the probability 1 / life in a
    step. With D(t) freed by t, the capacity available up to t is D(t) + D(t - life) + ... in the first case and D(t) +
    integral of D / life in the second. Real loads are assumed to be between the two. Times are in steps from now.
    """

    def __init__(self, free: float, ends: Floats, amounts: Floats) -> None:
        """`amounts[i]` is freed at `ends[i]`; `ends` is ascending."""
        self._ends = np.append(0.0, ends)
        self._freed = free + np.append(0.0, np.cumsum(amounts))
        self._area = np.append(0.0, np.cumsum(self._freed[:-1] * np.diff(self._ends)))

    def steps_to(self, amount: float, life: float, variation: float) -> float:
        """Return the steps until `amount` was available. `variation`: 0 for equal lives to 1 for random ones."""
        randomness = min(variation, 1.0)
        if_equal = self._steps_if_equal(amount, life)
        return if_equal + randomness * (self._steps_if_random(amount, life) - if_equal)

    def end_at(self, quantile: float) -> float:
        """Return the steps until that fraction of the running sequences has ended."""
        return float(self._ends[round(quantile * (len(self._ends) - 1))])

    def _steps_if_equal(self, amount: float, life: float) -> float:
        # The last round must be asked for more than nothing, so that a multiple of all takes no round too many.
        rounds = max(-(-amount // self._freed[-1]) - 1.0, 0.0)
        index = int(self._freed.searchsorted(amount - rounds * self._freed[-1]))
        # Sequences that outlive a life do not matter: what others took has been freed again by then.
        return float(min(self._ends[min(index, len(self._ends) - 1)], life) + rounds * life)

    def _steps_if_random(self, amount: float, life: float) -> float:
        available = self._freed + self._area / life
        index = int(available.searchsorted(amount))
        if index == 0:
            return 0.0
        before = index - 1  # between two ends it grows by the freed capacity, once a life
        steps = float(self._ends[before] + (amount - available[before]) * life / max(self._freed[before], 1e-9))
        return steps if index == len(available) else min(steps, float(self._ends[index]))


class _Availability(NamedTuple):
    """The capacity that is freed over time for more sequences."""

    places: FreedCapacity
    blocks: FreedCapacity
    running: QueuedWork
    """Sums over the running sequences."""


class _Workload(NamedTuple):
    """The running sequences as they will be once the queued ones run."""

    num_seqs: float
    max_tokens: float
    """Mean over the blocks, so that long sequences count for more."""
    num_tokens: float
    """Tokens that all of them compute in their lives."""
    life: float
    """Life of a sequence, in steps."""
    block_life: float
    """Time for which a block is allocated, in steps; longer than `life`, because long sequences have more blocks."""


class WaitForecast:
    """Predicts waits from what is reserved, how much of it is usually used, and how long steps take. A newcomer and the
    work ahead of it need a number of places and of blocks. The wait lasts until that much has been freed, counting what
    is taken and freed again meanwhile (`FreedCapacity`). O(running), however many wait."""

    def __init__(self, limits: EngineInfo) -> None:
        self._limits = limits
        self._policy = find_policy(limits.scheduler_policy)
        self._steps = StepTimeModel()
        self._overhead_s = 0.0
        self._lengths = OutputLengths()
        self._availability: _Availability | None = None
        self._availability_key = (0, 0, 0.0)
        self.waits_total = 0
        self.wait_seconds_total = 0.0
        self.wait_error_seconds_total = 0.0

    @property
    def is_warm(self) -> bool:
        """Whether enough steps were observed to reject requests by the predictions."""
        return self._steps.num_observed >= MIN_STEPS

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        """Learn how long the runner took for a step of `num_tokens`."""
        self._steps.observe(num_tokens, seconds)

    def observe_overhead(self, seconds: float) -> None:
        """Learn how long a step took besides its runner."""
        rate = max(OVERHEAD_RATE, 1.0 / max(self._steps.num_observed, 1))
        self._overhead_s += rate * (seconds - self._overhead_s)

    def token_prices(self, num_seqs: int) -> tuple[float, float]:
        """Return what a token gained is worth while `num_seqs` decode, and what one more costs, in seconds."""
        step_s = self._steps.seconds(num_seqs)
        return step_s / num_seqs, self._steps.seconds(num_seqs + 1) - step_s

    def observe_end(self, max_tokens: int, num_output: int) -> None:
        """Learn from a running sequence that has ended, by itself or cancelled, as a stop string does."""
        self._lengths.observe(max_tokens, num_output)

    def record_wait(self, predicted_s: float, actual_s: float) -> None:
        """Add an admitted request to the sums for `EngineStats`."""
        self.waits_total += 1
        self.wait_seconds_total += actual_s
        self.wait_error_seconds_total += abs(predicted_s - actual_s)

    def wait_s(
        self, running: Collection[RunningSequence], ahead: QueuedWork, num_blocks: int, free_blocks: int
    ) -> float:
        """Return the seconds until a request of `num_blocks` is admitted, with `ahead` before it. `free_blocks` is how
        many are not reserved. Returns 0 if the request would start at once, and before any step."""
        share = self._allocated_share(running)
        free_places = self._limits.max_num_seqs - len(running)
        free = self._limits.num_blocks - share * (self._limits.num_blocks - free_blocks)
        needed = share * (ahead.num_blocks + num_blocks)
        can_join = self._policy.is_in_flight or not running
        if ahead.num_requests < free_places and needed <= free and can_join:
            return 0.0
        available = self._find_availability(running, free_places, free, share)
        workload = self._workload(ahead if ahead.num_requests >= 1 else available.running, num_blocks, share)
        if not self._policy.is_in_flight:
            return self._wait_for_batch(running, ahead, workload, available.places)
        variation = self._lengths.variation
        to_place = available.places.steps_to(ahead.num_requests + 1, workload.life, variation)
        to_blocks = available.blocks.steps_to(needed, workload.block_life, variation)
        return max(to_place, to_blocks) * self._step_s(workload.num_tokens / workload.life)

    def _step_s(self, num_tokens: float) -> float:
        return self._steps.seconds(num_tokens) + self._overhead_s

    def _wait_for_batch(
        self, running: Collection[RunningSequence], ahead: QueuedWork, workload: _Workload, places: FreedCapacity
    ) -> float:
        """Return the seconds until this batch and as many whole ones as are ahead have ended."""
        used = self._lengths.used_fraction(_longest_quantile(workload.num_seqs))
        batch_steps = max(used * workload.max_tokens, workload.life)
        num_batches = ahead.num_requests // workload.num_seqs
        steps = places.end_at(_longest_quantile(len(running))) + num_batches * batch_steps
        return steps * self._step_s(workload.num_tokens / batch_steps)

    def _allocated_share(self, running: Collection[RunningSequence]) -> float:
        """Return the share of their worst case that sequences hold on average: all under policies that reserve it, else
        the prompt, half of the output or more, and the block that is kept free for each."""
        if self._policy.reserves_worst_case or not running:
            return 1.0
        block_size = self._limits.block_size
        worst_case = sum(s.worst_case_blocks for s in running) * block_size
        max_tokens = sum(s.max_tokens for s in running)
        # Long lives are observed more often than short ones, so if they vary, more than half of one is over.
        output = max_tokens * self._lengths.mean * (1.0 + self._lengths.variation) / 2.0
        return min((worst_case - max_tokens + output + len(running) * block_size) / worst_case, 1.0)

    def _find_availability(
        self, running: Collection[RunningSequence], free_places: int, free_blocks: float, share: float
    ) -> _Availability:
        """Compute the availability once between two steps, however many requests come."""
        key = (self._steps.num_observed, free_places, free_blocks)
        if self._availability is None or key != self._availability_key:
            self._availability = self._compute_availability(running, free_places, free_blocks, share)
            self._availability_key = key
        return self._availability

    def _compute_availability(
        self, running: Collection[RunningSequence], free_places: int, free_blocks: float, share: float
    ) -> _Availability:
        columns = [(s.num_output, s.max_tokens, s.num_tokens_left - 1, s.worst_case_blocks) for s in running]
        num_output, max_tokens, to_prefill, blocks = np.array(columns, np.float64).reshape(-1, 4).T
        prefill_steps = to_prefill / self._limits.max_num_batched_tokens
        ends = (self._lengths.tokens_left(num_output, max_tokens) + prefill_steps[:, None]).ravel()
        order = np.argsort(ends)
        part = 1.0 / len(QUANTILES)
        prompts = blocks * self._limits.block_size - max_tokens
        sums = (column.sum() for column in (prompts, blocks, max_tokens, blocks * max_tokens))
        return _Availability(
            FreedCapacity(free_places, ends[order], np.full(len(ends), part)),
            FreedCapacity(free_blocks, ends[order], np.repeat(blocks, len(QUANTILES))[order] * part * share),
            QueuedWork(len(running), *map(float, sums)),
        )

    def _workload(self, work: QueuedWork, num_blocks: int, share: float) -> _Workload:
        """Return as many average sequences of `work` as fit; with `num_blocks` each if it is empty."""
        limits, usage = self._limits, self._lengths.mean
        count = max(work.num_requests, 1.0)
        blocks = share * max(work.num_blocks, num_blocks) / count
        num_seqs = max(min(limits.max_num_seqs, limits.num_blocks / blocks), 1.0)
        prompt = work.num_tokens / count
        output = max(work.max_tokens / count * usage, 1.0)
        block_max_tokens = work.block_tokens / max(work.num_blocks, 1.0)
        block_output = max(block_max_tokens * usage, 1.0)
        batch = limits.max_num_batched_tokens
        num_tokens = num_seqs * (prompt + output)
        life = max(output + prompt / batch, num_tokens / batch)
        return _Workload(num_seqs, block_max_tokens, num_tokens, life, life + block_output - output)


def _longest_quantile(count: float) -> float:
    """Return the quantile at which the longest of `count` is expected: close for equal and for random lengths."""
    return count / (count + 0.7)
