"""An LLM as a model of the v2 protocol: its text face and its token face."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from time import perf_counter_ns

from tritonclient.grpc.model_config_pb2 import ModelConfig

from engine.client.base import EngineClient
from pipelines.llm.answer import Packer, Result, RowSummary, tokens_result
from pipelines.llm.asked import Asked, ModelDefaults, asked_of
from pipelines.llm.configuration import declared_inputs
from pipelines.llm.fields import PROMPTS, Input, inputs_of
from pipelines.llm.parameters import excludes_input
from pipelines.llm.queueing import queue_rules
from pipelines.llm.recording import recorded
from pipelines.llm.services import NO_LIMITS, OpenRecord, RequestLimits
from pipelines.llm.text import LlmText
from pipelines.llm.tokens import TokenPiece, generate_tokens
from pipelines.llm.values import Values, read_rows, wants_stream
from pipelines.text.tensor_text import text_model_of
from pipelines.text.types import TextEvent
from serving.job import InferJob
from serving.model import Model
from serving.request import InferRequest, InferResponse
from serving.spec import build_spec
from serving.task_model import RequestTasks, count_queued, gather_all
from sluice.errors import ErrorCode, SluiceError, invalid


class LlmModel(Model):
    """Serves what its configuration declares of the faces. Rows of a batch are generated side by side.

    A request that streams gets a response for each piece, any other one gets one response.
    """

    def __init__(
        self,
        config: ModelConfig,
        text: LlmText,
        engine: EngineClient,
        open_record: OpenRecord,
        *,
        heartbeat_timeout_s: float = 10.0,
        limits: RequestLimits = NO_LIMITS,
    ) -> None:
        """Owns `engine`, which has started. Raises SluiceError INVALID for a configuration that no LLM can follow."""
        super().__init__(config, build_spec(config, int(text.version)))
        self.engine = engine
        self._text = text
        self._open_record = open_record
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._inputs = inputs_of(text.info)
        self._declared = _as_known(declared_inputs(self.spec), self._inputs)
        self._defaults = ModelDefaults(
            eos_token_ids=_eos_token_ids(text),
            excludes_input=excludes_input(config),
            queue=queue_rules(config),
            limits=limits,
            vocab_size=text.info.vocab_size,
            adapters=text.info.adapters,
        )
        self._tasks = RequestTasks(self.spec)
        # Of what runs, not of the model: it and its tokenizer shall not have to wait for the garbage collector.
        self.statistics.count_pending = partial(count_queued, self._tasks.jobs)

    @property
    def text(self) -> LlmText:
        return self._text

    @property
    def is_ready(self) -> bool:
        engine = self.engine
        is_well = engine.failure is None and not engine.is_restarting
        return is_well and not self._is_closing and engine.heartbeat_age_s() < self._heartbeat_timeout_s

    @property
    def is_lost(self) -> bool:
        return self.engine.failure is not None

    def is_decoupled_for(self, request: InferRequest) -> bool:
        if not self.spec.is_decoupled:
            return False
        streams = wants_stream(request)
        return request.streams_by_default if streams is None else streams

    @property
    def is_idle(self) -> bool:
        """What the OpenAI routes have asked of its text counts too, which is no job of the model."""
        return super().is_idle and self._text.is_idle

    def refuse_if_full(self) -> None:
        self.engine.refuse_if_full()

    async def wait_idle(self) -> None:
        await super().wait_idle()
        await self._text.wait_idle()

    async def close(self) -> None:
        self._is_closing = True
        await self.engine.stop()
        await self._tasks.cancel_all()

    # -- a request's begin

    def _start(self, job: InferJob) -> None:
        request = job.request
        rows = read_rows(request, self._declared, self._num_rows(request), self._inputs)
        if rows[0].get("stop_request"):
            self._stop_earlier(job)
            return
        if wants_stream(request) and not self.spec.is_decoupled:
            raise invalid("stream", "Streaming is only supported if model is deployed using decoupled mode.")
        streams = self.is_decoupled_for(request)
        asked = [self._asked(values, request) for values in rows]
        if streams and len(asked) != 1:
            raise invalid("stream", f"only a request of one row can stream, this one has {len(asked)}")
        _check_wanted(request, asked[0])
        self._tasks.start(job, partial(self._stream if streams else self._answer_whole, job, asked))

    def _num_rows(self, request: InferRequest) -> int:
        if self.spec.max_batch_size > 0:
            return request.batch_size
        token_ids = request.inputs.get("input_ids")
        return max(token_ids.shape[0], 1) if token_ids is not None and len(token_ids.shape) == 2 else 1

    def _asked(self, values: Values, request: InferRequest) -> Asked:
        if values.keys().isdisjoint(PROMPTS):
            raise self._nothing_asked(request)
        return asked_of(values, request, self._defaults)

    def _nothing_asked(self, request: InferRequest) -> SluiceError:
        missing = next(name for name in PROMPTS if name in self.spec.inputs)
        got = ",".join(f"'{name}'" for name in request.inputs)
        return invalid(
            missing,
            f"{request.log_prefix}expected number of inputs between 1 and {len(self.spec.inputs)} but got "
            f"{len(request.inputs)} inputs for model '{self.name}'. Got input(s) [{got}], but missing required "
            f"input(s) ['{missing}']. Please provide all required input(s).",
        )

    def _stop_earlier(self, job: InferJob) -> None:
        """TensorRT-LLM's way to cancel: a second request of the same id."""
        if not job.request.id:
            raise invalid("stop", "a request that stops an earlier one must have its id")
        for other in list(self._tasks.jobs):
            if (other.request.id, other.request.tenant) == (job.request.id, job.request.tenant):
                self._tasks.end(other, SluiceError(ErrorCode.CANCELLED, "Request cancelled by client"))
        job.respond(InferResponse())

    # -- a request's task

    async def _stream(self, job: InferJob, asked: Sequence[Asked]) -> None:
        """A response for each piece of the one row."""
        packer, summary = self._packer(job, asked), RowSummary(asked[0])
        async with aclosing(self._events(job, asked[0])) as events:
            async for event in events:
                if not job.compute_started_ns:
                    _leave_queue(job)
                summary.note(event)
                if event.finish_reason is not None:
                    job.infer_ended_ns = perf_counter_ns()
                    job.respond(packer.response([_piece(event) | summary.result(event)]))
                    return
                if not isinstance(event, TokenPiece):
                    response = packer.text_response(event.text)
                else:
                    response = packer.token_response(event.token_ids)
                if response.outputs:
                    job.respond(response)

    async def _answer_whole(self, job: InferJob, asked: Sequence[Asked]) -> None:
        results = await gather_all([self._whole_row(job, one, row) for row, one in enumerate(asked)])
        job.infer_ended_ns = perf_counter_ns()
        job.respond(self._packer(job, asked).response(results))

    async def _whole_row(self, job: InferJob, asked: Asked, row: int) -> Result:
        summary = RowSummary(asked, row)
        texts: list[str] = []
        token_ids: list[int] = []
        async with aclosing(self._events(job, asked)) as events:
            async for event in events:
                if not job.compute_started_ns:
                    _leave_queue(job)
                summary.note(event)
                if isinstance(event, TokenPiece):
                    token_ids += event.token_ids
                else:
                    texts.append(event.text)
        result = summary.result(event)
        if isinstance(asked.prompt, str):
            return {"text_output": [(asked.prompt + "".join(texts)).encode()]} | result
        return tokens_result([*asked.prompt, *token_ids]) | result

    def _events(self, job: InferJob, asked: Asked) -> AsyncGenerator[TextEvent, None]:
        record = self._open_record(self.name, job.request.protocol)
        if asked.is_tokens:
            return recorded(generate_tokens(self._text, asked.request, asked.stop, asked.bad), record)
        return recorded(self._text.generate(asked.request), record)

    def _packer(self, job: InferJob, asked: Sequence[Asked]) -> Packer:
        ends = self._defaults.eos_token_ids
        pads = (one.pad_id for one in asked if one.pad_id is not None)
        pad_id = next(pads, ends[0] if ends else 0)
        return Packer(self.spec, job.request.requested_outputs, len(asked), pad_id)


