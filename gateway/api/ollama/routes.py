"""Ollama's API: answers and embeddings, from request to HTTP answer."""

import time
from functools import partial
from typing import TypeVar

from fastapi import APIRouter, Request, Response

from sluice.engine.client.stream import Consumer
from sluice.gateway.api.ollama import models
from sluice.gateway.api.ollama.reply import (
    LineStreamResponse,
    OllamaReply,
    Piece,
    PieceReader,
    error_line,
    join_pieces,
)
from sluice.gateway.api.ollama.requests import (
    GenerateMemory,
    asks_to_unload,
    check_images,
    parse_answer_request,
    parse_chat,
    without_effect,
)
from sluice.gateway.api.ollama.schemas import (
    AnswerRequest,
    EmbedRequest,
    OldEmbedRequest,
    OllamaChatRequest,
    OllamaGenerateRequest,
)
from sluice.gateway.api.tools import parse_with_schemas
from sluice.gateway.calls import admit_prompt, note_prompt
from sluice.gateway.front.http.bodies import dump_list, json_response, read_body, read_fields
from sluice.gateway.front.http.errors import TIMEOUT_HEADER
from sluice.gateway.front.http.openapi import describe_body
from sluice.gateway.front.http.parsing import refuse_without_effect, relaxed_parts, warning_header
from sluice.gateway.front.http.request import get_request_id, parse_scheduling, run_in_time, run_while_connected
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.plane.data_plane import Plane
from sluice.pipelines.answers.cache import Embedder
from sluice.pipelines.encoding.encoder import TO_THE_MODEL
from sluice.pipelines.text.consumers import Called, Generate, Mapped, give
from sluice.pipelines.text.model import TextModel
from sluice.pipelines.text.types import Prompt, TextEvent, TextRequest

RequestT = TypeVar("RequestT", bound=AnswerRequest)


def router(plane: Plane, config: ServeConfig) -> APIRouter:
    """Return the routes under /api, which answer from `plane`."""
    routes = OllamaRoutes(plane, config)
    api = APIRouter(prefix="/api", tags=["Ollama"], default_response_class=Response)
    api.post("/chat", openapi_extra=describe_body(OllamaChatRequest))(routes.chat)
    api.post("/generate", openapi_extra=describe_body(OllamaGenerateRequest))(routes.generate)
    api.post("/embed", openapi_extra=describe_body(EmbedRequest, (TIMEOUT_HEADER,)))(routes.embed)
    api.post("/embeddings", openapi_extra=describe_body(OldEmbedRequest, (TIMEOUT_HEADER,)))(routes.embeddings)
    api.include_router(models.router(plane, config))
    return api


