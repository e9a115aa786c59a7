"""NVIDIA's text stages: the tensors that each may declare, preprocessing and postprocessing."""

import asyncio
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from time import perf_counter_ns

import numpy as np
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import SluiceError, invalid
from sluice.pipelines.text.detokenizer import Detokenizer
from sluice.pipelines.text.tensor_model import read_text_rows
from sluice.pipelines.text.tokenizer import INLINE_CHARS, Tokenizer
from sluice.serving.config.completion import DeclaredTensor, complete_tensors
from sluice.serving.job import InferJob
from sluice.serving.request import InferRequest, InferResponse
from sluice.serving.task_model import MakeOutputs, TaskModel
from sluice.serving.tensors.tensor import Array, Tensor

Outputs = dict[str, Array]
"""Output arrays by name, each [rows, ...]."""
_BIAS_WORDS, _BIAS_WEIGHTS = "EMBEDDING_BIAS_WORDS", "EMBEDDING_BIAS_WEIGHTS"
_PADDING, _NO_END = 0, -1
"""Padding of the token ids and of the ends in a list of words."""
_TEXTS = ("QUERY", "DECODER_QUERY", "BAD_WORDS_DICT", "STOP_WORDS_DICT", _BIAS_WORDS)
TOKENS, LENGTHS, OUTPUT = "TOKENS_BATCH", "SEQUENCE_LENGTH", "OUTPUT"


@dataclass(frozen=True, slots=True)
class StageSignature:
    """The tensors that models of one stage may declare.

    `other_inputs` and `other_outputs` are further tensors of NVIDIA's stage, of any type: images, prompt tuning,
    drafts, logits, and tensors that older releases pass through. A model may declare them, but they are not added to
    a model that declares nothing.
    """

    inputs: tuple[DeclaredTensor, ...]
    outputs: tuple[DeclaredTensor, ...]
    other_inputs: frozenset[str]
    other_outputs: frozenset[str]

    def complete(self, config: ModelConfig) -> ModelConfig:
        """Return `config` with `inputs` and `outputs` added where it declares none.

        Raises SluiceError INVALID for a tensor that the stage does not have, that has another type, or that is missing.
        """
        used = deepcopy(config)
        for tensors, others in ((used.input, self.other_inputs), (used.output, self.other_outputs)):
            for index in reversed(range(len(tensors))):
                if tensors[index].name in others:
                    del tensors[index]
        used = complete_tensors(used, self.inputs, self.outputs)
        whole = deepcopy(config)
        whole.input.extend(used.input if not config.input else ())
        whole.output.extend(used.output if not config.output else ())
        return whole

    def refuse_unsupported(self, request: InferRequest) -> None:
        """Raise INVALID for one of the other inputs, which would be ignored. A single 0, false or "" is accepted."""
        for name in self.other_inputs & request.inputs.keys():
            tensor = request.inputs[name]
            if tensor.num_elements > 1 or (tensor.num_elements and tensor.array.ravel()[0]):
                raise invalid(name, f"{request.log_prefix}input '{name}' is not supported; leave it out")


def _scalar(name: str, datatype: str) -> DeclaredTensor:
    return DeclaredTensor(name, datatype, is_optional=True)


def _list(name: str, datatype: str, dims: tuple[int, ...] = (-1,)) -> DeclaredTensor:
    return DeclaredTensor(name, datatype, dims, is_optional=True)


PREPROCESSING = StageSignature(
    inputs=(
        DeclaredTensor("QUERY", "BYTES"),
        DeclaredTensor("REQUEST_OUTPUT_LEN", "INT32"),
        _scalar("DECODER_QUERY", "BYTES"),
        _list("BAD_WORDS_DICT", "BYTES"),
        _list("STOP_WORDS_DICT", "BYTES"),
        _list("EMBEDDING_BIAS_WORDS", "BYTES"),
        _list("EMBEDDING_BIAS_WEIGHTS", "FP32"),
        _scalar("END_ID", "INT32"),
        _scalar("PAD_ID", "INT32"),
    ),
    outputs=(
        DeclaredTensor("INPUT_ID", "INT32", (-1,)),
        DeclaredTensor("REQUEST_INPUT_LEN", "INT32"),
        DeclaredTensor("DECODER_INPUT_ID", "INT32", (-1,)),
        DeclaredTensor("REQUEST_DECODER_INPUT_LEN", "INT32"),
        DeclaredTensor("BAD_WORDS_IDS", "INT32", (2, -1)),
        DeclaredTensor("STOP_WORDS_IDS", "INT32", (2, -1)),
        DeclaredTensor("EMBEDDING_BIAS", "FP32", (-1,)),
        DeclaredTensor("REQUEST_OUTPUT_LEN", "INT32", (-1,)),
        DeclaredTensor("OUT_END_ID", "INT32"),
        DeclaredTensor("OUT_PAD_ID", "INT32"),
    ),
    other_inputs=frozenset(
        {
            *("IMAGE", "IMAGES", "IMAGE_BYTES", "IMAGE_URL", "IMAGE_SIZES", "VIDEO_BYTES"),
            *("PROMPT_TABLE_EXTRA_ID", "PROMPT_EMBEDDING_TABLE"),
        }
    ),
    other_outputs=frozenset(
        {
            *("OUT_PROMPT_TABLE_EXTRA_IDS", "PIXEL_VALUES", "ASPECT_RATIO_IDS", "ASPECT_RATIO_MASK"),
            *("CROSS_ATTENTION_MASK", "IMAGE_SIZES", "IS_VIDEO_INPUT", "ATTENTION_MASK", "IMAGE_GRID_THW"),
            *("VISION_INPUT_ID", "OUT_PROMPT_EMBEDDING_TABLE"),
        }
    ),
)