@text_model_of.register
def _(model: LlmModel) -> LlmText:
    return model.text


def llm_text_of(model: Model) -> LlmText | None:
    """Return the text side of a language model of our own; None for any other model."""
    return model.text if isinstance(model, LlmModel) else None


def _as_known(declared: dict[str, Input], known: dict[str, Input]) -> dict[str, Input]:
    """What each declared input means at this model's engine. `stop` may be declared as another input of that name."""
    return {name: known[name] if each.field == known[name].field else each for name, each in declared.items()}


def _eos_token_ids(text: LlmText) -> tuple[int, ...]:
    """Those that end a text here: the model's, then the one that only its tokenizer knows."""
    known, of_tokenizer = text.info.eos_token_ids, text.tokenizer.eos_token_id
    return known if of_tokenizer is None or of_tokenizer in known else (*known, of_tokenizer)


def _check_wanted(request: InferRequest, asked: Asked) -> None:
    """Raise INVALID where an output is wanted that belongs to the other face."""
    others = {"text_output"} if asked.is_tokens else {"output_ids", "sequence_length"}
    for name in request.requested_outputs:
        if name in others:
            given = next(name for name in PROMPTS if name in request.inputs or name in request.parameters)
            raise invalid(name, f"{request.log_prefix}output '{name}' does not go with input '{given}'")


def _leave_queue(job: InferJob) -> None:
    """Until its first token a request counts as queued: when its prefill begins, only the engine knows."""
    job.compute_started_ns = job.infer_started_ns = perf_counter_ns()


def _piece(event: TextEvent) -> Result:
    if isinstance(event, TokenPiece):
        return tokens_result(event.token_ids)
    return {"text_output": [event.text.encode()]}
