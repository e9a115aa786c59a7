"""Question and passage as the tokens of a cross-encoder."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers
from numpy.typing import NDArray

from sluice.errors import ErrorCode, SluiceError

FILENAME = "tokenizer.json"
_MAX_TOKENS = 512
"""What a tokenizer file without a limit is cut to: the positions of BERT and its kin."""


class PairTokenizer:
    """Tokens of (question, passage), with the special tokens and types that the tokenizer's file says."""

    def __init__(self, path: Path) -> None:
        """`path` is a tokenizer.json, or the folder of one. Raises SluiceError UNAVAILABLE where it cannot be read."""
        path = path / FILENAME if path.is_dir() else path
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no narrower type
            message = f"cannot load the reranker's tokenizer {path}: {error}"
            raise SluiceError(ErrorCode.UNAVAILABLE, message, param="reranker_tokenizer") from error
        limit, padding = self._tokenizer.truncation, self._tokenizer.padding
        self._pad_id = padding["pad_id"] if padding else 0
        self._tokenizer.no_padding()
        # Whichever is longer is cut, which is the passage unless somebody asks a whole page.
        self._tokenizer.enable_truncation(limit["max_length"] if limit else _MAX_TOKENS, strategy="longest_first")

    async def encode(self, question: str, passages: Sequence[str]) -> list[tokenizers.Encoding]:
        """One for each passage, on a thread."""
        pairs = [(question, passage) for passage in passages]
        encodings: list[tokenizers.Encoding] = await asyncio.to_thread(self._tokenizer.encode_batch, pairs)
        return encodings

    def padded(self, rows: Sequence[tokenizers.Encoding]) -> dict[str, NDArray[np.int64]]:
        """[rows, longest] each: what the inputs of a cross-encoder are called, and their values."""
        width = max(len(row.ids) for row in rows)
        names = ("input_ids", "attention_mask", "token_type_ids")
        fills = (self._pad_id, 0, 0)
        arrays = [np.full((len(rows), width), fill, np.int64) for fill in fills]
        for index, row in enumerate(rows):
            for array, values in zip(arrays, (row.ids, row.attention_mask, row.type_ids), strict=True):
                array[index, : len(values)] = values
        return dict(zip(names, arrays, strict=True))
