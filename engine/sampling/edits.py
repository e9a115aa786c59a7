"""Collects the edits of the logits before a token is chosen, each kind at once for all rows that need it."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from sluice.engine.arrays import FloatArray, IntArray, Rows
from sluice.engine.runners.base import Edits, Places, TokenMask
from sluice.engine.sampling.state import SamplingState
from sluice.errors import SluiceError

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
