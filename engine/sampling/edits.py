"""Changes to the logits before a token is chosen, each kind at once for all rows that want it.

Order as in transformers: bias, penalties, bans; a grammar has the last word.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from engine.runners.base import FloatArray
from engine.sampling.state import SamplingState
from sluice.errors import SluiceError

_Rows = NDArray[np.intp]
_States = Sequence[SamplingState]
_Ids = NDArray[np.int32]


def edit_logits(logits: FloatArray, rows: _Rows, states: _States) -> dict[int, SluiceError]:
    """Apply what `states` ask for to their `rows` of `logits`, in place. No row may stand there twice.

    Returns the states whose constraint failed; nothing is left to choose in their rows.
    """
    _bias(logits, rows, states)
    _repetition(logits, rows, states)
    _presence_and_frequency(logits, rows, states)
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
    """Divide positive and multiply negative logits of tokens seen (CTRL, arXiv 1909.05858; as transformers does)."""
    rows, states = _those(rows, states, lambda state: state.seen is not None)
    seen = [state.seen.ids for state in states if state.seen is not None]
    places = _places(rows, seen)
    if places is not None:
        penalties = _spread([state.params.repetition_penalty for state in states], seen)
        scores = logits[places]
        logits[places] = np.where(scores > 0, scores / penalties, scores * penalties)


def _presence_and_frequency(logits: FloatArray, rows: _Rows, states: _States) -> None:
    rows, states = _those(rows, states, lambda state: state.output is not None)
    outputs = [state.output for state in states if state.output is not None]
    ids = [output.ids for output in outputs]
    places = _places(rows, ids)
    if places is not None:
        counts = np.concatenate([output.counts for output in outputs])
        frequency = _spread([state.params.frequency_penalty for state in states], ids)
        logits[places] -= frequency * counts + _spread([state.params.presence_penalty for state in states], ids)


def _ban(logits: FloatArray, rows: _Rows, states: _States) -> None:
    places = _places(rows, [state.banned for state in states])
    if places is not None:
        logits[places] = -np.inf


def _those(rows: _Rows, states: _States, want: Callable[[SamplingState], bool]) -> tuple[_Rows, _States]:
    chosen = [index for index, state in enumerate(states) if want(state)]
    return rows[chosen], [states[index] for index in chosen]


def _places(rows: _Rows, ids: list[_Ids]) -> tuple[_Rows, _Ids] | None:
    """Where in the logits `ids` of each row are, one index array an axis; None where there are none at all."""
    lengths = [len(of_row) for of_row in ids]
    return (np.repeat(rows, lengths), np.concatenate(ids)) if sum(lengths) else None


def _spread(values: list[float], ids: list[_Ids]) -> FloatArray:
    """Each row's value once for each of its ids."""
    return np.repeat(np.array(values, np.float32), [len(of_row) for of_row in ids])
