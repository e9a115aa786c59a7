"""Edits of the logits before a token is chosen, each kind at once for all rows that need it. The order is that of
transformers: bias, penalties, bans; the grammar comes last."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from engine.runners.base import FloatArray
from engine.sampling.state import SamplingState
from sluice.errors import SluiceError

_Rows = NDArray[np.intp]
_States = Sequence[SamplingState]
_Ids = NDArray[np.int32]
_LEAST_PENALTY, _MOST_PENALTY = 1e-30, 1e30


def edit_logits(logits: FloatArray, rows: _Rows, states: _States) -> dict[int, SluiceError]:
    """Apply the edits of `states` to their `rows` of `logits`, in place. No row may be repeated. Returns the errors of
    failed constraints, by index of the state; all tokens of their rows are banned."""
    _bias(logits, rows, states)
    _repetition(logits, rows, states)
    _presence_and_frequency(logits, rows, states)
    _restrict(logits, rows, states)
    _ban(logits, rows, states)
    return _constrain(logits, rows, states)


def _constrain(logits: FloatArray, rows: _Rows, states: _States) -> dict[int, SluiceError]:
    failed: dict[int, SluiceError] = {}
    for index, (row, state) in enumerate(zip(rows, states, strict=True)):
        if state.constraint is None:
            continue
        try:
            state.constraint.apply(logits[row])
        except SluiceError as error:
            failed[index] = error
            logits[row] = -np.inf
    return failed


def _bias(logits: FloatArray, rows: _Rows, states: _States) -> None:
    places = _places(rows, [state.bias_ids for state in states])
    if places is not None:
        logits[places] += np.concatenate([state.bias_values for state in states])


def _repetition(logits: FloatArray, rows: _Rows, states: _States) -> None:
    """Divide positive and multiply negative logits of the tokens seen (CTRL, arXiv 1909.05858; as in transformers)."""
    rows, states = _filter(rows, states, lambda state: state.seen is not None)
    seen = [state.seen.ids for state in states if state.seen is not None]
    places = _places(rows, seen)
    if places is not None:
        penalties = _spread([_in_float32(state.params.repetition_penalty) for state in states], seen)
        scores = logits[places]
        logits[places] = np.where(scores > 0, scores / penalties, scores * penalties)


def _in_float32(penalty: float) -> float:
    """Return a penalty by which no logit becomes infinite: beyond these bounds all do the same."""
    return min(max(penalty, _LEAST_PENALTY), _MOST_PENALTY)


def _presence_and_frequency(logits: FloatArray, rows: _Rows, states: _States) -> None:
    rows, states = _filter(rows, states, lambda state: state.output is not None)
    outputs = [state.output for state in states if state.output is not None]
    ids = [output.ids for output in outputs]
    places = _places(rows, ids)
    if places is not None:
        counts = np.concatenate([output.counts for output in outputs])
        frequency = _spread([state.params.frequency_penalty for state in states], ids)
        logits[places] -= frequency * counts + _spread([state.params.presence_penalty for state in states], ids)


def _restrict(logits: FloatArray, rows: _Rows, states: _States) -> None:
    """Ban all tokens but the allowed ones, for the states that have some."""
    for row, state in zip(rows, states, strict=True):
        if len(state.allowed):
            kept = logits[row, state.allowed]
            logits[row] = -np.inf
            logits[row, state.allowed] = kept


def _ban(logits: FloatArray, rows: _Rows, states: _States) -> None:
    places = _places(rows, [state.banned for state in states])
    if places is not None:
        logits[places] = -np.inf


def _filter(rows: _Rows, states: _States, predicate: Callable[[SamplingState], bool]) -> tuple[_Rows, _States]:
    chosen = [index for index, state in enumerate(states) if predicate(state)]
    return rows[chosen], [states[index] for index in chosen]


def _places(rows: _Rows, ids: list[_Ids]) -> tuple[_Rows, _Ids] | None:
    """Return the places of each row's `ids` in the logits, as one index array for each axis; None without any ids."""
    lengths = [len(row_ids) for row_ids in ids]
    return (np.repeat(rows, lengths), np.concatenate(ids)) if sum(lengths) else None


def _spread(values: list[float], ids: list[_Ids]) -> FloatArray:
    """Repeat each row's value once for each of its ids."""
    return np.repeat(np.array(values, np.float32), [len(row_ids) for row_ids in ids])
