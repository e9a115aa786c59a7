"""One token for each sequence of a step."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.runners.base import FloatArray
from engine.sampling.draw import draw, draws_of
from engine.sampling.edits import edit_logits
from engine.sampling.logprobs import token_logprobs
from engine.sampling.softmax import Rows, likeliest
from engine.sampling.state import SamplingState
from engine.types import TokenLogprob
from sluice.errors import ErrorCode, SluiceError

NO_TOKEN = -1

_States = Sequence[SamplingState]
_Ids = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Samples:
    """What was chosen; entry i is that of state i."""

    token_ids: NDArray[np.intp]
    """NO_TOKEN for those that failed."""
    logprobs: list[TokenLogprob | None] | None
    """None for a state that asks for none or failed; None altogether where nobody asks."""
    failed: dict[int, SluiceError] = field(default_factory=dict)
    """The states that got no token, and why. It touches no others."""


def sample(logits: FloatArray, states: _States, rows: Rows | None = None) -> Samples:
    """Choose a token for each state from its row of `logits` [any, vocab_size], which may be overwritten.

    `rows[i]` is the row of `states[i]`; without `rows` that is i. States may share a row.
    """
    rows = np.arange(len(states)) if rows is None else rows
    if all(state.is_plain for state in states):
        token_ids, _, failed = _soundly_likeliest(logits, rows, states)
        return Samples(token_ids, None, failed)
    reported = np.array([i for i, state in enumerate(states) if state.params.logprobs is not None], np.intp)
    edited = [i for i, state in enumerate(states) if state.edits_logits]
    model, model_rows = logits, rows[reported]
    unmet: dict[int, SluiceError] = {}
    if edited:
        if len(reported):
            model, model_rows = logits[model_rows], np.arange(len(reported))
        logits, rows = _unshared(logits, rows)
        unmet = edit_logits(logits, rows[edited], [states[i] for i in edited])
    token_ids, failed = _choose(logits, rows, states)
    failed |= {edited[index]: error for index, error in unmet.items()}
    if not len(reported):
        return Samples(token_ids, None, failed)
    return Samples(token_ids, _report(model, model_rows, reported, states, token_ids), failed)


def _unshared(logits: FloatArray, rows: Rows) -> tuple[FloatArray, Rows]:
    """The same logits with a row for each entry of `rows`, so that one state's edits are not another's."""
    if len(set(rows.tolist())) == len(rows):
        return logits, rows
    return logits[rows], np.arange(len(rows))


def _choose(logits: FloatArray, rows: Rows, states: _States) -> tuple[_Ids, dict[int, SluiceError]]:
    """Token ids [n], and why some have none."""
    token_ids, peaks, failed = _soundly_likeliest(logits, rows, states)
    drawn = [i for i, state in enumerate(states) if state.is_random and i not in failed]
    if drawn:
        token_ids[drawn] = draw(logits, draws_of([states[i] for i in drawn], rows[drawn], peaks[drawn]))
    return token_ids, failed


def _soundly_likeliest(
    logits: FloatArray, rows: Rows, states: _States
) -> tuple[_Ids, FloatArray, dict[int, SluiceError]]:
    """The likeliest ids [n] and their logits [n]; NO_TOKEN where these are no finite numbers."""
    token_ids = likeliest(logits, rows)
    peaks: FloatArray = logits[rows, token_ids]
    is_sound = np.isfinite(peaks)
    if is_sound.all():
        return token_ids, peaks, {}
    failed = {i: _failure(states[i], float(peaks[i])) for i in np.flatnonzero(~is_sound).tolist()}
    token_ids[~is_sound] = NO_TOKEN
    return token_ids, peaks, failed


def _failure(state: SamplingState, peak: float) -> SluiceError:
    if peak == -np.inf and state.edits_logits:
        banning = "bad_words, logit_bias, min_tokens and the grammar together"
        return SluiceError(ErrorCode.INVALID, f"no token may come next: {banning} forbid all of them; loosen one")
    return SluiceError(ErrorCode.INTERNAL, "the model returned logits that are not finite numbers")


def _report(
    model: FloatArray, rows: Rows, reported: _Ids, states: _States, token_ids: _Ids
) -> list[TokenLogprob | None]:
    """Log probabilities of the tokens chosen; `rows` of `model` are the unedited logits of the states `reported`."""
    has_token = token_ids[reported] != NO_TOKEN
    wanted = reported[has_token]
    num_top = [states[i].params.logprobs or 0 for i in wanted]
    entries: list[TokenLogprob | None] = [None] * len(states)
    for i, entry in zip(
        wanted.tolist(), token_logprobs(model, rows[has_token], token_ids[wanted], num_top), strict=True
    ):
        entries[i] = entry
    return entries
