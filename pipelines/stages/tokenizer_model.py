"""The backend `tokenizer`: a tokenizer.json as a model of the v2 protocol, texts in, token ids out, for encoders."""

import asyncio
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from enum import StrEnum
from pathlib import Path
from time import perf_counter_ns

import numpy as np
import tokenizers
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig

from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.serving.backend import Backend, BackendContext
from sluice.serving.config.parameters import ParameterReader
from sluice.serving.config.validation import complete_and_check
from sluice.serving.job import InferJob
from sluice.serving.model import Model
from sluice.serving.request import InferRequest, InferResponse
from sluice.serving.spec import ModelSource, build_spec
from sluice.serving.tensors.tensor import Array, Tensor

TEXT = "text"
INPUT_IDS, ATTENTION_MASK, TOKEN_TYPE_IDS = "input_ids", "attention_mask", "token_type_ids"
TOKEN_INPUTS = frozenset({INPUT_IDS, ATTENTION_MASK, TOKEN_TYPE_IDS})
"""Inputs that a BERT-like model may have."""
_INLINE_CHARS = 1000
"""Longest request that is answered on the event loop, in about a millisecond. Longer ones go to a thread."""
_NUM_WORKERS = 2
_PIECE_CHARS = 50_000
"""Length of the pieces in which a long text is tokenized: the library keeps some hundred bytes for each token."""
_PIECE_IDS = 16 << 10
"""Ids that are compared in one call, which keeps the interpreter's lock."""

_PARAMETERS = ("max_tokens", "add_special_tokens", "prefix")
_OUTPUTS = (INPUT_IDS, ATTENTION_MASK, TOKEN_TYPE_IDS)
_ID_TYPES = (DataType.TYPE_INT64, DataType.TYPE_INT32)
_MAX_TOKENS = 1_000_000


class _Switch(StrEnum):
    TRUE = "true"
    FALSE = "false"


class TokenizerBackend(Backend):
    """Serves the `tokenizer.json` of a version's folder.

    Parameters: `max_tokens` of a text, special tokens included (0, the default, for any number);
    `add_special_tokens` ("true"); `prefix`, which is put before every text.
    """

    name = "tokenizer"
    is_stateless = True
    default_model_filename = "tokenizer.json"

    async def complete(self, source: ModelSource, context: BackendContext) -> ModelConfig:
        """Complete the tensors. Raises SluiceError INVALID for tensors that a tokenizer does not have."""
        return _complete(source.config)

    def check(self, source: ModelSource) -> None:
        complete_and_check(_complete(source.config))
        _read_tokenizer(source)

    async def load(self, source: ModelSource, context: BackendContext) -> Model:
        """Load the tokenizer. Raises SluiceError INVALID for wrong parameters, UNAVAILABLE without a tokenizer."""
        tokenizer = await asyncio.to_thread(_read_tokenizer, source)
        # Not stripped: a space at its end is part of it.
        prefix = source.config.parameters["prefix"].string_value if "prefix" in source.config.parameters else ""
        return TokenizerModel(source.config, source.version, tokenizer, prefix)


def _complete(config: ModelConfig) -> ModelConfig:
    completed = deepcopy(config)
    if not completed.input:
        completed.input.add(name=TEXT, data_type=DataType.TYPE_STRING, dims=[1])
    if not completed.output:
        completed.output.add(name=INPUT_IDS, data_type=DataType.TYPE_INT64, dims=[-1])
    _check(completed)
    return completed


def _read_tokenizer(source: ModelSource) -> "TextTokenizer":
    settings = ParameterReader.of_config(source.config, _PARAMETERS)
    max_tokens = settings.integer("max_tokens", 0, 0, _MAX_TOKENS)
    adds_special = settings.choice("add_special_tokens", _Switch.TRUE) is _Switch.TRUE
    return TextTokenizer.load(source.model_file, max_tokens, adds_special=adds_special)


def _check(config: ModelConfig) -> None:
    [given] = config.input if len(config.input) == 1 else [None]
    if given is None or given.name != TEXT or given.data_type != DataType.TYPE_STRING or list(given.dims) != [1]:
        raise _wrong(config, "input", f"the one input '{TEXT}' of TYPE_STRING and dims [ 1 ]")
    for output in config.output:
        if output.name not in _OUTPUTS or output.data_type not in _ID_TYPES or list(output.dims) != [-1]:
            expected = f"outputs among {', '.join(_OUTPUTS)} of TYPE_INT64 or TYPE_INT32 and dims [ -1 ]"
            raise _wrong(config, "output", f"{expected}; '{output.name}' is not")


