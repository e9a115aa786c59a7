"""Samples one token for each sequence of a step."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from sluice.engine.arrays import FloatArray, Ids, Rows
from sluice.engine.runners.base import Logits
from sluice.engine.sampling.draws import collect_draws
from sluice.engine.sampling.edits import collect_edits
from sluice.engine.sampling.state import SamplingState
from sluice.engine.types import TokenLogprob
from sluice.errors import ErrorCode, SluiceError, invalid

NO_TOKEN = -1

_States = Sequence[SamplingState]


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
