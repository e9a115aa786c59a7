"""Which tokens a sequence has seen, and how often."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


class TokenCounts:
    """Distinct token ids and how often each came, in arrays that grow: a penalty then touches only the
    tokens seen, however large the vocabulary is."""

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        self._ids = np.zeros(64, np.int32)
        self._counts = np.zeros(64, np.float32)
        self._positions: dict[int, int] = {}
        for token_id in token_ids:
            self.add(token_id)

    @property
    def ids(self) -> NDArray[np.int32]:
        return self._ids[: len(self._positions)]

    @property
    def counts(self) -> NDArray[np.float32]:
        return self._counts[: len(self._positions)]

    def add(self, token_id: int) -> None:
        position = self._positions.get(token_id)
        if position is None:
            position = len(self._positions)
            if position == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._positions[token_id] = position
            self._ids[position] = token_id
        self._counts[position] += 1
