"""The base of NVIDIA's text stages: the tensors that each may declare, and how pre- and postprocessing run."""

import asyncio
from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from time import perf_counter_ns

from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import invalid
from sluice.pipelines.text.tokenizer import INLINE_CHARS
from sluice.serving.config.completion import DeclaredTensor, complete_tensors
from sluice.serving.job import InferJob
from sluice.serving.request import InferRequest, InferResponse
from sluice.serving.task_model import MakeOutputs, TaskModel
from sluice.serving.tensors.tensor import Array, Tensor

Outputs = dict[str, Array]
"""Output arrays by name, each [rows, ...]."""


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
        used = ModelConfig()
        used.CopyFrom(config)
        for tensors, others in ((used.input, self.other_inputs), (used.output, self.other_outputs)):
            for index in reversed(range(len(tensors))):
                if tensors[index].name in others:
                    del tensors[index]
        used = complete_tensors(used, self.inputs, self.outputs)
        whole = ModelConfig()
        whole.CopyFrom(config)
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
