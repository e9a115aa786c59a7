"""Words as TensorRT-LLM's token models take them."""

from collections.abc import Sequence

import numpy as np

from pipelines.text.tokenizer import Tokenizer
from serving.tensors.tensor import Array

_FILL, _NO_END = 0, -1


def spellings(tokenizer: Tokenizer, words: Sequence[str], param: str) -> list[list[int]]:
    """The token ids of each word as it is written and, unless it begins with white space, after a space.

    Empty words, which clients send for none, have no spelling. A word that both ways spell alike is there once.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        ways = () if not word else (word,) if word[0].isspace() else (word, f" {word}")
        found |= {tuple(tokenizer.encode_words(way, param)): None for way in ways}
    return [list(ids) for ids in found if ids]


def word_lists(rows: Sequence[Sequence[Sequence[int]]]) -> Array:
    """[rows, 2, n] int32: the ids of a row's words end to end, and below them where each ends, filled up with -1."""
    width = max(1, max(sum(map(len, words)) for words in rows))
    array = np.empty((len(rows), 2, width), np.int32)
    array[:, 0], array[:, 1] = _FILL, _NO_END
    for (flat, ends), words in zip(array, rows, strict=True):
        lengths = [len(word) for word in words]
        flat[: sum(lengths)] = [token_id for word in words for token_id in word]
        ends[: len(lengths)] = np.cumsum(lengths)
    return array


def no_words(num_rows: int) -> Array:
    """Where a request names none."""
    return np.empty((num_rows, 2, 0), np.int32)
