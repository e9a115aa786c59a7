"""Ollama's API: the routes of answers and embeddings."""

import time
from functools import partial

from fastapi import APIRouter, Request, Response

from sluice.gateway.api.ollama import models
from sluice.gateway.api.ollama.requests import OllamaChatTranslator, OllamaGenerateTranslator
from sluice.gateway.api.ollama.schemas import EmbedRequest, OldEmbedRequest, OllamaChatRequest, OllamaGenerateRequest
from sluice.gateway.api.translators import Answering
from sluice.gateway.calls import admit_prompt, note_prompt
from sluice.gateway.front.http.bodies import dump_list, json_response, read_fields
from sluice.gateway.front.http.errors import TIMEOUT_HEADER
from sluice.gateway.front.http.openapi import describe_body
from sluice.gateway.front.http.request import run_in_time
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.plane.data_plane import Plane
from sluice.pipelines.encoding.encoder import TO_THE_MODEL
from sluice.pipelines.routes.encoder import Embedder


def router(plane: Plane, config: ServeConfig, answering: Answering) -> APIRouter:
    """Return the routes under /api, which answer from `plane`."""
    api = APIRouter(prefix="/api", tags=["Ollama"], default_response_class=Response)

    def find_encoder(name: str) -> Embedder:
        return plane.embedder(models.repository_name(plane, name))

    chat, generate = partial(OllamaChatTranslator, plane=plane), partial(OllamaGenerateTranslator, plane=plane)
    answering.serve(api, "/chat", "chat", "Answer a conversation.", OllamaChatRequest, chat)
    about = "Continue a text, or answer one question."
    answering.serve(api, "/generate", "generate", about, OllamaGenerateRequest, generate)

    @api.post("/embed", openapi_extra=describe_body(EmbedRequest, (TIMEOUT_HEADER,)))
    async def embed(request: Request) -> Response:
        """Encode one text or several as vectors of length 1."""
        began_ns = time.perf_counter_ns()
        fields, headers = await read_fields(request, EmbedRequest, config.http)
        encoder = find_encoder(fields.model)
        if not fields.input:
            return json_response({"model": fields.model, "embeddings": []}, headers=headers)
        inputs = [fields.input] if isinstance(fields.input, str) else fields.input
        body = await run_in_time(request, config.requests, _embed(encoder, inputs, fields, began_ns))
        return Response(body, headers=headers, media_type="application/json")

    @api.post("/embeddings", openapi_extra=describe_body(OldEmbedRequest, (TIMEOUT_HEADER,)))
    async def embeddings(request: Request) -> Response:
        """Encode one text as a vector of length 1, in the shape before /api/embed."""
        fields, headers = await read_fields(request, OldEmbedRequest, config.http)
        encoder = find_encoder(fields.model)
        if not fields.prompt:
            return json_response({"embedding": []}, headers=headers)
        work = encoder.embed([fields.prompt], lambda _: "prompt", truncate_to=TO_THE_MODEL, admit=admit_prompt)
        found = await run_in_time(request, config.requests, work)
        note_prompt(found.num_tokens)
        return json_response({"embedding": found.vectors[0].tolist()}, headers=headers)

    api.include_router(models.router(plane, config))
    return api


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
