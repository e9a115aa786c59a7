"""The one way from a request for text to its answer. Every protocol takes it, with a translator of its own words."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from sluice.engine.client.stream import Consumer
from sluice.engine.sampling_fields import SAMPLING_FIELDS
from sluice.errors import SluiceError, invalid
from sluice.gateway.api.fields import CACHE_HEADER, CONVERSIONS, cache_header
from sluice.gateway.front.http.errors import client_names
from sluice.gateway.front.http.openapi import describe_body
from sluice.gateway.front.http.parsing import (
    RequestObject,
    read_body,
    refuse_without_effect,
    relaxed_parts,
    warning_header,
)
from sluice.gateway.front.http.request import get_request_id, parse_scheduling, run_while_connected
from sluice.gateway.front.http.sse import EventStreamResponse, GenerateFrames
from sluice.gateway.front.long_work import breathe, run_aside
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.plane.data_plane import Plane
from sluice.pipelines.chat.formats import parse_tools, tools_to_compile
from sluice.pipelines.llm.chat_answers import conversation_tools
from sluice.pipelines.text.model import UNCOUNTED_IMAGES, TextModel, refuse_images
from sluice.pipelines.text.sampling import drop_random_seed
from sluice.pipelines.text.stream import Called, Generate, Mapped, give, salted_form, sent_prompt, share_request
from sluice.pipelines.text.types import (
    OWNER_KEY,
    OWNER_KEY_HEADER,
    CacheMiss,
    ChatReader,
    Conversation,
    EncodedPrompt,
    SamplingOverrides,
    TextEvent,
    TextRequest,
)
from sluice.serving.task_model import gather_all

T = TypeVar("T")
FieldsT = TypeVar("FieldsT", bound=RequestObject)
OnMiss = Callable[[CacheMiss], object]
"""Hears why tokens of a session's prompt were computed again."""
STARTS_PER_TURN = 16
"""Sequences of one request that are submitted in one turn of the event loop."""
_SCHEMA_FIELDS = frozenset(
    {
        *("tools", "functions", "response_format", "structured_outputs", "guided_json", "structural_tag"),
        *("text", "output_config", "output_format", "format", "sampling_params"),
    }
)
"""Fields of all protocols that have schemas."""
_PIECE_S = 0.002
"""Time after which rewriting schemas pauses. Those that are known take none."""
_MANY_VALUES = 512
"""Number of values in schemas from which rewriting them takes a few milliseconds."""


