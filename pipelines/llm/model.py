"""An LLM as a model of the v2 protocol, with text or token ids as tensors."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.engine.fleet.client import Engine
from sluice.errors import SluiceError, invalid
from sluice.pipelines.llm.answer import LlmAnswer, ResponseBuilder
from sluice.pipelines.llm.configuration import TENSORRT_LLM_BACKEND, declared_inputs, read_queue_defaults
from sluice.pipelines.llm.fields import LLM_API_PREFIX, PROMPTS, LlmInput, supported_inputs
from sluice.pipelines.llm.parameters import excludes_input
from sluice.pipelines.llm.parse import ModelDefaults, RowRequest, parse_row_request
from sluice.pipelines.llm.services import NO_LIMITS, RequestLimits
from sluice.pipelines.llm.text import LlmText
from sluice.pipelines.llm.values import (
    BATCH_INDEX,
    SEQUENCES,
    Values,
    gives_several,
    is_streamed,
    read_rows,
    refuse_long_prompts,
    wants_stream,
)
from sluice.pipelines.text.model import text_model_of
from sluice.pipelines.text.stream import OpenTexts
from sluice.serving.job import InferJob
from sluice.serving.model import Model
from sluice.serving.request import InferRequest, InferResponse
from sluice.serving.spec import build_spec
from sluice.serving.task_model import RequestTasks, count_queued

_FAILED_S = 1.0
"""Longest time in which streams whose engine has stopped end by themselves."""


class LlmModel(Model):
    """Serves the text and token tensors that its configuration declares. Rows of a batch are generated side by side. A
    request that streams gets a response for each piece, any other request gets one response."""

    def __init__(
        self,
        config: ModelConfig,
        text: LlmText,
        engine: Engine,
        *,
        heartbeat_timeout_s: float = 10.0,
        limits: RequestLimits = NO_LIMITS,
    ) -> None:
        """Take over `engine`, which has started. Raises SluiceError INVALID for a configuration no LLM can follow."""
        super().__init__(config, build_spec(config, int(text.version)))
        self.engine = engine
        self.text = text
        self.guests = OpenTexts()
        """Counts the other processes that generate with the model's engine."""
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._inputs = supported_inputs(text.info, takes_adapters=engine.config.enable_lora)
        self._declared = _as_supported(declared_inputs(self.spec), self._inputs)
        is_llm_api = any(name.startswith(LLM_API_PREFIX) for name in self.spec.inputs)
        self._defaults = ModelDefaults(
            eos_token_ids=_eos_token_ids(text),
            excludes_input=excludes_input(config),
            queue=read_queue_defaults(config),
            limits=limits,
            vocab_size=text.info.vocab_size,
            temperature_samples=is_llm_api or config.backend != TENSORRT_LLM_BACKEND,
            is_llm_api=is_llm_api,
        )
        self._tasks = RequestTasks(self.spec)
        self._answers: dict[InferJob, LlmAnswer] = {}
        # Bound to the tasks and not to the model: a cycle would leave model and tokenizer to the garbage collector.
        self.statistics.count_pending = partial(count_queued, self._tasks.jobs)

    @property
    def is_ready(self) -> bool:
        engine = self.engine
        is_well = engine.failure is None and not engine.is_restarting and not engine.is_sleeping
        return is_well and not self._is_closing and engine.heartbeat_age_s() < self._heartbeat_timeout_s

    @property
    def is_lost(self) -> bool:
        return self.engine.failure is not None

    def is_decoupled_for(self, request: InferRequest) -> bool:
        return is_streamed(request, self.spec) or gives_several(request, self.spec)

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs. Requests of the OpenAI routes count too, although they are no jobs of the model."""
        return super().is_idle and self.text.is_idle and not self.guests.count

    def refuse_if_full(self) -> None:
        self.engine.refuse_if_full()

    async def wait_idle(self) -> None:
        await super().wait_idle()
        await self.text.wait_idle()
        await self.guests.wait_idle()

    async def close(self) -> None:
        self._is_closing = True
        await self.engine.stop()
        # The engine's end has failed their streams, and its error is theirs: a cancelled one would hide it.
        await self._tasks.cancel_all(_FAILED_S)

    # -- the start of a request

    def _start(self, job: InferJob) -> None:
        request = job.request
        refuse_long_prompts(request, self.text.tokenizer, self.text.max_model_len)
        rows = read_rows(request, self._declared, self._num_rows(request), self._inputs)
        if rows[0].get("stop_request"):
            self._stop_earlier(job)
            return
        if wants_stream(request) and not self.spec.is_decoupled:
            raise invalid("stream", "Streaming is only supported if model is deployed using decoupled mode.")
        streams, is_split = is_streamed(request, self.spec), self.is_decoupled_for(request)
        row_requests = [self._parse_row(values, request) for values in rows]
        if streams and len(rows) != 1 and BATCH_INDEX not in self.spec.outputs:
            message = f"a stream of several rows, this one has {len(rows)}, takes a model that declares {BATCH_INDEX}"
            raise invalid("stream", message)
        if not is_split and any(each.num_sequences > 1 for each in row_requests):
            message = "each sequence has a response of its own, which takes a decoupled model and a call that streams"
            raise invalid(SEQUENCES, f"{SEQUENCES} must be 1 here: {message}")
        builder = self._response_builder(job, row_requests, 1 if is_split else len(rows))
        answer = LlmAnswer(job, row_requests, self.text, builder, streams=streams, is_split=is_split)
        self._answers[job] = answer
        self._tasks.start(job, answer.run)

    def finished(self, job: InferJob) -> None:
        self._answers.pop(job, None)
        super().finished(job)

    def _num_rows(self, request: InferRequest) -> int:
        if self.spec.max_batch_size > 0:
            return request.batch_size
        token_ids = request.inputs.get("input_ids")
        return max(token_ids.shape[0], 1) if token_ids is not None and len(token_ids.shape) == 2 else 1

    def _parse_row(self, values: Values, request: InferRequest) -> RowRequest:
        if values.keys().isdisjoint(PROMPTS):
            raise self._missing_prompt(request)
        adapters, folders = self.text.info.adapters, self.engine.adapters
        model = replace(self._defaults, adapters=adapters, adapter_folders=folders)
        return parse_row_request(values, request, model)

    def _missing_prompt(self, request: InferRequest) -> SluiceError:
        missing = next(name for name in PROMPTS if name in self.spec.inputs)
        got = ",".join(f"'{name}'" for name in request.inputs)
        return invalid(
            missing,
            f"{request.log_prefix}expected number of inputs between 1 and {len(self.spec.inputs)} but got "
            f"{len(request.inputs)} inputs for model '{self.name}'. Got input(s) [{got}], but missing required "
            f"input(s) ['{missing}']. Please provide all required input(s).",
        )

    def _stop_earlier(self, job: InferJob) -> None:
        """Cancel in TensorRT-LLM's way, by a second request with the same id."""
        if not job.request.id:
            raise invalid("stop", "a request that stops an earlier one must have its id")
        for other, answer in list(self._answers.items()):
            if (other.request.id, other.request.tenant) == (job.request.id, job.request.tenant):
                answer.stop()
                self._tasks.cancel(other)
        job.respond(InferResponse())

    def _response_builder(self, job: InferJob, rows: Sequence[RowRequest], num_rows: int) -> ResponseBuilder:
        ends = self._defaults.eos_token_ids
        pads = (row.pad_id for row in rows if row.pad_id is not None)
        pad_id = next(pads, ends[0] if ends else 0)
        return ResponseBuilder(self.spec, job.request.requested_outputs, num_rows, pad_id)


