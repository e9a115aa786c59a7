"""Models that learn from what has run: how long outputs become, how long steps take, how far predictions are off."""

import math
from collections import OrderedDict, deque
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from sluice.engine.scheduling.planner import ChunkLimits, StepTimes, choose_chunk
from sluice.engine.sequence import RequestSize

Floats = NDArray[np.float64]

EDGES: Floats = np.unique(np.round(2.0 ** (np.arange(81) / 4.0))) - 1.0
"""Edges of the bins, in tokens: from 0 to a million, each about a fifth longer than the last."""
ENDING_MEMORY = 1.0 - 1.0 / 256
"""Factor by which each ending of a class reduces the weight of earlier ones: the last few hundred count."""
CHANGE_RATE, CHANGE_SPREADS, CHANGE_MEMORY = 1.0 / 16, 6.0, 0.02
"""Another kind of load has come where the mean of the logarithms of the latest dozen or so lengths is so many standard
deviations from that of all. Then earlier endings count for little."""
PRIOR_WEIGHT = 2.0
"""Sequences that the distribution of the wider class stands for in a narrower one."""
PRIOR_MEDIAN, PRIOR_SPREAD = 150.0, 1.2
"""Before any has ended: a lognormal distribution such as the answers of chats have. A sequence that cannot end by
itself is assumed to use its `max_tokens`."""
MIN_VARIANCE = 0.01
MAX_CLASSES = 512

SizeClass = tuple[object, ...]
"""Sequences whose outputs are expected to be similar."""


class _EndingRates:
    """For each bin, how many sequences came into it and how many ended there: the estimate of Kaplan and Meier. A
    sequence that ends at its `max_tokens` has come so far and says nothing of longer ones."""

    def __init__(self) -> None:
        self.reached = np.zeros(len(EDGES) - 1)
        self.ended = np.zeros(len(EDGES) - 1)
        self._num_observed = 0.0
        self._mean = self._variance = self._latest = 0.0
        """Mean and variance of the logarithms of all lengths that count, and their mean over the latest."""

    def observe(self, num_output: float, *, has_stopped: bool) -> None:
        self._note_length(math.log1p(num_output))
        self.reached *= ENDING_MEMORY
        self.ended *= ENDING_MEMORY
        index, part = _bin_of(num_output)
        self.reached[:index] += 1.0
        self.reached[index] += 1.0 if has_stopped else part
        self.ended[index] += has_stopped

    def _note_length(self, length: float) -> None:
        """Forget most endings of another kind of load."""
        self._num_observed = self._num_observed * ENDING_MEMORY + 1.0
        self._latest += max(CHANGE_RATE, 1.0 / self._num_observed) * (length - self._latest)
        change, rate = length - self._mean, 1.0 / self._num_observed
        self._mean += rate * change
        self._variance = (1.0 - rate) * (self._variance + rate * change * change)
        spread = math.sqrt((self._variance + MIN_VARIANCE) * CHANGE_RATE / 2.0)
        if self._num_observed * CHANGE_RATE > 2.0 and abs(self._latest - self._mean) > CHANGE_SPREADS * spread:
            self.reached *= CHANGE_MEMORY
            self.ended *= CHANGE_MEMORY
            self._mean, self._num_observed = self._latest, 1.0 / CHANGE_RATE


