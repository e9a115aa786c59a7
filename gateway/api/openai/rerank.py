"""`POST /v1/rerank`, `/v2/rerank` and `/v1/score`: how well passages answer a question, by rerankers and encoders."""

import time
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Discriminator, Field, Tag

from sluice.errors import invalid
from sluice.gateway.api.openai.embeddings import MAX_INPUTS, Texts
from sluice.gateway.api.openai.schemas import MAX_MODEL_CHARS
from sluice.gateway.calls import note_prompt
from sluice.gateway.front.http.bodies import dump_list, read_fields
from sluice.gateway.front.http.errors import COHERE_RERANK, TIMEOUT_HEADER
from sluice.gateway.front.http.openapi import describe_body
from sluice.gateway.front.http.parsing import RequestObject, text_or_list, text_or_object, union_error
from sluice.gateway.front.http.request import get_request_id, run_in_time
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.plane.data_plane import Plane
from sluice.pipelines.encoding.reranker import EncoderReranker, LlmReranker, ModelReranker

_CHARS_PER_ELEMENT = 16
AnyReranker = ModelReranker | EncoderReranker | LlmReranker


class TextDocument(RequestObject):
    """A passage as an object."""

    text: str


Passage = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[TextDocument, Tag("<object>")],
    Discriminator(text_or_object, **union_error('a string or an object {"text": ...}')),
]

OneOrMore = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[Texts, Tag("<list>")],
    Discriminator(text_or_list, **union_error("a string or an array of strings")),
]


class RerankRequest(RequestObject):
    """`POST /v1/rerank`, in Jina's and Cohere's shapes."""

    example = '{"model": "sentence_encoder", "query": "How is memory shared?", "documents": ["By prefix.", "Rarely."]}'
    model: str = Field(max_length=MAX_MODEL_CHARS, description="A reranker, or an encoder whose vectors are compared.")
    query: str = Field(min_length=1)
    documents: list[Passage] = Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)
    top_n: int | None = Field(None, ge=0, description="Most results, best first; absent or 0: all.")
    return_documents: bool | None = Field(
        None, description="Whether results have their texts: by default all but those of /v2/rerank."
    )


class ScoreRequest(RequestObject):
    """`POST /v1/score`, in vLLM's shape."""

    example = '{"model": "sentence_encoder", "text_1": "How is memory shared?", "text_2": ["By prefix.", "Rarely."]}'
    model: str = Field(max_length=MAX_MODEL_CHARS, description="A reranker, or an encoder whose vectors are compared.")
    text_1: OneOrMore = Field(description="A question for all of text_2, or one for each.")
    text_2: OneOrMore


def router(plane: Plane, config: ServeConfig) -> APIRouter:
    """Return the routes, which answer from `plane`."""
    routes = RerankRoutes(plane, config)
    api = APIRouter(tags=["OpenAI"], default_response_class=Response)
    reranked, scored = (describe_body(schema, (TIMEOUT_HEADER,)) for schema in (RerankRequest, ScoreRequest))
    for path in ("/rerank", "/v1/rerank", COHERE_RERANK):
        api.post(path, openapi_extra=reranked)(routes.rerank)
    for path in ("/score", "/v1/score"):
        api.post(path, openapi_extra=scored)(routes.score)
    return api


class RerankRoutes:
    """Handlers of the routes over one data plane."""

    def __init__(self, plane: Plane, config: ServeConfig) -> None:
        self._plane = plane
        self._options = config.http
        self._defaults = config.requests

    async def rerank(self, request: Request) -> Response:
        """Sort documents by how well they answer a question."""
        fields, headers = await read_fields(request, RerankRequest, self._options)
        model = await self._plane.encoding.reranker(fields.model)
        is_second = request.url.path == COHERE_RERANK
        shows = fields.return_documents if fields.return_documents is not None else not is_second
        head = {
            "id": f"rerank-{get_request_id(request)}",
            "model": fields.model,
            "meta": {"api_version": {"version": "2" if is_second else "1"}},
        }
        body = await run_in_time(request, self._defaults, _rerank(model, fields, head, shows=shows))
        return Response(body, headers=headers, media_type="application/json")

    async def score(self, request: Request) -> Response:
        """Score pairs of texts."""
        fields, headers = await read_fields(request, ScoreRequest, self._options)
        model = await self._plane.encoding.reranker(fields.model)
        head = {
            "id": f"score-{get_request_id(request)}",
            "object": "list",
            "created": int(time.time()),
            "model": fields.model,
        }
        body = await run_in_time(request, self._defaults, _score(model, fields, head))
        return Response(body, headers=headers, media_type="application/json")


async def _rerank(model: AnyReranker, fields: RerankRequest, head: dict[str, Any], *, shows: bool) -> bytes:
    texts = [each if isinstance(each, str) else each.text for each in fields.documents]
    found = await model.score(fields.query, texts)
    best = sorted(range(len(texts)), key=lambda index: -found.values[index])[: fields.top_n or None]
    results = (
        {"index": index, "relevance_score": found.values[index]} | (_document(texts[index]) if shows else {})
        for index in best
    )
    num_chars = sum(len(texts[index]) for index in best) if shows else 0
    head = {**head, "usage": _usage(found.num_tokens)}
    return await dump_list(head, "results", results, len(best), len(best) + num_chars // _CHARS_PER_ELEMENT)


async def _score(model: AnyReranker, fields: ScoreRequest, head: dict[str, Any]) -> bytes:
    passages = _as_list(fields.text_2)
    questions = _as_list(fields.text_1)
    if len(questions) == 1:
        questions = questions * len(passages)
    if len(questions) != len(passages):
        message = f"text_1 must have 1 text, or as many as text_2 ({len(passages)}), got {len(questions)}"
        raise invalid("text_1", message)
    values, num_tokens = [0.0] * len(passages), 0
    for question, indices in _group(questions).items():
        found = await model.score(question, [passages[index] for index in indices])
        num_tokens += found.num_tokens
        for index, value in zip(indices, found.values, strict=True):
            values[index] = value
    data = ({"index": index, "object": "score", "score": value} for index, value in enumerate(values))
    return await dump_list({**head, "usage": _usage(num_tokens)}, "data", data, len(values), len(values))


def _document(text: str) -> dict[str, Any]:
    return {"document": {"text": text}}


def _group(texts: Sequence[str]) -> dict[str, list[int]]:
    """Return where each text stands."""
    found: dict[str, list[int]] = {}
    for index, text in enumerate(texts):
        found.setdefault(text, []).append(index)
    return found


def _as_list(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def _usage(num_tokens: int) -> dict[str, int]:
    """Return the usage of an answer, which the call is charged with."""
    note_prompt(num_tokens)
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