@text_model_of.register
def _(model: LlmModel) -> LlmText | None:
    return llm_text_of(model)


def language_models(models: Iterable[Model]) -> list[LlmModel]:
    """Return the language models of our own, every version of them."""
    return [model for model in models if isinstance(model, LlmModel)]


def llm_text_of(model: Model) -> LlmText | None:
    """Return the text model of an LLM; None for one that embeds or scores, and for any other kind of model."""
    return model.text if isinstance(model, LlmModel) and not model.text.info.embedding_size else None


def embedder_of(model: Model) -> LlmText | None:
    """Return the text model of an LLM that embeds; None for any other model."""
    if not isinstance(model, LlmModel) or model.text.info.gives_scores:
        return None
    return model.text if model.text.info.embedding_size else None


def scorer_of(model: Model) -> LlmText | None:
    """Return the text model of an LLM that scores pairs of texts; None for any other model."""
    return model.text if isinstance(model, LlmModel) and model.text.info.gives_scores else None


def _as_supported(declared: dict[str, LlmInput], supported: dict[str, LlmInput]) -> dict[str, LlmInput]:
    """Return the declared inputs as the model's engine supports them. `stop` may be another input of that name."""
    return {name: supported[name] if each.field == supported[name].field else each for name, each in declared.items()}


def _eos_token_ids(text: LlmText) -> tuple[int, ...]:
    """Return the ids that end a text: the model's, then the tokenizer's where the model does not have it."""
    of_model, of_tokenizer = text.info.eos_token_ids, text.tokenizer.eos_token_id
    return of_model if of_tokenizer is None or of_tokenizer in of_model else (*of_model, of_tokenizer)
