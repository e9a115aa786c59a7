"""NVIDIA's `preprocessing` stage: prompts and words to token ids."""

from collections.abc import Sequence

import numpy as np
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import invalid
from sluice.pipelines.stages.stage import PREPROCESSING, Outputs, StageModel
from sluice.pipelines.text.text_tensors import read_text_rows
from sluice.pipelines.text.tokenizer import Tokenizer
from sluice.serving.request import InferRequest
from sluice.serving.tensors.tensor import Array

_BIAS_WORDS, _BIAS_WEIGHTS = "EMBEDDING_BIAS_WORDS", "EMBEDDING_BIAS_WEIGHTS"
_PADDING, _NO_END = 0, -1
"""Padding of the token ids and of the ends in a list of words."""
_TEXTS = ("QUERY", "DECODER_QUERY", "BAD_WORDS_DICT", "STOP_WORDS_DICT", _BIAS_WORDS)


class PreprocessingModel(StageModel):
    """Tokenizes prompts, lists of words and biases. Rows are padded at their ends to the longest."""

    def __init__(self, config: ModelConfig, version: int, tokenizer: Tokenizer, *, adds_special: bool) -> None:
        """Take the tokenizer. With `adds_special` it puts its special tokens around a prompt."""
        super().__init__(config, version)
        self._tokenizer = tokenizer
        self._adds_special = adds_special

    def _size(self, request: InferRequest) -> int:
        return sum(request.inputs[name].size_bytes for name in _TEXTS if name in request.inputs)

    def _outputs(self, request: InferRequest) -> Outputs:
        PREPROCESSING.refuse_unsupported(request)
        prompts = self._prompts(request, "QUERY")
        return (
            self._ends(request, len(prompts))
            | self._padded("INPUT_ID", "REQUEST_INPUT_LEN", prompts)
            | self._padded("DECODER_INPUT_ID", "REQUEST_DECODER_INPUT_LEN", self._decoder_prompts(request, prompts))
            | {
                "BAD_WORDS_IDS": self._words(request, "BAD_WORDS_DICT", len(prompts)),
                "STOP_WORDS_IDS": self._words(request, "STOP_WORDS_DICT", len(prompts)),
                "EMBEDDING_BIAS": self._bias(request, len(prompts)),
                "REQUEST_OUTPUT_LEN": request.inputs["REQUEST_OUTPUT_LEN"].array.reshape(len(prompts), -1),
            }
        )

    def _rows(self, request: InferRequest, name: str) -> list[list[str]]:
        return read_text_rows(request, name, is_batched=self._is_batched)

    def _prompts(self, request: InferRequest, name: str) -> list[list[int]]:
        rows = self._rows(request, name)
        return [self._tokenizer.encode(text, name, add_special_tokens=self._adds_special) for [text] in rows]

    def _decoder_prompts(self, request: InferRequest, prompts: Sequence[object]) -> list[list[int]]:
        """Return the decoder's prompts; one token that is ignored for a model without a decoder of its own."""
        if "DECODER_QUERY" in request.inputs:
            return self._prompts(request, "DECODER_QUERY")
        return [[self._pad_id]] * len(prompts)

    def _padded(self, name: str, length_name: str, rows: list[list[int]]) -> Outputs:
        array = np.full((len(rows), max(map(len, rows))), self._pad_id, np.int32)
        for padded, ids in zip(array, rows, strict=True):
            padded[: len(ids)] = ids
        return {name: array, length_name: np.array([[len(ids)] for ids in rows], np.int32)}

    def _words(self, request: InferRequest, name: str, num_rows: int) -> Array:
        if name not in request.inputs:
            return np.empty((num_rows, 2, 0), np.int32)
        return pack_word_lists([tokenize_words(self._tokenizer, words, name) for words in self._rows(request, name)])

    def _bias(self, request: InferRequest, num_rows: int) -> Array:
        """Return what is added to each token's logit, [rows, vocabulary]; [rows, 0] without words."""
        if _BIAS_WORDS not in request.inputs or _BIAS_WEIGHTS not in request.inputs:
            return np.empty((num_rows, 0), np.float32)
        words, weights = self._rows(request, _BIAS_WORDS), request.inputs[_BIAS_WEIGHTS].array
        weights = weights.reshape(num_rows, -1)
        if len(words[0]) != weights.shape[1]:
            message = f"has {weights.shape[1]} elements for the {len(words[0])} of {_BIAS_WORDS}"
            raise invalid(_BIAS_WEIGHTS, f"{request.log_prefix}input '{_BIAS_WEIGHTS}' {message}")
        bias = np.zeros((num_rows, self._tokenizer.num_tokens), np.float32)
        for row, row_words, row_weights in zip(bias, words, weights, strict=True):
            for word, weight in zip(row_words, row_weights, strict=True):
                np.add.at(row, self._tokenizer.encode_words(word, _BIAS_WORDS), weight)
        return bias

    def _ends(self, request: InferRequest, num_rows: int) -> Outputs:
        """Return the ids of end and padding: the request's, else the tokenizer's, else none, so the model's apply."""
        defaults = {
            ("END_ID", "OUT_END_ID"): self._tokenizer.eos_token_id,
            ("PAD_ID", "OUT_PAD_ID"): self._known_pad_id,
        }
        outputs: Outputs = {}
        for (input_name, name), token_id in defaults.items():
            if input_name in request.inputs:
                outputs[name] = request.inputs[input_name].array.reshape(num_rows, 1)
            elif token_id is not None:
                outputs[name] = np.full((num_rows, 1), token_id, np.int32)
        return outputs

    @property
    def _known_pad_id(self) -> int | None:
        pad_id = self._tokenizer.pad_token_id
        return self._tokenizer.eos_token_id if pad_id is None else pad_id

    @property
    def _pad_id(self) -> int:
        """The token that pads rows. Padding is not counted, so any token will do."""
        return self._known_pad_id or 0


def tokenize_words(tokenizer: Tokenizer, words: Sequence[str], param: str) -> list[list[int]]:
    """Return the token ids of each word as it is written and, unless it begins with white space, after a space.

    Empty words, which clients send for none, are left out, and equal token sequences are returned once.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        variants = () if not word else (word,) if word[0].isspace() else (word, f" {word}")
        found |= {tuple(tokenizer.encode_words(variant, param)): None for variant in variants}
    return [list(ids) for ids in found if ids]


def pack_word_lists(rows: Sequence[Sequence[Sequence[int]]]) -> Array:
    """Pack words as TensorRT-LLM takes them, [rows, 2, n] int32: a row's token ids end to end, and each word's end."""
    width = max(1, max(sum(map(len, words)) for words in rows))
    array = np.empty((len(rows), 2, width), np.int32)
    array[:, 0], array[:, 1] = _PADDING, _NO_END
    for (flat, ends), words in zip(array, rows, strict=True):
        lengths = [len(word) for word in words]
        flat[: sum(lengths)] = [token_id for word in words for token_id in word]
        ends[: len(lengths)] = np.cumsum(lengths)
    return array