class OutputLengths:
    """Models the length of outputs by classes: those of a tenant with about the same `max_tokens` and prompts of about
    the same length, wider classes where a class has seen little."""

    def __init__(self) -> None:
        self._classes: OrderedDict[SizeClass, _EndingRates] = OrderedDict()
        self._running: dict[SizeClass, Floats] = {}
        self.num_observed = 0

    def observe(self, sequence: RequestSize, *, is_cancelled: bool = False) -> None:
        """Learn from a sequence that has ended, by itself or cancelled, as a stop string does."""
        self.num_observed += 1
        has_stopped = is_cancelled or sequence.num_output < sequence.max_tokens
        for key in _classes_of(sequence):
            rates = self._classes.get(key)
            if rates is None:
                rates = self._classes[key] = _EndingRates()
                if len(self._classes) > MAX_CLASSES:
                    self._classes.popitem(last=False)
            self._classes.move_to_end(key)
            rates.observe(sequence.num_output, has_stopped=has_stopped)

    def expect(self, sequence: RequestSize) -> float:
        """Return the mean number of tokens that the sequence has left."""
        levels = (np.arange(8) + 0.5) / 8
        return float(self._left([sequence], levels[None, :])[0].mean())

    def shortest(self, sequence: RequestSize, quantile: float) -> float:
        """Return the tokens left at a low quantile."""
        return float(self._left([sequence], np.array([[quantile]]))[0, 0])

    def note_running(self, running: Collection[RequestSize]) -> None:
        """Count how far the running sequences have come: at first only the short ones have ended."""
        self._running = {}
        for sequence in running:
            index, part = _bin_of(sequence.num_output)
            for key in _classes_of(sequence):
                reached = self._running.get(key)
                if reached is None:
                    reached = self._running[key] = np.zeros(len(EDGES) - 1)
                reached[:index] += 1.0
                reached[index] += part

    def sample_left(self, sequences: Sequence[RequestSize], num_samples: int, rng: np.random.Generator) -> Floats:
        """Return samples of the tokens left to each sequence, [num_seqs, num_samples], at least 1. The samples of a
        sequence cover its distribution evenly."""
        strata = rng.permuted(np.tile(np.arange(num_samples, dtype=float), (len(sequences), 1)), axis=1)
        return self._left(sequences, (strata + rng.random(strata.shape)) / num_samples)

    def _left(self, sequences: Sequence[RequestSize], levels: Floats) -> Floats:
        left = np.empty(levels.shape)
        groups: dict[SizeClass, list[int]] = {}
        for index, sequence in enumerate(sequences):
            groups.setdefault(_classes_of(sequence)[-1], []).append(index)
        for indices in groups.values():
            hazard = self._hazard(sequences[indices[0]])
            done = np.array([sequences[index].num_output for index in indices], float)
            limit = np.array([sequences[index].max_tokens for index in indices], float)
            targets = np.interp(done, EDGES, hazard)[:, None] - np.log1p(-levels[indices])
            ends = np.interp(targets, hazard, EDGES, right=math.inf)
            left[indices] = np.minimum(ends, limit[:, None]) - done[:, None]
        return np.maximum(left, 1.0)

    def _hazard(self, sequence: RequestSize) -> Floats:
        """Return the cumulative hazard of ending at EDGES."""
        hazard = _PRIOR_HAZARD if sequence.can_stop else np.zeros(len(EDGES) - 1)
        for key in _classes_of(sequence):
            rates = self._classes.get(key)
            running = self._running.get(key)
            reached = PRIOR_WEIGHT if running is None else running + PRIOR_WEIGHT
            ended = PRIOR_WEIGHT * hazard
            if rates is not None:
                reached, ended = reached + rates.reached, ended + rates.ended
            hazard = ended / reached
        steps = -np.log1p(-np.minimum(hazard, 1.0 - 1e-6)) + 1e-9
        return np.concatenate(([0.0], np.cumsum(steps)))


def _classes_of(sequence: RequestSize) -> tuple[SizeClass, ...]:
    """Return the classes of a sequence, from the widest to the narrowest. Questions about documents and chats differ in
    their prompts more than in their `max_tokens`."""
    can_stop, size = sequence.can_stop, round(2.0 * math.log2(sequence.max_tokens))
    prompt = round(0.5 * math.log2(sequence.num_prompt + 1))
    return (can_stop,), (can_stop, size), (can_stop, size, sequence.tenant), (can_stop, size, sequence.tenant, prompt)


def _bin_of(num_output: float) -> tuple[int, float]:
    """Return the bin that has the last of so many tokens, and which part of it they fill."""
    index = max(int(EDGES.searchsorted(num_output)) - 1, 0)
    return index, float((num_output - EDGES[index]) / (EDGES[index + 1] - EDGES[index]))


def _prior_hazard() -> Floats:
    survival = [1.0] + [
        0.5 * math.erfc(math.log(edge / PRIOR_MEDIAN) / (PRIOR_SPREAD * math.sqrt(2.0))) for edge in EDGES[1:]
    ]
    survivors = np.maximum(np.array(survival), 1e-12)
    hazard: Floats = 1.0 - survivors[1:] / survivors[:-1]
    return hazard


_PRIOR_HAZARD = _prior_hazard()


# -- steps

