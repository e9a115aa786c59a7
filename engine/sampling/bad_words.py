"""Token sequences that must not come."""

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray


class BadWords:
    """Sequences of two tokens or more: the last token of one is banned where all before it have just come.

    Prompt and output count alike, so that a sequence begun by the prompt is not completed either (as transformers'
    NoBadWordsLogitsProcessor has it).
    """

    def __init__(self, words: Iterable[tuple[int, ...]], prompt_token_ids: Sequence[int]) -> None:
        self._begun_by: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        reach = 1
        for word in words:
            beginning, last = word[:-1], word[-1]
            # Looked up by the token that has just come, so that a step costs one look-up however many there are.
            self._begun_by.setdefault(beginning[-1], []).append((beginning, last))
            reach = max(reach, len(beginning))
        self._recent = deque(prompt_token_ids[-reach:], maxlen=reach)
        self.banned = self._completing()
        """Tokens that would complete a sequence now."""

    def observe(self, token_id: int) -> None:
        """Take note of the token that has come."""
        self._recent.append(token_id)
        self.banned = self._completing()

    def _completing(self) -> NDArray[np.int32]:
        begun = self._begun_by.get(self._recent[-1], []) if self._recent else []
        recent = tuple(self._recent) if begun else ()
        lasts = [last for beginning, last in begun if recent[-len(beginning) :] == beginning]
        return np.array(lasts, np.int32)
