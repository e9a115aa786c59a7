"""Who pays for timelines: requests that may make a language model generate, and no others."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from sluice.gateway.front.http.guard import RequestTracing
from sluice.gateway.telemetry.tracer import Tracer
from sluice.pipelines.text.model import may_generate
from sluice.pipelines.text.tensor_model import INPUT_KEY, OUTPUT_KEY
from sluice.record.spans import Span, TimelineRing, current_span
from sluice.serving.job import InferJob
from sluice.serving.model import Model
from sluice.serving.request import InferResponse
from sluice.serving.tensors.tensor import Tensor
from tests.gateway.api.v2.grpc.parts import FunctionModel, Running, infer_request, serving
from tests.gateway.api.v2.small_service import SmallService

Ask = Callable[..., Awaitable[None]]


class NotingModel(FunctionModel):
    """Notes the span of each job, and answers with a number where its output is one."""

    def __init__(self, name: str, datatype: str = "INT32", *, is_decoupled: bool = False) -> None:
        super().__init__(name, self._answer, datatype=datatype, dims=(1,), is_decoupled=is_decoupled)
        self.spans: list[Span | None] = []

    def _answer(self, job: InferJob) -> None:
        self.spans.append(job.span)
        job.respond(InferResponse([Tensor.of("OUTPUT0", job.request.inputs["INPUT0"].array)]))


class StepsModel(NotingModel):
    """An ensemble whose only step is another model."""

    def __init__(self, step: Model) -> None:
        super().__init__("steps")
        self._step = step

    @property
    def step_models(self) -> list[Model]:
        return [self._step]


class TextModelByConfig(NotingModel):
    """Takes and gives text, by the names that its configuration gives."""

    def __init__(self) -> None:
        super().__init__("text", "BYTES")
        self.config.parameters[INPUT_KEY].string_value = "INPUT0"
        self.config.parameters[OUTPUT_KEY].string_value = "OUTPUT0"


async def ask_on_stream(running: Running, *models: Model) -> None:
    requests = iter([asked_of(model) for model in models])
    for message in [each async for each in running.stub.ModelStreamInfer(requests)]:
        assert message.error_message == ""


async def ask_once(running: Running, *models: Model) -> None:
    for model in models:
        await running.stub.ModelInfer(asked_of(model))


def asked_of(model: Model) -> Any:
    request = infer_request(model.name, 1)
    if isinstance(model, TextModelByConfig):
        request.inputs[0].datatype = "BYTES"
        request.raw_input_contents[0] = b"\x02\0\0\0Hi"
    return request


def with_timelines(*models: Model) -> SmallService:
    service = SmallService(*models)
    service.tracer = Tracer(TimelineRing(8))
    return service


@pytest.mark.parametrize(
    "make",
    [
        lambda: NotingModel("plain"),
        lambda: NotingModel("many", is_decoupled=True),
        lambda: StepsModel(NotingModel("step")),
    ],
    ids=["plain", "decoupled", "ensemble"],
)
async def test_a_streams_request_that_generates_nothing_is_not_recorded(make: Callable[[], NotingModel]) -> None:
    """Nor is one behind a request that is recorded."""
    model, text = make(), TextModelByConfig()
    async with serving(with_timelines(model, text)) as running:
        await ask_on_stream(running, text, model)
    assert model.spans == [None] and text.spans != [None]


async def test_a_unary_request_that_is_too_long_to_be_answered_directly_is_not_recorded() -> None:
    found: list[Span | None] = []

    def note(job: InferJob) -> None:
        found.append(current_span.get())
        job.respond(InferResponse())

    async with serving(with_timelines(FunctionModel("long", note))) as running:
        await running.stub.ModelInfer(infer_request("long", *range(200_000)))
    assert found == [None]


@pytest.mark.parametrize("ask", [ask_on_stream, ask_once], ids=["stream", "unary"])
async def test_a_request_to_a_model_of_text_is_recorded(ask: Ask) -> None:
    model = TextModelByConfig()
    async with serving(with_timelines(model)) as running:
        await ask(running, model)
    [span] = model.spans
    assert span is not None and span.parent is not None and span.parent.ended_ns


async def test_an_ensemble_may_generate_where_a_step_may() -> None:
    assert may_generate(StepsModel(TextModelByConfig()))
    assert not may_generate(StepsModel(NotingModel("step")))


async def test_a_model_that_has_asked_another_one_is_recorded_from_then_on() -> None:
    model = NotingModel("asking")
    async with serving(with_timelines(model)) as running:
        await ask_on_stream(running, model)
        model.calls_models = True
        await ask_on_stream(running, model)
    assert [each is None for each in model.spans] == [True, False]


@pytest.mark.parametrize(
    ("path", "is_recorded"),
    [
        ("/v2/models/plain/generate_stream", False),
        ("/v2/models/plain/versions/1/infer", False),
        ("/v2/models/nope/generate", False),
        ("/v1/embeddings", False),
        ("/v2/models/text/generate_stream", True),
        ("/v1/chat/completions", True),
    ],
)
async def test_requests_over_http_are_recorded_by_the_same_rule(path: str, is_recorded: bool) -> None:
    service = with_timelines(NotingModel("plain"), TextModelByConfig())
    tracing = RequestTracing(service.tracer, service.repository.versions)
    assert (tracing.open("POST", path, "", "a") is not None) is is_recorded
    current_span.set(None)