STEP_MEMORY = 1.0 - 1.0 / 512
"""Factor by which each step reduces the weight of earlier ones of about its size in the fit: about the last thousand
count."""
SIZE_WEIGHT = 1.0 / 32
"""Weight of steps with twice or half as many sequences: they cost less or more for each sequence. Steps of another
size are remembered until some of that size come again."""
SPEED_MEMORY = 1.0 - 1.0 / 96
"""The same for the speed of the machine, which changes faster than what a token costs in relation to a step."""
PHASE_STEPS = 256.0
"""Steps for which the machine is expected to stay as slow, or as fast, as it is."""
MAX_SIZES = 16
MIN_SPREAD = 4.0
"""Variance below which steps are too similar to tell the cost of a sequence or of a token."""
MAX_STEPS_TO_FIT = 32
"""Steps between two fits; a fit takes as long as a few observations."""


class StepTimeModel:
    """Models the seconds of a step as (a + b * sequences + c * prefill tokens) * slowness.

    a, b and c are a regression that forgets; none is below 0. `slowness` is the time of the latest steps over what the
    regression gives for them: it follows a machine that is busy with something else.
    """

    def __init__(self) -> None:
        self.num_observed = 0
        self.tokens_per_step = 1.0
        """Output tokens that a sequence gets in a step; more than 1 with speculation."""
        self._moments = np.zeros((MAX_SIZES, 3, 3))
        self._products = np.zeros((MAX_SIZES, 3))
        """Weighted sums over the steps of each size, which is the logarithm of the number of sequences."""
        self._costs: dict[int, tuple[float, float, float]] = {}
        """The costs of steps of about a size, since the last fit."""
        self._fit_again_at = 0
        self._recent_s = self._recent_fit_s = 0.0

    def observe(self, num_seqs: int, num_prefill: int, seconds: float) -> None:
        """Learn from a step of `num_seqs` sequences, with `num_prefill` tokens of prompts among its tokens."""
        features, size = np.array((1.0, num_seqs, num_prefill)), _size_of(num_seqs)
        self._moments[size] *= STEP_MEMORY
        self._moments[size] += features[:, None] * features
        self._products[size] *= STEP_MEMORY
        self._products[size] += features * seconds
        if self.num_observed >= self._fit_again_at:
            self._costs.clear()
            self._fit_again_at = self.num_observed + min(self.num_observed // 4 + 1, MAX_STEPS_TO_FIT)
        self.num_observed += 1
        self._recent_s = self._recent_s * SPEED_MEMORY + seconds
        self._recent_fit_s = self._recent_fit_s * SPEED_MEMORY + self._fit(num_seqs, num_prefill)

    def seconds(self, num_seqs: float, num_prefill: float = 0.0) -> float:
        """Return the expected duration of a step; 0 before any was observed."""
        return self._fit(num_seqs, num_prefill) * self._slowness

    def sequence_seconds(self, num_seqs: float) -> float:
        """Return what one more sequence adds to a step of `num_seqs`."""
        return self._find_costs(num_seqs)[1] * self._slowness

    def elapsed(self, num_steps: Floats, num_seqs: float, num_prefill: Floats) -> Floats:
        """Return the expected seconds of that many steps from now, in which so many tokens of prompts are computed. The
        machine is expected to return from its present slowness to what it mostly was."""
        slow_steps = PHASE_STEPS * -np.expm1(-num_steps / PHASE_STEPS)
        slowness = 1.0 + (self._slowness - 1.0) * slow_steps / np.maximum(num_steps, 1e-9)
        seconds: Floats = (
            self._fit(num_seqs, 0.0) * num_steps + self._find_costs(num_seqs)[2] * num_prefill
        ) * slowness
        return seconds

    @property
    def _slowness(self) -> float:
        return self._recent_s / self._recent_fit_s if self._recent_fit_s > 0.0 else 1.0

    def _fit(self, num_seqs: float, num_prefill: float) -> float:
        step_s, seq_s, prefill_s = self._find_costs(num_seqs)
        return step_s + seq_s * num_seqs + prefill_s * num_prefill

    def _find_costs(self, num_seqs: float) -> tuple[float, float, float]:
        """Return the costs of a step, of a sequence and of a token of a prompt in steps of about that size."""
        size = _size_of(num_seqs)
        costs = self._costs.get(size)
        if costs is None:
            weights = SIZE_WEIGHT ** np.abs(np.arange(MAX_SIZES) - size)
            moments, products = np.tensordot(weights, self._moments, 1), weights @ self._products
            count = moments[0, 0]
            costs = _fit_costs(moments / count, products / count) if count else (0.0, 0.0, 0.0)
            self._costs[size] = costs
        return costs


def _size_of(num_seqs: float) -> int:
    return min(round(math.log2(max(num_seqs, 1.0))), MAX_SIZES - 1)


def _fit_costs(moments: Floats, products: Floats) -> tuple[float, float, float]:
    """Return the costs of a step, of a sequence and of a token of a prompt: the least squares that are not negative.
    `moments` [3, 3] and `products` [3] are weighted sums over steps."""
    costs = np.zeros(3)
    used = [0, 1, 2]
    while used:
        spread = np.diag([0.0 if feature == 0 else MIN_SPREAD * moments[0, 0] for feature in used])
        costs[used] = np.linalg.solve(moments[np.ix_(used, used)] + spread, products[used])
        if costs.min() >= 0.0:
            break
        used, costs = [feature for feature in used if costs[feature] > 0.0], np.zeros(3)
    return float(costs[0]), float(costs[1]), float(costs[2])


# -- errors

WAIT_MEMORY = 1.0 - 1.0 / 256
NUM_ERRORS = 400
"""Latest errors that count."""
PRIOR_EXCESS = 3.0
"""How many deviations a wait is assumed to fall short of its prediction, before enough are known."""


class Calibration:
    """Learns how far waits fall short of their predictions, and how many clients leave while they wait."""

    def __init__(self) -> None:
        self._errors: deque[float] = deque(maxlen=NUM_ERRORS)
        self._num_left = self._waited_s = 0.0

    def observe_wait(self, waited_s: float, *, has_left: bool) -> None:
        self._waited_s = self._waited_s * WAIT_MEMORY + waited_s
        self._num_left = self._num_left * WAIT_MEMORY + has_left

    def sample_leaving(self, rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
        """Return seconds after which clients leave."""
        if not self._num_left or not self._waited_s:
            return np.full(shape, math.inf)
        return rng.exponential(self._waited_s / self._num_left, shape)

    def observe_error(self, predicted_s: float, deviation_s: float, actual_s: float) -> None:
        if predicted_s > 0.0:
            self._errors.append((actual_s - predicted_s) / _spread(predicted_s, deviation_s))

    def earliest(self, predicted_s: float, deviation_s: float) -> float:
        """Return a wait that is hardly ever undercut."""
        worst = PRIOR_EXCESS
        if len(self._errors) >= 50:
            worst = max(1.3 * -float(np.quantile(self._errors, 0.01)), 1.0)
        return max(predicted_s - worst * _spread(predicted_s, deviation_s), 0.0)


def _spread(predicted_s: float, deviation_s: float) -> float:
    return math.hypot(deviation_s, 0.08 * predicted_s, 0.01)


PACE_RATE = 1.0 / 16
"""Weight of the latest step in running means."""
MAX_SURPRISE = 2.0
"""A step counts as at most so many times what was expected: one that the machine interrupted says little of others."""


class PrefillPace:
    """Learns what decode takes alone and what each token of a prompt adds, and how many tokens keep the pace."""

    def __init__(self, limits: ChunkLimits) -> None:
        self._limits = limits
        self._decode_s = 0.0
        self._tokens = self._seconds = 0.0

    def observe(self, num_prefill: int, seconds: float) -> None:
        """Learn from a step that computed so many tokens of prompts, 0 if it only decoded."""
        if not num_prefill:
            if self._decode_s:
                seconds = min(seconds, MAX_SURPRISE * self._decode_s)
            self._decode_s += (PACE_RATE if self._decode_s else 1.0) * (seconds - self._decode_s)
            return
        seconds = max(seconds - self._decode_s, 0.0)
        if self._seconds:
            seconds = min(seconds, MAX_SURPRISE * num_prefill * self._seconds / self._tokens)
        rate = PACE_RATE if self._tokens else 1.0
        self._tokens += rate * (num_prefill - self._tokens)
        self._seconds += rate * (seconds - self._seconds)

    @property
    def prompt_token_s(self) -> float:
        """Seconds that a token of a prompt adds to a step; 0 before the first."""
        return self._seconds / self._tokens if self._tokens else 0.0

    def max_prefill_tokens(self) -> tuple[int, int]:
        """Return the most tokens of prompts for a step in which others decode, and for one in which none does."""
        costs = StepTimes(self._decode_s, self.prompt_token_s)
        return (
            choose_chunk(costs, self._limits, is_decoding=True),
            choose_chunk(costs, self._limits, is_decoding=False),
        )