def _wrong(config: ModelConfig, param: str, expected: str) -> SluiceError:
    return invalid(param, f"model '{config.name}' with backend 'tokenizer' must have {expected}")


class TokenizerModel(Model):
    """Answers each request by itself: short texts take less time than the wait for a batch.

    The rows of a request are padded at their ends to the longest, with the tokenizer's padding.
    """

    def __init__(self, config: ModelConfig, version: int, tokenizer: "TextTokenizer", prefix: str = "") -> None:
        """Take the tokenizer, and the text that is put before every text."""
        super().__init__(config, build_spec(config, version))
        self.tokenizer = tokenizer
        self.prefix = prefix
        self._workers = ThreadPoolExecutor(_NUM_WORKERS, thread_name_prefix=self.name)
        self._running: dict[asyncio.Future[list[list[int]]], InferJob] = {}

    def _start(self, job: InferJob) -> None:
        job.compute_started_ns = perf_counter_ns()
        texts = self._texts(job.request)
        job.infer_started_ns = perf_counter_ns()
        if sum(map(len, texts)) <= _INLINE_CHARS:
            self._respond(job, self.tokenizer.encode(texts))
            return
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._workers, self.tokenizer.encode_long, texts)
        self._running[future] = job
        future.add_done_callback(self._encoded)

    def _texts(self, request: InferRequest) -> list[str]:
        try:
            return [self.prefix + element.decode() for element in request.inputs[TEXT].array.ravel().tolist()]
        except UnicodeDecodeError:
            message = f"inference input '{TEXT}' for model '{self.name}' holds bytes that are not UTF-8 text"
            raise invalid(TEXT, request.log_prefix + message) from None

    def _encoded(self, future: "asyncio.Future[list[list[int]]]") -> None:
        job = self._running.pop(future)
        if future.cancelled():
            job.fail(SluiceError(ErrorCode.UNAVAILABLE, f"model '{self.name}' version {self.version} is unloaded"))
        elif (error := future.exception()) is not None:
            job.fail(SluiceError(ErrorCode.INTERNAL, f"model '{self.name}' cannot tokenize the text: {error}"))
        else:
            self._respond(job, future.result())

    def _respond(self, job: InferJob, rows: Sequence[Sequence[int]]) -> None:
        job.infer_ended_ns = perf_counter_ns()
        requested = job.request.requested_outputs or tuple(self.spec.outputs)
        job.respond(InferResponse([self._tensor(name, rows) for name in requested]))

    def _tensor(self, name: str, rows: Sequence[Sequence[int]]) -> Tensor:
        spec = self.spec.outputs[name]
        array = _pad(rows, name, self.tokenizer.pad_id).astype(spec.data_type.dtype, copy=False)
        if self.spec.max_batch_size == 0:
            array = array[0]
        return Tensor(name, spec.data_type.name, array.shape, array=array)

    async def close(self) -> None:
        """Fail the requests that wait. Texts that are being tokenized finish, as the library cannot be interrupted."""
        self.retire()
        self._workers.shutdown(wait=False, cancel_futures=True)
        for future in list(self._running):
            future.cancel()


def _pad(rows: Sequence[Sequence[int]], name: str, pad_id: int) -> Array:
    """Return the output `name` as [rows, longest]."""
    longest = max(map(len, rows))
    array = np.full((len(rows), longest), pad_id if name == INPUT_IDS else 0, np.int64)
    if name != TOKEN_TYPE_IDS:
        for index, ids in enumerate(rows):
            array[index, : len(ids)] = ids if name == INPUT_IDS else 1
    return array


