"""Whether one more request may wait."""

import math
from collections.abc import Collection, Iterable

from engine.config import EngineConfig
from engine.errors import ErrorCode, SluiceError
from engine.sequence import Sequence

MAX_RETRY_AFTER_S = 60.0


def check_queue(
    waiting: Collection[Sequence], running: Collection[Sequence], config: EngineConfig, seconds_per_token: float
) -> None:
    """Raise OVERLOADED where the queue is full, with the time until it has moved on.

    `max_queued_requests` counts those that wait in vain: as many as there are free places among the
    `max_num_seqs` may stand in the queue besides, since the next step takes them.
    """
    free_places = config.max_num_seqs - len(running)
    if len(waiting) - free_places < config.max_queued_requests:
        return
    retry_after_s = _seconds_to_next_place(running, seconds_per_token)
    raise SluiceError(
        ErrorCode.OVERLOADED,
        f"the queue is full: {len(waiting)} requests wait and the limit is {config.max_queued_requests}; "
        f"try again in {math.ceil(retry_after_s)} s",
        retry_after_s=retry_after_s,
    )


def _seconds_to_next_place(running: Iterable[Sequence], seconds_per_token: float) -> float:
    """About when the first running sequence is done: all run at the same pace, and each token of the
    crowd has cost `seconds_per_token` so far."""
    left = [sequence.max_tokens_left for sequence in running]
    if not left:
        return 1.0
    return min(max(min(left) * len(left) * seconds_per_token, 1.0), MAX_RETRY_AFTER_S)
