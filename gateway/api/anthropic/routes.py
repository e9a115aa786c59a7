"""Anthropic's API: messages and the count of their tokens, from request to HTTP answer."""

from functools import partial

from fastapi import APIRouter, Request, Response

from sluice.engine.client.stream import Consumer
from sluice.errors import invalid
from sluice.gateway.api.anthropic.messages import (
    PARAM_NAMES,
    PROTOCOL,
    MessageReply,
    error_frame,
    parse_conversation,
    parse_messages_request,
)
from sluice.gateway.api.anthropic.parts import BlocksReply
from sluice.gateway.api.anthropic.schemas import CountTokensRequest, MessagesRequest
from sluice.gateway.api.tools import parse_with_schemas
from sluice.gateway.front.http.bodies import json_response, read_body, read_fields
from sluice.gateway.front.http.errors import client_names
from sluice.gateway.front.http.openapi import describe_body
from sluice.gateway.front.http.parsing import relaxed_parts, warning_header
from sluice.gateway.front.http.request import get_request_id, parse_scheduling, run_while_connected
from sluice.gateway.front.http.sse import EventStreamResponse, event_frame
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.plane.data_plane import Plane
from sluice.pipelines.text.consumers import Called, Generate, Mapped
from sluice.pipelines.text.model import UNCOUNTED_IMAGES, TextModel, refuse_images
from sluice.pipelines.text.parts import ChatReader
from sluice.pipelines.text.types import EncodedPrompt, TextEvent, TextRequest


def router(plane: Plane, config: ServeConfig) -> APIRouter:
    """Return the routes under /v1/messages, which answer from `plane`."""
    routes = AnthropicRoutes(plane, config)
    api = APIRouter(prefix="/v1/messages", tags=["Anthropic"], default_response_class=Response)
    api.post("", openapi_extra=describe_body(MessagesRequest))(routes.messages)
    api.post("/count_tokens", openapi_extra=describe_body(CountTokensRequest))(routes.count_tokens)
    return api


class AnthropicRoutes:
    """Handlers of Anthropic's API over one data plane."""

    def __init__(self, plane: Plane, config: ServeConfig) -> None:
        self._plane = plane
        self._options = config.http
        self._defaults = config.requests

    async def messages(self, request: Request) -> Response:
        """Answer a conversation. Raises SluiceError for a refusal and for a failure before its first byte."""
        fields, ignored = await read_body(request, MessagesRequest, self._options)
        request_id = get_request_id(request)
        scheduling = parse_scheduling(request.headers, self._defaults)
        queued = scheduling.fields(
            fields.priority, session=None if fields.metadata is None else fields.metadata.user_id
        )
        base = TextRequest(request_id=request_id, prompt="", protocol=PROTOCOL, **queued)
        work = partial(parse_messages_request, fields, base)
        text_request = await parse_with_schemas(fields, work, lambda parsed: parsed)
        model = self._plane.llm(fields.model, scheduling.sticky_key)
        grammar, reader = text_request.sampling.get("grammar"), _reader(model, fields, text_request)
        relaxed = [] if grammar is None else relaxed_parts(grammar)
        headers = warning_header(ignored, [*relaxed, *(reader.relaxed if reader is not None else ())])
        reply = MessageReply(request_id, model.name) if reader is None else BlocksReply(request_id, model.name, reader)
        generate = self._plane.generate(model, text_request)
        if fields.stream:
            frames = partial(_stream_frames, generate, reply)
            return MessageStreamResponse(frames, error_frame, headers, keep_alive_s=self._options.sse_keep_alive_s)
        body = await run_while_connected(request.receive, _collect(generate, reply))
        return Response(body, headers=headers, media_type="application/json")

    async def count_tokens(self, request: Request) -> Response:
        """Count the tokens of a conversation's prompt."""
        fields, headers = await read_fields(request, CountTokensRequest, self._options)
        conversation, _ = parse_conversation(fields)
        refuse_images(conversation, UNCOUNTED_IMAGES)
        model = self._plane.llm(fields.model)
        _reader(model, fields, TextRequest(request_id="", prompt=conversation))
        with client_names(PARAM_NAMES):
            prompt = await model.prepare_shared(conversation)
        if not isinstance(prompt, EncodedPrompt):
            reason = "a pipeline, which adds what it retrieves to the prompt; name a language model"
            raise invalid("model", f"model '{model.name}' is {reason}")
        return json_response({"input_tokens": len(prompt.token_ids)}, headers=headers)


class MessageStreamResponse(EventStreamResponse):
    """Streams messages; what keeps the connection alive is Anthropic's own event."""

    keep_alive_frame = event_frame({"type": "ping"}, "ping")


async def _stream_frames(generate: Generate, reply: MessageReply, consumer: Consumer[bytes]) -> None:
    with client_names(PARAM_NAMES):
        await generate(Mapped(reply.frame, consumer))


async def _collect(generate: Generate, reply: MessageReply) -> bytes:
    events: list[TextEvent] = []
    with client_names(PARAM_NAMES):
        await generate(Called(events.append))
    return reply.whole(events)


def _reader(model: TextModel, fields: CountTokensRequest, request: TextRequest) -> ChatReader | None:
    """Return the reader of the answer, None for one of text alone. Raises INVALID where the model cannot do what the
    client asks for."""
    reader = model.chat_reader(request)
    is_on = fields.thinking is not None and fields.thinking.type == "enabled"
    if is_on and not (reader is not None and reader.finds_reasoning):
        reason = f"model '{model.name}' does not reason"
        raise invalid("thinking.type", f"thinking.type must be 'disabled' or 'adaptive', got 'enabled': {reason}")
    return reader
