"""Draws from all tokens, row by row on all cores: exact for any distribution, however flat. One long operation is
better here than several short ones: after each, a thread waits for Python's lock if another has it just then."""

import numpy as np

from sluice.engine.arrays import Doubles, FloatArray, Ids, Mask
from sluice.engine.runners.base import Draws
from sluice.engine.sampling.cores import Cores, Work
from sluice.engine.sampling.scan import Scan
from sluice.engine.sampling.softmax import CHUNK, logarithm, sum_rows, weigh

_STEP = 32
"""Every 32nd token is in the sample that estimates where a filter ends."""
_MARGIN = 0.1
"""Assumed error of that estimate, as a part of the share that is cut off."""


class _Room:
    """Memory for a row, allocated once a thread: fresh memory is slower than all that is computed in it."""

    def __init__(self, vocab_size: int) -> None:
        self.chunks = np.zeros((-(-vocab_size // CHUNK), CHUNK), np.float32)
        self.weights: FloatArray = self.chunks.reshape(-1)[:vocab_size]
        """The weights of the row, [vocab_size]. In `chunks`, zeros follow."""
        self.kept, self.keys = np.empty((2, vocab_size), np.float32)
        self.masks = np.empty((2, vocab_size), np.bool_)


def draw_from_all_tokens(logits: FloatArray, draws: Draws, found: Scan, cores: Cores) -> Ids:
    """Return token ids [n]."""
    num_rows, vocab_size = len(draws.rows), logits.shape[1]
    token_ids, rows = np.empty(num_rows, np.intp), draws.rows.tolist()

    def begin() -> Work:
        room = _Room(vocab_size)

        def work(which: slice) -> None:
            index = which.start
            weigh(logits[rows[index]][None], found.peaks[which], draws.sharpness[which], out=room.weights[None])
            _filter(room, index, draws, float(found.totals[index]))
            token_ids[index] = _invert(room.chunks, float(draws.uniform[index]))

        return work

    cores.share((slice(row, row + 1) for row in range(num_rows)), num_rows * vocab_size, begin)
    return token_ids


def _invert(chunks: FloatArray, uniform: float) -> int:
    """Do what `invert_chunks` does, for the `chunks` [num_chunks, CHUNK] of one row."""
    cumulative = np.cumsum(chunks.sum(axis=1), dtype=np.float64)
    target = uniform * cumulative[-1]
    chunk = _num_up_to(cumulative, target)
    before = cumulative[chunk - 1] if chunk else 0.0
    return chunk * CHUNK + _num_up_to(np.cumsum(chunks[chunk], dtype=np.float64), target - before)


def _num_up_to(cumulative: Doubles, target: float) -> int:
    return int(cumulative.searchsorted(min(target, np.nextafter(cumulative[-1], -np.inf)), "right"))


def _filter(room: _Room, index: int, draws: Draws, total: float) -> None:
    """Set all of the weights to 0 but those that the filters of entry `index` keep. `total` is their sum, where top_p
    is the first filter."""
    weights = room.weights
    top_k, top_p, typical_p = int(draws.top_k[index]), float(draws.top_p[index]), float(draws.typical_p[index])
    if top_k < len(weights):
        _keep(weights, weights >= np.partition(weights, -top_k)[-top_k])
        total = _sum(weights)
    if top_p < 1:
        keep_share(room, weights, top_p * total, top_p)
    if draws.min_p[index] > 0:
        _keep(weights, weights >= np.float32(draws.min_p[index]))
    if typical_p < 1:
        mass = _sum(weights)
        keep_share(room, _nearness(room, mass), typical_p * mass, typical_p)


def _nearness(room: _Room, mass: float) -> FloatArray:
    """Return how near the logarithm of each weight is to their mean, as a number that is not positive."""
    logs = logarithm(room.weights, out=room.keys)
    mean = np.float32(_sum(np.multiply(room.weights, logs, out=room.kept)) / mass)
    nearness = np.abs(np.subtract(logs, mean, out=logs), out=logs)
    return np.negative(nearness, out=nearness)


def _keep(weights: FloatArray, mask: Mask) -> None:
    # This takes a tenth of the time of setting by a mask without a pattern.
    np.multiply(weights, mask, out=weights)


def _sum(weights: FloatArray) -> float:
    return float(sum_rows(weights[None])[0])


# -- where a filter ends


def keep_share(room: _Room, keys: FloatArray, target: float, share: float) -> None:
    """Set all of the weights to 0 but those that, in descending order of `keys` [vocab_size], first reach the sum
    `target`, and those that have the same key as the last of these. `share` is about what `target` is of the sum of
    all.

    A sample tells between which two keys the last one is likely to be. The result is right wherever it is.
    """
    weights = room.weights
    lower, upper = _likely_range(*_pick(keys, weights, slice(None, None, _STEP)), share)
    is_after_lower = np.greater(keys, lower, out=room.masks[0])
    is_middle = np.less_equal(keys, upper, out=room.masks[1])
    middle = np.flatnonzero(np.logical_and(is_middle, is_after_lower, out=is_middle))
    middle_keys, middle_weights = _pick(keys, weights, middle)
    kept = np.multiply(weights, is_after_lower, out=room.kept)
    sum_after_lower = _sum(kept)
    sum_after_upper = sum_after_lower - float(middle_weights.sum(dtype=np.float64))
    if sum_after_upper < target <= sum_after_lower:
        least = _last_key(middle_keys, middle_weights, target - sum_after_upper)
        kept[middle[middle_keys < least]] = 0
        weights[:] = kept
    elif target <= sum_after_upper and (keys > upper).any():
        _keep(weights, keys >= _last_key(*_pick(keys, weights, keys > upper), target))
    else:
        rest = np.flatnonzero(~is_after_lower)
        _keep(weights, keys >= _last_key(*_pick(keys, weights, rest), target - sum_after_lower))


def _pick(keys: FloatArray, weights: FloatArray, which: Ids | Mask | slice) -> tuple[FloatArray, FloatArray]:
    """Return some of both. What was the same array stays the same."""
    picked = keys[which]
    return picked, picked if keys is weights else weights[which]


def _likely_range(keys: FloatArray, weights: FloatArray, share: float) -> tuple[np.float32, np.float32]:
    """Return the keys between which, by this sample of all, the sum of the weights is likely to reach `share`."""
    keys, cumulative = _descending(keys, weights)
    shares = np.array([share + _MARGIN * (1 - share), share - _MARGIN * (1 - share)])
    lower, upper = keys[np.minimum(cumulative.searchsorted(shares * cumulative[-1]), len(keys) - 1)]
    return lower, upper


def _last_key(keys: FloatArray, weights: FloatArray, target: float) -> np.float32:
    """Return the key with which the sum of `weights`, in descending order of `keys`, reaches `target`, or the least if
    rounding put that behind the last."""
    keys, cumulative = _descending(keys, weights)
    return np.float32(keys[min(int(cumulative.searchsorted(target)), len(keys) - 1)])


def _descending(keys: FloatArray, weights: FloatArray) -> tuple[FloatArray, Doubles]:
    """Return the keys in descending order, and the cumulative sums of their weights."""
    if keys is weights:  # a sort takes a fifth of the time of an argsort
        keys = np.sort(keys)[::-1]
        return keys, np.cumsum(keys, dtype=np.float64)
    order = np.argsort(keys)[::-1]
    return keys[order], np.cumsum(weights[order], dtype=np.float64)