class OllamaRoutes:
    """Handlers of Ollama's API over one data plane."""

    def __init__(self, plane: Plane, config: ServeConfig) -> None:
        self._plane = plane
        self._options = config.http
        self._defaults = config.requests

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        fields, ignored = await read_body(request, OllamaChatRequest, self._options)
        model = self._find(request, fields)
        reply = _reply(fields, is_chat=True)
        if not fields.messages:
            return _loaded(fields, reply)
        return await self._answer(request, fields, ignored, model, reply, parse_chat(fields, model), None)

    async def generate(self, request: Request) -> Response:
        """Continue a text, or answer one question."""
        fields, ignored = await read_body(request, OllamaGenerateRequest, self._options)
        model = self._find(request, fields)
        reply = _reply(fields, is_chat=False)
        if not fields.prompt:
            return _loaded(fields, reply)
        check_images(fields)
        if fields.raw or fields.suffix:
            return await self._answer(request, fields, ignored, model, reply, fields.prompt, None)
        memory = GenerateMemory(model, fields)
        return await self._answer(request, fields, ignored, model, reply, await memory.prompt(), memory)

    def _find(self, request: Request, fields: AnswerRequest) -> TextModel:
        key = parse_scheduling(request.headers, self._defaults).sticky_key
        return self._plane.llm(models.repository_name(self._plane, fields.model), key)

    async def _answer(
        self,
        request: Request,
        fields: AnswerRequest,
        ignored: list[str],
        model: TextModel,
        reply: OllamaReply,
        prompt: Prompt,
        memory: GenerateMemory | None,
    ) -> Response:
        """Generate the answer. Raises SluiceError for a refusal and for a failure before its first byte."""
        scheduling = parse_scheduling(request.headers, self._defaults)
        protocol = "ollama_generate" if isinstance(fields, OllamaGenerateRequest) else "ollama_chat"
        request_id = get_request_id(request)
        base = TextRequest(request_id=request_id, prompt=prompt, protocol=protocol, **scheduling.fields(None))
        work = partial(parse_answer_request, fields, base)
        text_request = await parse_with_schemas(fields, work, lambda parsed: parsed)
        reader = model.chat_reader(text_request)
        reply.pieces = None if reader is None else PieceReader(reader, shows_thinking=fields.think is not False)
        grammar = text_request.sampling.get("grammar")
        relaxed = [] if grammar is None else relaxed_parts(grammar)
        unused = without_effect(fields)
        if self._options.is_strict:
            refuse_without_effect(unused)
        headers = warning_header(ignored, [*relaxed, *(reader.relaxed if reader is not None else ())], unused)
        generate = self._plane.generate(model, text_request)
        if fields.stream is not False:
            return LineStreamResponse(partial(_stream_lines, generate, reply, memory), error_line, headers)
        body = await run_while_connected(request.receive, _collect(generate, reply, memory))
        return Response(body, headers=headers, media_type="application/json")

    async def embed(self, request: Request) -> Response:
        """Encode one text or several as vectors of length 1."""
        began_ns = time.perf_counter_ns()
        fields, headers = await read_fields(request, EmbedRequest, self._options)
        encoder = self._encoder(fields.model)
        if not fields.input:
            return json_response({"model": fields.model, "embeddings": []}, headers=headers)
        inputs = [fields.input] if isinstance(fields.input, str) else fields.input
        work = _embed(encoder, inputs, fields, began_ns)
        body = await run_in_time(request, self._defaults, work)
        return Response(body, headers=headers, media_type="application/json")

    async def embeddings(self, request: Request) -> Response:
        """Encode one text as a vector of length 1, in the shape before /api/embed."""
        fields, headers = await read_fields(request, OldEmbedRequest, self._options)
        encoder = self._encoder(fields.model)
        if not fields.prompt:
            return json_response({"embedding": []}, headers=headers)
        work = encoder.embed([fields.prompt], lambda _: "prompt", truncate_to=TO_THE_MODEL, admit=admit_prompt)
        found = await run_in_time(request, self._defaults, work)
        note_prompt(found.num_tokens)
        return json_response({"embedding": found.vectors[0].tolist()}, headers=headers)

    def _encoder(self, name: str) -> Embedder:
        return self._plane.embedder(models.repository_name(self._plane, name))


def _reply(fields: AnswerRequest, *, is_chat: bool) -> OllamaReply:
    num_logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
    return OllamaReply(fields.model, num_logprobs, is_chat=is_chat)


def _loaded(fields: AnswerRequest, reply: OllamaReply) -> Response:
    """Answer a request that asks for no text. One that would unload the model is answered as if it had: the next
    request would load it again, and the model stays for others meanwhile."""
    reason, headers = "load", {}
    if asks_to_unload(fields.keep_alive):
        reason, headers = "unload", warning_header((), (), ["keep_alive"])
    return Response(reply.loaded(reason), headers=headers, media_type="application/json")


async def _stream_lines(
    generate: Generate, reply: OllamaReply, memory: GenerateMemory | None, consumer: Consumer[bytes]
) -> None:
    """Push the lines of an answer. The last event's comes with the end, which has the memory of `/api/generate`."""
    texts: list[str] = []
    end: TextEvent
    last = b""

    def line(event: TextEvent) -> bytes:
        nonlocal end, last
        piece = reply.read(event)
        texts.append(piece.text)
        end, last = event, reply.line(event, piece)
        return last if event.finish_reason is None else b""

    await generate(Mapped(line, consumer))
    context = None if memory is None else await memory.context("".join(texts))
    await give(consumer, last + reply.last_line(end, context))


async def _collect(generate: Generate, reply: OllamaReply, memory: GenerateMemory | None) -> bytes:
    events: list[TextEvent] = []
    pieces: list[Piece] = []

    def collect(event: TextEvent) -> None:
        events.append(event)
        pieces.append(reply.read(event))

    await generate(Called(collect))
    piece = join_pieces(pieces)
    context = None if memory is None else await memory.context(piece.text)
    return reply.whole(events, piece, context)


async def _embed(encoder: Embedder, inputs: list[str], fields: EmbedRequest, began_ns: int) -> bytes:
    is_single = isinstance(fields.input, str)
    found = await encoder.embed(
        inputs,
        lambda index: "input" if is_single else f"input[{index}]",
        truncate_to=None if fields.truncate is False else TO_THE_MODEL,
        dimensions=fields.dimensions,
        admit=admit_prompt,
    )
    note_prompt(found.num_tokens)
    head = {
        "model": fields.model,
        "total_duration": time.perf_counter_ns() - began_ns,
        "load_duration": 0,
        "prompt_eval_count": found.num_tokens,
    }
    return await dump_list(head, "embeddings", found.vectors, len(inputs), found.vectors.size)