class Reply(ABC):
    """Formats one answer: streamed, as frames of its events, or whole, as one object."""

    @abstractmethod
    def frame(self, index: int, event: TextEvent) -> bytes:
        """Return the frames of an event of text `index`."""

    async def closing(self) -> bytes:
        """Return the frames that follow the last event of the last text."""
        return b""

    def failed(self, error: Exception) -> bytes | None:
        """Return the frames of a failure that an answer can end in; None where the stream breaks off."""
        return None

    @abstractmethod
    def collector(self, index: int) -> Callable[[TextEvent], object]:
        """Return what adds an event of text `index` to the whole answer."""

    @abstractmethod
    async def whole(self) -> bytes:
        """Return the answer as one object, once all events are collected."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The texts of one answer, side by side for each of `num_prompts` prompts, and what formats them.

    `param_names` maps the names that models use in their errors to the client's.
    """

    texts: Sequence[Generate]
    reply: Reply
    num_prompts: int = 1
    param_names: Mapping[str, str] = field(default_factory=dict)

    async def stream(self, consumer: Consumer[bytes]) -> None:
        """Push the frames of the answer. The first failure ends all its texts."""
        await self.stream_texts(consumer)
        if closing := await self.reply.closing():
            await give(consumer, closing)

    async def stream_texts(self, consumer: Consumer[bytes]) -> None:
        """Push the frames but for those that close the stream."""
        try:
            await self._generate(lambda index: Mapped(partial(self.reply.frame, index), consumer))
        except Exception as error:
            if (failed := self.reply.failed(error)) is None:
                raise
            await give(consumer, failed)

    async def whole(self, on_miss: OnMiss | None = None) -> bytes:
        """Return the whole answer. The first failure ends all its texts. `on_miss` hears why tokens of its prompt were
        computed again."""
        await self._generate(lambda index: Called(self._collector(index, on_miss)))
        return await self.reply.whole()

    def _collector(self, index: int, on_miss: OnMiss | None) -> Callable[[TextEvent], object]:
        collect = self.reply.collector(index)
        if on_miss is None:
            return collect

        def collect_miss(event: TextEvent) -> None:
            if event.detail is not None and event.detail.cache_miss is not None:
                on_miss(event.detail.cache_miss)
            collect(event)

        return collect_miss

    async def _generate(self, consumer_of: Callable[[int], Consumer[TextEvent]]) -> None:
        per_prompt = len(self.texts) // self.num_prompts
        with client_names(self.param_names), share_request(self.num_prompts, len(self.texts)) as begin:

            async def run(index: int, generate: Generate) -> None:
                begin(index // per_prompt)
                # Others are served before a request of hundreds of texts has submitted all of them: one takes 0.2 ms.
                for _ in range(index // STARTS_PER_TURN):
                    await asyncio.sleep(0)
                await generate(consumer_of(index))

            await gather_all([run(*each) for each in enumerate(self.texts)])


class Translator(ABC, Generic[FieldsT]):
    """One request for text, and its answer, in the words of a protocol. `Answering` calls the methods in their order.

    Every method raises SluiceError for what the client must change.
    """

    protocol: ClassVar[str]
    """The label of the answer in metrics."""
    stream_type: ClassVar[type[EventStreamResponse]] = EventStreamResponse

    def __init__(self, fields: FieldsT, request: Request) -> None:
        self.fields = fields
        self.request_id = get_request_id(request)
        self.param_names: Mapping[str, str] = {}
        """The client's names of fields that models name otherwise in their errors."""
        self.num_prompts = 1

    @property
    @abstractmethod
    def model_name(self) -> str:
        """The model that the body names."""

    @property
    def model_key(self) -> str:
        """The text that chooses among a model's versions where no header has one."""
        return ""

    def find_model(self, plane: Plane, key: str) -> TextModel:
        """Return the model that answers. `key` is the text that a header has to choose among its versions, "" for
        none. Raises as `Plane.llm`."""
        return plane.llm(self.model_name, key or self.model_key)

    async def prepare(self, model: TextModel) -> Response | None:
        """Do what parsing needs and has to wait for. Returns the answer where there is nothing to generate."""
        return None

    @property
    def priority(self) -> int | None:
        """The priority that the body asks for."""
        return None

    @property
    def session(self) -> str | None:
        """The session that the body names."""
        return None

    @abstractmethod
    def parse(self, base: TextRequest) -> list[TextRequest]:
        """Return a request for each text, those of one prompt side by side. `base` has what all protocols read alike:
        id, protocol and scheduling. A thread calls it where the fields have long schemas."""

    def check(self, model: TextModel, readers: Sequence[ChatReader]) -> None:
        """Raise INVALID for what `model` cannot do."""

    def with_place(self, miss: CacheMiss) -> CacheMiss:
        """Return why tokens were computed again with the place that changed as the client names it."""
        return miss

    def without_effect(self, model: TextModel, request: TextRequest) -> list[str]:
        """Return the paths of the fields that change nothing with this model."""
        return []

    @abstractmethod
    def reply(self, model: TextModel, readers: Sequence[ChatReader]) -> Reply:
        """Return what formats the answer. `readers` find the parts of each text; empty where it is text alone."""

    @property
    @abstractmethod
    def is_streamed(self) -> bool: ...

    @staticmethod
    @abstractmethod
    def encode_error(error: SluiceError) -> bytes:
        """Return the last frame of a stream that failed."""

    async def detach(self, answer: Answer) -> GenerateFrames | bytes | None:
        """Have the answer generated apart from the client's connection, where it wishes so, and return what it gets
        meanwhile: frames, or a body."""
        return None


Translate = Callable[[FieldsT, Request], Translator[Any]]
"""Makes the translator of a request from its body's fields."""


class Answering:
    """Answers requests for text from one data plane."""

    def __init__(self, plane: Plane, config: ServeConfig) -> None:
        self._plane = plane
        self._options = config.http
        self._defaults = config.requests

    def serve(
        self, api: APIRouter, path: str, name: str, about: str, schema: type[FieldsT], translate: Translate[FieldsT]
    ) -> None:
        """Add the route `path` to `api`, which answers bodies of the `schema`. Its `name`, and what there is to say
        `about` it, are for its documentation."""

        async def answer(request: Request) -> Response:
            return await self.answer(request, schema, translate)

        api.post(path, name=name, description=about, openapi_extra=describe_body(schema))(answer)

    async def answer(self, request: Request, schema: type[FieldsT], translate: Translate[FieldsT]) -> Response:
        """Generate the answer. Raises SluiceError for a refusal and for a failure before its first byte."""
        fields, ignored = await read_body(request, schema, self._options)
        translator = translate(fields, request)
        scheduling = parse_scheduling(request.headers, self._defaults)
        model = translator.find_model(self._plane, scheduling.sticky_key)
        with client_names(translator.param_names):
            ready = await translator.prepare(model)
        if ready is not None:
            for name, value in warning_header(ignored).items():
                ready.headers[name] = "; ".join([value, *ready.headers.getlist(name)])
            return ready
        queued = scheduling.fields(translator.priority, session=translator.session)
        base = TextRequest(request_id=translator.request_id, prompt="", protocol=translator.protocol, **queued)
        requests = await parse_with_schemas(fields, partial(translator.parse, base), lambda parsed: parsed[0])
        with client_names(translator.param_names):
            requests = adapt_requests(requests, model)
            readers = [reader for each in requests if (reader := model.chat_reader(each)) is not None]
        headers = self._warnings(ignored, requests[0], readers, translator.without_effect(model, requests[0]))
        translator.check(model, readers)
        answer = Answer(
            [self._plane.generate(model, each) for each in await _complete(request, model, requests, translator)],
            translator.reply(model, readers),
            translator.num_prompts,
            translator.param_names,
        )
        detached = await translator.detach(answer)
        if isinstance(detached, bytes):
            return _json(detached, headers)
        if detached is not None or translator.is_streamed:
            stream_type, frames = translator.stream_type, detached or answer.stream
            keep_alive_s = self._options.sse_keep_alive_s if stream_type.keep_alive_frame else 0.0
            return stream_type(frames, translator.encode_error, headers, keep_alive_s=keep_alive_s)
        misses: list[CacheMiss] = []
        body = await run_while_connected(request.receive, answer.whole(misses.append if base.session else None))
        if misses:
            headers[CACHE_HEADER] = cache_header(translator.with_place(misses[0]))
        return _json(body, headers)

    def _warnings(
        self, ignored: Sequence[str], request: TextRequest, readers: Sequence[ChatReader], without_effect: Sequence[str]
    ) -> dict[str, str]:
        """Return the header that warns the client. Raises INVALID instead where the server is strict."""
        if self._options.is_strict:
            refuse_without_effect(without_effect, _adapted(request))
        return warn_of(request, readers, without_effect, ignored)


def warn_of(
    request: TextRequest,
    readers: Sequence[ChatReader],
    without_effect: Sequence[str],
    ignored: Sequence[str] = (),
) -> dict[str, str]:
    """Return the header that warns the client of a request."""
    grammar = request.sampling.get("grammar")
    relaxed = [] if grammar is None else relaxed_parts(grammar)
    relaxed += readers[0].relaxed if readers else ()
    return warning_header(ignored, relaxed, without_effect, _adapted(request))


def _adapted(request: TextRequest) -> Sequence[str]:
    prompt = sent_prompt(request.prompt)
    return prompt.notes if isinstance(prompt, Conversation) else ()


def adapt_requests(requests: list[TextRequest], model: TextModel) -> list[TextRequest]:
    """Return requests whose conversations are as the model takes them. Raises INVALID for one that it cannot take."""
    prompt = requests[0].prompt
    if not isinstance(prompt, Conversation) or (adapted := model.adapt(prompt)) is prompt:
        return requests
    return [
        msgspec.structs.replace(each, prompt=adapted if each.prompt is prompt else each.prompt) for each in requests
    ]


async def _complete(
    request: Request, model: TextModel, requests: Sequence[TextRequest], translator: Translator[Any]
) -> Sequence[TextRequest]:
    """Return the requests with the key to the collection that a pipeline looks into, and with each prompt prepared once
    for all its texts."""
    key = request.headers.get(OWNER_KEY_HEADER)
    if key and model.takes_parameters:  # a language model alone has no collection to open
        requests = [msgspec.structs.replace(each, parameters={**each.parameters, OWNER_KEY: key}) for each in requests]
    per_prompt = len(requests) // translator.num_prompts
    if per_prompt == 1:
        return requests
    prompts = [await model.prepare_shared(first.prompt, salted_form(first)) for first in requests[::per_prompt]]
    return [msgspec.structs.replace(each, prompt=prompts[i // per_prompt]) for i, each in enumerate(requests)]


def _json(body: bytes, headers: Mapping[str, str]) -> Response:
    return Response(body, headers=headers, media_type="application/json")


async def count_prompt(model: TextModel, conversation: Conversation, param_names: Mapping[str, str]) -> int:
    """Return the number of tokens of a conversation's prompt. Raises INVALID where the model cannot count them."""
    with client_names(param_names):
        conversation = model.adapt(conversation)
        refuse_images(conversation, UNCOUNTED_IMAGES)
        prompt = await model.prepare_shared(conversation)
    if not isinstance(prompt, EncodedPrompt):
        reason = "a pipeline, which adds what it retrieves to the prompt; name a language model"
        raise invalid("model", f"model '{model.name}' is {reason}")
    return len(prompt.token_ids)


async def parse_with_schemas(fields: BaseModel, parse: Callable[[], T], request_of: Callable[[T], TextRequest]) -> T:
    """Return what `parse` returns. Where the fields have long schemas it runs aside, and those are rewritten there, for
    all that asks for the tools and the warnings of the parsed request later. So are those that have to be compiled."""
    sent = _SCHEMA_FIELDS & fields.model_fields_set
    if not sent:
        return parse()
    if _has_many_values([getattr(fields, name) for name in sent]):
        parsed = await run_aside(partial(_parse_in_pieces, parse, request_of))
        tools = await run_aside(partial(tools_to_compile, conversation_tools(request_of(parsed))))
    else:
        parsed = parse()
        tools = tools_to_compile(conversation_tools(request_of(parsed)))
    for tool in tools:
        with suppress(SluiceError):  # it is raised in the protocol's words where the tools are asked for
            await run_aside(partial(parse_tools, [tool]))
    return parsed


def _parse_in_pieces(parse: Callable[[], T], request_of: Callable[[T], TextRequest]) -> T:
    parsed = parse()
    request = request_of(parsed)
    if (grammar := request.sampling.get("grammar")) is not None:
        relaxed_parts(grammar)
    began = time.perf_counter()
    for tool in conversation_tools(request):
        if time.perf_counter() - began > _PIECE_S:
            breathe()
            began = time.perf_counter()
        tools_to_compile([tool])
    return parsed


def _has_many_values(sent: Any, most: int = _MANY_VALUES) -> bool:
    """Whether there are more values within a value than can be looked at on the event loop."""
    pending, num_found = [sent], 0
    while pending:
        value = pending.pop()
        if isinstance(value, BaseModel):
            value = value.__dict__
        if isinstance(value, dict | list):
            num_found += len(value)
            if num_found > most:
                return True
            pending.extend(value.values() if isinstance(value, dict) else value)
    return False


def read_sampling(fields: Any, **others: Any) -> SamplingOverrides:
    """Return the sampling fields of OpenAI's that a body has, and `others` that are not None, by the engine's names and
    in its types."""
    sent = {name: getattr(fields, name) for name, field in SAMPLING_FIELDS.items() if field.is_in_openai} | others
    found = drop_random_seed({name: value for name, value in sent.items() if value is not None})
    for name, convert in CONVERSIONS.items():
        if name in found:
            found[name] = convert(found[name])
    return found


def stop_strings(sent: str | list[str] | None) -> tuple[str, ...]:
    """Return the stop strings of a field that has one, several or none."""
    return (sent,) if isinstance(sent, str) else tuple(sent or ())