PASSED_THROUGH = frozenset({"CUM_LOG_PROBS", "OUTPUT_LOG_PROBS", "CONTEXT_LOGITS", "GENERATION_LOGITS", "BATCH_INDEX"})
"""Inputs that older releases of postprocessing return as `OUT_...`. Newer ensembles use the token model's outputs."""
POSTPROCESSING = StageSignature(
    inputs=(DeclaredTensor("TOKENS_BATCH", "INT32", (-1, -1)), DeclaredTensor("SEQUENCE_LENGTH", "INT32", (-1,))),
    outputs=(DeclaredTensor("OUTPUT", "BYTES", (-1,)),),
    other_inputs=PASSED_THROUGH,
    other_outputs=frozenset(f"OUT_{name}" for name in PASSED_THROUGH),
)

_FLAGS = (
    *("exclude_input_in_output", "stream", "return_log_probs", "return_context_logits", "return_generation_logits"),
    *("return_perf_metrics", "return_num_input_tokens", "return_num_output_tokens"),
    "return_kv_cache_reuse_stats",
)
BLS = StageSignature(
    inputs=(
        DeclaredTensor("text_input", "BYTES"),
        DeclaredTensor("max_tokens", "INT32"),
        _scalar("decoder_text_input", "BYTES"),
        _list("bad_words", "BYTES"),
        _list("stop_words", "BYTES"),
        *(_scalar(name, "INT32") for name in ("end_id", "pad_id", "top_k", "min_tokens", "beam_width")),
        *(_scalar(name, "INT32") for name in ("num_return_sequences", "min_length")),
        *(_scalar(name, "FP32") for name in ("top_p", "temperature", "length_penalty", "repetition_penalty")),
        *(_scalar(name, "FP32") for name in ("presence_penalty", "frequency_penalty")),
        *(_scalar(name, "UINT64") for name in ("seed", "random_seed", "lora_task_id")),
        *(_scalar(name, "BOOL") for name in _FLAGS),
        _list("embedding_bias_words", "BYTES"),
        _list("embedding_bias_weights", "FP32"),
        _list("lora_weights", "FP16", (-1, -1)),
        _list("lora_config", "INT32", (-1, 3)),
        _scalar("guided_decoding_guide_type", "BYTES"),
        _scalar("guided_decoding_guide", "BYTES"),
    ),
    outputs=(
        DeclaredTensor("text_output", "BYTES", (-1,)),
        DeclaredTensor("cum_log_probs", "FP32", (-1,)),
        DeclaredTensor("output_log_probs", "FP32", (-1, -1)),
        *(DeclaredTensor(name, "INT32") for name in ("batch_index", "sequence_index")),
        *(DeclaredTensor(name, "INT32") for name in ("num_input_tokens", "num_output_tokens")),
        *(DeclaredTensor(f"kv_cache_{what}_blocks", "INT32") for what in ("alloc_new", "reused", "alloc_total")),
        *(
            DeclaredTensor(f"{what}_time_ns", "INT64")
            for what in ("arrival", "first_scheduled", "first_token", "last_token")
        ),
        DeclaredTensor("acceptance_rate", "FP32"),
        *(DeclaredTensor(name, "INT32") for name in ("total_accepted_draft_tokens", "total_draft_tokens")),
    ),
    other_inputs=frozenset(
        {
            *("image_input", "image_bytes_input", "image_url_input", "image_sizes_input", "video_bytes_input"),
            *("num_draft_tokens", "use_draft_logits"),
            *("prompt_embedding_table", "prompt_table_extra_id", "prompt_vocab_size"),
        }
    ),
    other_outputs=frozenset({"context_logits", "generation_logits"}),
)
"""The signature of BLS. `min_length` and `random_seed` are the names of `min_tokens` and `seed` in older releases."""


