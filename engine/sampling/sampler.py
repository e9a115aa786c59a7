"""Samples one token for each sequence of a step. The random numbers, the parameters of draws and the edits of the
logits are collected from the states of the sequences, each kind at once for all rows that need it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from sluice.engine.arrays import Doubles, FloatArray, Ids, IntArray, Rows
from sluice.engine.runners.base import Draws, Edits, Logits, Places, TokenMask
from sluice.engine.sampling.state import SamplingState
from sluice.engine.types import TokenLogprob
from sluice.errors import ErrorCode, SluiceError, invalid

_STRIDE = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_UNUSED_BITS = np.uint64(11)


def uniform(seeds: NDArray[np.uint64], indices: NDArray[np.uint64]) -> Doubles:
    """Return numbers in [0, 1), one for each pair of `seeds` [n] and `indices` [n]. The generator is SplitMix64
    (Steele, Lea, Flood 2014), which can jump to any index at no cost. A seed is mixed before it becomes a starting
    point, so that consecutive seeds do not give the same numbers shifted."""
    numbers = _mix(_mix(seeds) + (indices + np.uint64(1)) * _STRIDE)
    return (numbers >> _UNUSED_BITS).astype(np.float64) * 2.0**-53


def _mix(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    numbers = (numbers ^ (numbers >> _SHIFTS[0])) * _MULTIPLIERS[0]
    numbers = (numbers ^ (numbers >> _SHIFTS[1])) * _MULTIPLIERS[1]
    return numbers ^ (numbers >> _SHIFTS[2])


def collect_draws(states: Sequence[SamplingState], rows: Rows, num_ahead: Sequence[int] | int = 0) -> Draws:
    """Collect the parameters of `states`, none of which is greedy, for their `rows` of the logits. The states have not
    observed their last `num_ahead` tokens yet."""
    temperature, top_k, top_p, min_p, typical_p = np.array([state.filters for state in states]).T
    seeds = np.array([state.seed for state in states], np.uint64)
    indices = np.array([state.num_output for state in states], np.uint64) + np.array(num_ahead, np.uint64)
    sharpness = (1 / temperature).astype(np.float32)
    numbers = uniform(seeds, indices)
    wanted = np.array([state.wanted for state in states], np.intp)
    return Draws(rows, sharpness, top_k.astype(np.intp), top_p, min_p, typical_p, numbers, wanted)


_States = Sequence[SamplingState]
_Array = TypeVar("_Array", IntArray, FloatArray)
_LEAST_PENALTY, _MOST_PENALTY = 1e-30, 1e30
_NO_VALUES = np.empty(0, np.float32)


def collect_edits(rows: Rows, states: _States) -> tuple[Edits, dict[int, SluiceError]]:
    """Collect the edits of `states` for their `rows` of logits. Returns also the errors of the constraints that failed,
    by index of the state."""
    masks, failed = _masks(rows, states)
    edits = Edits(
        added=_bias(rows, states),
        repeated=_repetition(rows, states),
        subtracted=_presence_and_frequency(rows, states),
        allowed=_places(rows, [state.allowed for state in states]),
        banned=_places(rows, [state.banned for state in states]),
        masks=masks,
    )
    return edits, failed


def _masks(rows: Rows, states: _States) -> tuple[list[tuple[int, TokenMask]], dict[int, SluiceError]]:
    masks: list[tuple[int, TokenMask]] = []
    failed: dict[int, SluiceError] = {}
    for index, (row, state) in enumerate(zip(rows.tolist(), states, strict=True)):
        if state.constraint is None:
            continue
        try:
            masks.append((row, state.constraint.mask()))
        except SluiceError as error:
            failed[index] = error
    return masks, failed


def _bias(rows: Rows, states: _States) -> Places | None:
    return _places(rows, [state.bias_ids for state in states], lambda: _join([state.bias_values for state in states]))


def _repetition(rows: Rows, states: _States) -> Places | None:
    rows, states = _filter(rows, states, lambda state: state.seen is not None)
    seen = [state.seen.ids for state in states if state.seen is not None]
    return _places(
        rows, seen, lambda: _spread([_in_float32(state.params.repetition_penalty) for state in states], seen)
    )


def _in_float32(penalty: float) -> float:
    """Return a penalty by which no logit becomes infinite: beyond these bounds all do the same."""
    return min(max(penalty, _LEAST_PENALTY), _MOST_PENALTY)


def _presence_and_frequency(rows: Rows, states: _States) -> Places | None:
    rows, states = _filter(rows, states, lambda state: state.output is not None)
    outputs = [state.output for state in states if state.output is not None]
    ids = [output.ids for output in outputs]

    def amounts() -> FloatArray:
        frequency = _spread([state.params.frequency_penalty for state in states], ids)
        presence = _spread([state.params.presence_penalty for state in states], ids)
        return frequency * _join([output.counts for output in outputs]) + presence

    return _places(rows, ids, amounts)


def _filter(rows: Rows, states: _States, predicate: Callable[[SamplingState], bool]) -> tuple[Rows, _States]:
    chosen = [index for index, state in enumerate(states) if predicate(state)]
    return rows[chosen], [states[index] for index in chosen]


def _places(rows: Rows, ids: list[IntArray], values: Callable[[], FloatArray] | None = None) -> Places | None:
    """Return the places of each row's `ids` with their `values`, those of all rows one after the other; None without
    any ids."""
    lengths = [len(row_ids) for row_ids in ids]
    if not sum(lengths):
        return None
    return Places(np.repeat(rows, lengths), _join(ids), _NO_VALUES if values is None else values())


def _join(arrays: Sequence[_Array]) -> _Array:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _spread(values: list[float], ids: list[IntArray]) -> FloatArray:
    """Repeat each row's value once for each of its ids."""
    return np.repeat(np.array(values, np.float32), [len(row_ids) for row_ids in ids])


NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class Samples:
    """The sampled tokens; entry i belongs to state i."""

    token_ids: Ids
    """[n]; NO_TOKEN for the states that failed."""
    logprobs: list[TokenLogprob | None] | None
    """None for a state that requests none or failed; None instead of the list if no state requests any."""
    failed: dict[int, SluiceError] = field(default_factory=dict)
    """Errors of the states that got no token, by index. A failure does not affect other states."""
    is_plain: bool = False
    """Whether every state got its most likely token, and none has more to report or to observe."""


def sample(logits: Logits, states: _States, rows: Rows | None = None) -> Samples:
    """Choose a token for each state from its row of `logits`, which may be edited. `rows[i]` is the row of `states[i]`,
    by default i. States may share a row."""
    rows = np.arange(len(states)) if rows is None else rows
    if all(state.is_plain for state in states):
        token_ids, peaks = logits.argmax(rows)
        failed = _fail_rows(states, token_ids, peaks)
        return Samples(token_ids, None, failed, is_plain=not failed)
    reported = np.array([i for i, state in enumerate(states) if state.params.logprobs is not None], np.intp)
    edited = [i for i, state in enumerate(states) if state.edits_logits]
    model_logits, model_rows = logits, rows[reported]
    unmet: dict[int, SluiceError] = {}
    if edited:
        if len(reported):
            model_logits, model_rows = logits.take(model_rows), np.arange(len(reported))
        logits, rows = _unshare_rows(logits, rows)
        edits, failed = collect_edits(rows[edited], [states[i] for i in edited])
        unmet = {edited[index]: error for index, error in failed.items()}
        logits.edit(edits)
    token_ids, failed = _choose(logits, rows, states)
    failed |= unmet
    token_ids[list(unmet)] = NO_TOKEN
    if not len(reported):
        return Samples(token_ids, None, failed)
    return Samples(token_ids, _collect_logprobs(model_logits, model_rows, reported, states, token_ids), failed)


def _unshare_rows(logits: Logits, rows: Rows) -> tuple[Logits, Rows]:
    """Copy the logits if `rows` has duplicates, so that one state's edits do not affect another's."""
    if len(set(rows.tolist())) == len(rows):
        return logits, rows
    return logits.take(rows), np.arange(len(rows))


def _choose(logits: Logits, rows: Rows, states: _States) -> tuple[Ids, dict[int, SluiceError]]:
    """Return token ids [n], NO_TOKEN where a state has none, and the errors of these."""
    is_random = np.array([state.is_random for state in states])
    if is_random.all():
        token_ids, peaks = logits.draw(collect_draws(states, rows))
    elif not is_random.any():
        token_ids, peaks = logits.argmax(rows)
    else:
        token_ids, peaks = np.empty(len(rows), np.intp), np.empty(len(rows), np.float32)
        drawn = [state for state in states if state.is_random]
        order = np.concatenate((np.flatnonzero(~is_random), np.flatnonzero(is_random)))
        draws = collect_draws(drawn, rows[is_random])
        token_ids[order], peaks[order] = logits.argmax_and_draw(rows[~is_random], draws)
    return token_ids, _fail_rows(states, token_ids, peaks)


def _fail_rows(states: _States, token_ids: Ids, peaks: FloatArray) -> dict[int, SluiceError]:
    """Return the errors of the states whose largest logit [n] is not finite, and set their tokens to NO_TOKEN."""
    is_finite = np.isfinite(peaks)
    if is_finite.all():
        return {}
    token_ids[~is_finite] = NO_TOKEN
    return {i: _failure(states[i], float(peaks[i])) for i in np.flatnonzero(~is_finite).tolist()}


def _failure(state: SamplingState, peak: float) -> SluiceError:
    if peak == -np.inf and state.constraint is not None:
        others = "bad_words, allowed_token_ids, min_tokens or logit_bias"
        return invalid("grammar", f"the grammar allows only such tokens here as {others} forbid")
    if peak == -np.inf and state.edits_logits:
        banning = "bad_words, allowed_token_ids, logit_bias and min_tokens together"
        return SluiceError(ErrorCode.INVALID, f"no token may come next: {banning} forbid all of them; loosen one")
    return not_finite()


def not_finite() -> SluiceError:
    """Return the error of a row without a finite logit."""
    return SluiceError(ErrorCode.INTERNAL, "the model returned logits that are not finite numbers")


def _collect_logprobs(
    model_logits: Logits, rows: Rows, reported: Ids, states: _States, token_ids: Ids
) -> list[TokenLogprob | None]:
    """Return the log probabilities of the chosen tokens. `rows` of `model_logits` belong to the states `reported`."""
    has_token = token_ids[reported] != NO_TOKEN
    indices = reported[has_token]
    num_top = [states[i].params.logprobs or 0 for i in indices]
    entries: list[TokenLogprob | None] = [None] * len(states)
    reports = model_logits.logprobs(rows[has_token], token_ids[indices], num_top)
    for i, entry in zip(indices.tolist(), reports, strict=True):
        entries[i] = entry
    return entries