class TextTokenizer:
    """A tokenizer that threads may share. Padding and truncation set in the file are not used."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, max_tokens: int = 0, *, adds_special: bool = True) -> None:
        """Take over `tokenizer`. `max_tokens` limits a text with its special tokens; 0 is no limit."""
        padding = tokenizer.padding
        self.pad_id: int = padding["pad_id"] if padding else 0
        tokenizer.no_padding()
        tokenizer.no_truncation()
        # A copy, as truncation is a state of the tokenizer.
        self._untruncated = tokenizers.Tokenizer.from_str(tokenizer.to_str())
        self.max_tokens = max_tokens
        if max_tokens:
            tokenizer.enable_truncation(max_tokens)
        self._tokenizer = tokenizer
        self._adds_special = adds_special

    @classmethod
    def load(cls, path: Path, max_tokens: int = 0, *, adds_special: bool = True) -> "TextTokenizer":
        """Load a tokenizer.json, on a thread. Raises SluiceError UNAVAILABLE for a missing or damaged file."""
        if not path.is_file():
            raise SluiceError(ErrorCode.UNAVAILABLE, f"unable to find the tokenizer '{path}'")
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)), max_tokens, adds_special=adds_special)
        except Exception as error:  # the library raises nothing narrower for a damaged file
            raise SluiceError(ErrorCode.UNAVAILABLE, f"cannot load the tokenizer '{path}': {error}") from error

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text. Holds Python's lock, so texts must be short."""
        return [self._tokenizer.encode(text, add_special_tokens=self._adds_special).ids for text in texts]

    @property
    def num_tokens(self) -> int:
        """Size of the vocabulary, including added tokens."""
        return int(self._tokenizer.get_vocab_size())

    def encode_long(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, on a thread. Does not hold Python's lock."""
        return [self._encoding(text).ids for text in texts]

    def encode_checked(self, texts: Sequence[str]) -> list[tuple[list[int], bool]]:
        """Return as `encode_long`, with whether each text was truncated."""
        return [(found.ids, bool(found.overflowing)) for found in map(self._encoding, texts)]

    def copy(self) -> tokenizers.Tokenizer:
        """Return a copy, with truncation and padding, on a thread."""
        copied = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        copied.enable_padding(pad_id=self.pad_id)
        return copied

    def encode_whole(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of a text, of which nothing is truncated. Call it on a thread."""
        return self._unlocked(self._untruncated, text, adds_special=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of the ids. Call it on a thread."""
        return str(self._untruncated.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)[0])

    def spell(self, token_id: int) -> str:
        """Return a token as the vocabulary writes it; "" for an id that the vocabulary lacks."""
        return self._untruncated.id_to_token(token_id) or ""

    def _encoding(self, text: str) -> tokenizers.Encoding:
        """Encode a text. Of one that is truncated, its beginning is enough if that is truncated too."""
        if self.max_tokens and len(text) > _PIECE_CHARS:
            _, end = split_text(text, _PIECE_CHARS)[0]
            beginning = self._unlocked(self._tokenizer, text[:end], adds_special=self._adds_special)
            if beginning.overflowing:
                return beginning
        return self._unlocked(self._tokenizer, text, adds_special=self._adds_special)

    def starts(self, text: str) -> "array[int]":
        """Return the offset of each token of the whole text, in characters, in rising order. Call it on a thread.

        Special tokens are left out.
        """
        found = array("Q")  # to free a list of a million integers keeps the interpreter's lock for 20 ms
        for start, end in split_text(text, _PIECE_CHARS):
            offsets = self._unlocked(self._untruncated, text[start:end], adds_special=False).offsets
            latest = start
            for offset, _ in offsets:
                latest = max(latest, start + offset)
                found.append(latest)
        return found

    @staticmethod
    def _unlocked(tokenizer: tokenizers.Tokenizer, text: str, *, adds_special: bool) -> tokenizers.Encoding:
        # Of the library's calls only this one releases Python's lock. With one text it starts no threads.
        return tokenizer.encode_batch([text], add_special_tokens=adds_special)[0]


def check_token_ids(token_ids: Sequence[int], num_tokens: int, param: str) -> None:
    """Raise INVALID, which names the first of the ids that a vocabulary of `num_tokens` lacks. Call it on a thread."""
    for start in range(0, len(token_ids), _PIECE_IDS):
        piece = token_ids[start : start + _PIECE_IDS]
        if min(piece) < 0 or max(piece) >= num_tokens:
            index = next(i for i, each in enumerate(piece) if not 0 <= each < num_tokens)
            message = f"{param}[{start + index}] must be a token id from 0 to {num_tokens - 1}, got {piece[index]}"
            raise invalid(f"{param}[{start + index}]", message)


def cut_token_ids(token_ids: list[int], special: Sequence[int], most: int) -> list[int]:
    """Return the ids of a text without the last ones of the text itself, so that there are at most `most`. `special`
    are the ids of an empty text: those that begin the text's stay there, and the others at its end."""
    if len(token_ids) <= most:
        return token_ids
    num_first = next((at for at, each in enumerate(special) if each != token_ids[at]), len(special))
    num_last = len(special) - num_first
    return token_ids[: max(most - num_last, 0)] + token_ids[len(token_ids) - num_last :]


def split_text(text: str, size: int) -> list[tuple[int, int]]:
    """Return start and end of pieces of at most `size` characters, which end behind white space where there is any."""
    found, start = [], 0
    while len(text) - start > size:
        end = start + size
        cut = max(text.rfind(" ", start, end), text.rfind("\n", start, end)) + 1
        end = cut if cut > start else end
        found.append((start, end))
        start = end
    if start < len(text):
        found.append((start, len(text)))
    return found