class StageModel(TaskModel):
    """A stage that answers each request by itself: on the event loop where that is quick, else on a thread.

    Requests are not batched, as rows share no work.
    """

    @abstractmethod
    def _size(self, request: InferRequest) -> int:
        """Return the bytes of text or the tokens in the request, which its duration grows with."""

    @abstractmethod
    def _outputs(self, request: InferRequest) -> Outputs:
        """Return the outputs of a checked request. May be called on a thread. Raises SluiceError INVALID."""

    def _start(self, job: InferJob) -> None:
        if self._size(job.request) > INLINE_CHARS:
            super()._start(job)
            return
        job.compute_started_ns = job.infer_started_ns = perf_counter_ns()
        outputs = self._tensors(job.request)
        job.infer_ended_ns = perf_counter_ns()
        job.respond(InferResponse(outputs))

    def _work(self, request: InferRequest) -> MakeOutputs:
        return partial(asyncio.to_thread, self._tensors, request)

    def _tensors(self, request: InferRequest) -> list[Tensor]:
        outputs = self._outputs(request)
        requested = request.requested_outputs or tuple(self.spec.outputs)
        return [self._tensor(name, outputs[name]) for name in requested if name in outputs]

    def _tensor(self, name: str, rows: Array) -> Tensor:
        return Tensor.of(name, rows if self._is_batched else rows[0])


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


class PostprocessingModel(StageModel):
    """Decodes each sequence as a whole text.

    A streaming ensemble sends it the tokens of one response at a time. Where tokens depend on their neighbours, the
    text loses spaces that way, as in Triton. BLS keeps the tokens before and gets the text right.
    """

    def __init__(self, config: ModelConfig, version: int, tokenizer: Tokenizer, *, skips_special: bool) -> None:
        """Take the tokenizer. With `skips_special` control tokens are not part of the text."""
        super().__init__(config, version)
        self._tokenizer = tokenizer
        self._skips_special = skips_special

    def detokenizer(self) -> Detokenizer | None:
        """Return a detokenizer for one sequence; None where control tokens are shown, which it would leave out."""
        return self._tokenizer.detokenizer() if self._skips_special else None

    def _size(self, request: InferRequest) -> int:
        return request.inputs[TOKENS].num_elements

    def _outputs(self, request: InferRequest) -> Outputs:
        tokens, lengths = request.inputs[TOKENS].array, request.inputs[LENGTHS].array
        if not self._is_batched:
            tokens, lengths = tokens[np.newaxis], lengths[np.newaxis]
        _check(request, tokens, lengths)
        # One dimension for rows and beams together, as NVIDIA's stage has it, whose clients read element 0 as a text.
        texts = np.array([self._text(ids) for ids in _sequences(tokens, lengths)], np.object_)
        return {OUTPUT: texts if self._is_batched else texts[np.newaxis]} | self._passed_through(request)

    def _passed_through(self, request: InferRequest) -> Outputs:
        given = {f"OUT_{name}": request.inputs[name].array for name in PASSED_THROUGH & request.inputs.keys()}
        return given if self._is_batched else {name: array[np.newaxis] for name, array in given.items()}

    def _text(self, token_ids: list[int]) -> bytes:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skips_special).encode()


def _sequences(tokens: Array, lengths: Array) -> Iterator[list[int]]:
    """Yield the sequences of tokens [rows, beams, longest] with lengths [rows, beams], row by row."""
    for ids, length in zip(tokens.reshape(lengths.size, tokens.shape[-1]), lengths.ravel(), strict=True):
        yield ids[:length].tolist()


def _check(request: InferRequest, tokens: Array, lengths: Array) -> None:
    if lengths.shape != tokens.shape[:-1]:
        message = f"must have a length for each sequence of {TOKENS} {list(tokens.shape)}, got {list(lengths.shape)}"
        raise _wrong(request, LENGTHS, message)
    if lengths.size and not 0 <= lengths.min() <= lengths.max() <= tokens.shape[-1]:
        raise _wrong(request, LENGTHS, f"must be between 0 and the {tokens.shape[-1]} tokens of {TOKENS}")
    if tokens.size and tokens.min() < 0:
        raise _wrong(request, TOKENS, f"must hold token ids, got {tokens.min()}")


def _wrong(request: InferRequest, name: str, message: str) -> SluiceError:
    return invalid(name, f"{request.log_prefix}input '{name}' {message}")
