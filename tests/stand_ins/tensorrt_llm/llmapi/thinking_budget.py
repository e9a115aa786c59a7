# ruff: noqa: TID252 - importers know the package as tensorrt_llm, the type checker by its folder
"""The processor of logits that closes the reasoning."""

from typing import Any

import numpy as np

from ..sampling_params import LogitsProcessor


class ThinkingBudgetLogitsProcessor(LogitsProcessor):
    """Looks at the whole context each time: the last opening mark counts, unless a closing one follows."""

    def __init__(
        self, thinking_token_budget: int, reasoning_start_token_ids: list[int], reasoning_end_token_ids: list[int]
    ) -> None:
        if not (thinking_token_budget >= 0 and reasoning_start_token_ids and reasoning_end_token_ids):
            raise ValueError("a budget of 0 or more and both sequences of token ids are needed")
        self._budget = thinking_token_budget
        self._start, self._end = list(reasoning_start_token_ids), list(reasoning_end_token_ids)

    def __call__(
        self, req_id: int, logits: Any, token_ids: list[list[int]], stream_ptr: int | None, client_id: int | None
    ) -> None:
        for row, ids in zip(logits, token_ids, strict=True):
            forced = self._forced(ids)
            if forced is not None:
                row[:] = -np.inf
                row[forced] = 0

    def _forced(self, ids: list[int]) -> int | None:
        start = _last(ids, self._start)
        if start < 0 or _last(ids, self._end) > start:
            return None
        count = len(ids) - start - len(self._start)
        begun = max(size for size in range(len(self._end)) if ids[len(ids) - size :] == self._end[:size])
        return self._end[begun] if count - begun >= self._budget else None


def _last(ids: list[int], mark: list[int]) -> int:
    places = range(len(ids) - len(mark), -1, -1)
    return next((place for place in places if ids[place : place + len(mark)] == mark), -1)
