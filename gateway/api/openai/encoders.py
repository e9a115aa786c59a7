"""Routes of encoders, rerankers and classifiers, in the shapes of OpenAI, vLLM, Jina and Cohere."""

import base64
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Annotated, Any, Literal, TypeVar, cast

from fastapi import APIRouter, Request, Response
from pydantic import AfterValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from sluice.errors import invalid
from sluice.gateway.api.openai import decisions
from sluice.gateway.api.openai.schemas import MAX_MODEL_CHARS, UNUSED, TokenIds, prompt_kind
from sluice.gateway.api.translators import Answering
from sluice.gateway.calls import admit_prompt, note_prompt
from sluice.gateway.front.http.bodies import dump_list, read_fields
from sluice.gateway.front.http.errors import COHERE_RERANK, TIMEOUT_HEADER
from sluice.gateway.front.http.openapi import describe_body
from sluice.gateway.front.http.parsing import RequestObject, text_or_list, text_or_object, union_error
from sluice.gateway.front.http.request import get_request_id, run_in_time
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.plane.data_plane import Plane
from sluice.pipelines.encoding import Vector
from sluice.pipelines.encoding.classifier import TextClassifier
from sluice.pipelines.encoding.encoder import DOCUMENT_PREFIX, MATRYOSHKA_DIMENSIONS, QUERY_PREFIX, TO_THE_MODEL
from sluice.pipelines.encoding.reranker import EncoderReranker, LlmReranker, ModelReranker
from sluice.pipelines.encoding.signature import Inputs
from sluice.pipelines.routes.encoder import Embedder

FieldsT = TypeVar("FieldsT", bound=RequestObject)
MAX_INPUTS = 2048
"""Most texts of one request: OpenAI's limit."""
_PREFIXES = {"query": QUERY_PREFIX, "document": DOCUMENT_PREFIX, "passage": DOCUMENT_PREFIX}
_CHARS_PER_ELEMENT = 16
AnyReranker = ModelReranker | EncoderReranker | LlmReranker
Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]


def _check_limit(value: int) -> int:
    if value < TO_THE_MODEL or value == 0:
        raise PydanticCustomError("expected", "Input should be -1 or at least 1")
    return value


TokenLimit = Annotated[int, AfterValidator(_check_limit)]
Input = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[Texts, Tag("<texts>")]
    | Annotated[TokenIds, Tag("<ids>")]
    | Annotated[list[TokenIds], Field(max_length=MAX_INPUTS, fail_fast=True), Tag("<id lists>")],
    Discriminator(
        prompt_kind,
        **union_error("a string, an array of strings, an array of token ids or an array of arrays of token ids"),
    ),
]


class EmbeddingRequest(RequestObject):
    """`POST /v1/embeddings`."""

    example = '{"model": "sentence_encoder", "input": ["one text", "another"]}'
    model: str = Field(max_length=MAX_MODEL_CHARS, description="A model of the repository with embeddings.")
    input: Input
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64: of the vector's 32-bit floats, little-endian."
    )
    dimensions: int | None = Field(
        None, ge=1, description=f"Length of the vectors; for models with the parameter {MATRYOSHKA_DIMENSIONS}."
    )
    user: str | None = Field(None, description="Accepted and not used.")
    truncate_prompt_tokens: TokenLimit | None = Field(
        None,
        description="vLLM's; most tokens of an input, which is cut; -1 is what the model takes. Without it longer ones "
        "are refused.",
    )
    input_type: Literal["query", "document", "passage"] | None = Field(
        None, description="Whose prefix the texts get, where the model has one. Without it none."
    )


class PoolingRequest(EmbeddingRequest):
    """`POST /pooling`."""

    task: Literal["embed"] | None = None


class ClassificationRequest(RequestObject):
    """`POST /classify`."""

    example = '{"model": "topics", "input": ["one text", "another"]}'
    model: str = Field(max_length=MAX_MODEL_CHARS, description="A model of the repository whose output has labels.")
    input: Input
    use_activation: bool | None = Field(None, description="Whether scores become probabilities, as by default.")
    activation: bool | None = Field(None, description="The older name of use_activation.")
    truncate_prompt_tokens: TokenLimit | None = Field(
        None, description="Most tokens of an input, which is cut; -1 is what the model takes."
    )
    user: str | None = Field(None, description=UNUSED)


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


def router(plane: Plane, config: ServeConfig, answering: Answering) -> APIRouter:
    """Return the routes, which answer from `plane`."""
    api = APIRouter(tags=["OpenAI"], default_response_class=Response)

    def describe(schema: type[RequestObject]) -> dict[str, Any]:
        return describe_body(schema, (TIMEOUT_HEADER,))

    async def answer(
        request: Request, schema: type[FieldsT], write: Callable[[FieldsT], Coroutine[Any, Any, bytes]]
    ) -> Response:
        """Answer in time with what `write` makes of the body's fields."""
        fields, headers = await read_fields(request, schema, config.http)
        body = await run_in_time(request, config.requests, write(fields))
        return Response(body, headers=headers, media_type="application/json")

    @api.post("/v1/embeddings", openapi_extra=describe(EmbeddingRequest))
    async def embeddings(request: Request) -> Response:
        """Encode one text or several as vectors of length 1."""

        async def write(fields: EmbeddingRequest) -> bytes:
            return await write_vectors(
                plane.embedder(fields.model), fields, {"object": "list"}, "embedding", "embedding"
            )

        return await answer(request, EmbeddingRequest, write)

    @api.post("/pooling", openapi_extra=describe(PoolingRequest))
    async def pooling(request: Request) -> Response:
        """Encode as /v1/embeddings, in the shape of vLLM's route."""
        head = {"id": f"pool-{get_request_id(request)}", "object": "list"}

        async def write(fields: PoolingRequest) -> bytes:
            return await write_vectors(plane.embedder(fields.model), fields, head, "pooling", "data")

        return await answer(request, PoolingRequest, write)

    @api.post("/classify", openapi_extra=describe(ClassificationRequest))
    async def classify(request: Request) -> Response:
        """Classify one text or several."""

        async def write(fields: ClassificationRequest) -> bytes:
            head = _dated_head("classify", request, fields.model)
            return await _write_classes(plane.encoding.classifier(fields.model), fields, head)

        return await answer(request, ClassificationRequest, write)

    async def rerank(request: Request) -> Response:
        """Sort documents by how well they answer a question."""
        is_second = request.url.path == COHERE_RERANK

        async def write(fields: RerankRequest) -> bytes:
            model = await plane.encoding.reranker(fields.model)
            shows = fields.return_documents if fields.return_documents is not None else not is_second
            meta = {"api_version": {"version": "2" if is_second else "1"}}
            head = {"id": f"rerank-{get_request_id(request)}", "model": fields.model, "meta": meta}
            return await _rerank(model, fields, head, shows=shows)

        return await answer(request, RerankRequest, write)

    async def score(request: Request) -> Response:
        """Score pairs of texts."""

        async def write(fields: ScoreRequest) -> bytes:
            model = await plane.encoding.reranker(fields.model)
            return await _score(model, fields, _dated_head("score", request, fields.model))

        return await answer(request, ScoreRequest, write)

    for path in ("/rerank", "/v1/rerank", COHERE_RERANK):
        api.post(path, openapi_extra=describe(RerankRequest))(rerank)
    for path in ("/score", "/v1/score"):
        api.post(path, openapi_extra=describe(ScoreRequest))(score)
    api.routes.extend(decisions.router(plane, answering).routes)
    return api


def _dated_head(prefix: str, request: Request, model: str) -> dict[str, Any]:
    """Return what an answer begins with in vLLM's shapes."""
    request_id = f"{prefix}-{get_request_id(request)}"
    return {"id": request_id, "object": "list", "created": int(time.time()), "model": model}


def _as_inputs(sent: Any) -> tuple[Inputs, Callable[[int], str]]:
    """Return the inputs of a field that has one or several, and the path of each."""
    if isinstance(sent, str) or isinstance(sent[0], int):
        return cast(Inputs, [sent]), lambda index: "input"
    return cast(Inputs, sent), lambda index: f"input[{index}]"


async def write_vectors(
    encoder: Embedder, fields: EmbeddingRequest, head: dict[str, Any], kind: str, name: str
) -> bytes:
    """Encode the inputs. Each is an object of the `kind` with its vector under `name`."""
    found = await encoder.embed(
        *_as_inputs(fields.input),
        prefix=_PREFIXES[fields.input_type] if fields.input_type is not None else "",
        truncate_to=fields.truncate_prompt_tokens,
        dimensions=fields.dimensions,
        admit=admit_prompt,
    )
    note_prompt(found.num_tokens)
    usage = {"prompt_tokens": found.num_tokens, "total_tokens": found.num_tokens}
    is_base64 = fields.encoding_format == "base64"
    rows = (
        {"object": kind, "index": index, name: _base64(row) if is_base64 else row}
        for index, row in enumerate(found.vectors)
    )
    head = {**head, "model": fields.model, "usage": usage}
    return await dump_list(head, "data", rows, len(found.vectors), found.vectors.size)


def _base64(vector: Vector) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


async def _write_classes(classifier: TextClassifier, fields: ClassificationRequest, head: dict[str, Any]) -> bytes:
    found = await classifier.classify(
        *_as_inputs(fields.input),
        truncate_to=fields.truncate_prompt_tokens,
        activates=fields.use_activation is not False and fields.activation is not False,
    )
    num_classes, labels = len(found.labels), found.labels
    data = (
        {"index": index, "label": labels[int(row.argmax())], "probs": row.tolist(), "num_classes": num_classes}
        for index, row in enumerate(found.scores)
    )
    note_prompt(found.num_tokens)
    usage = {"prompt_tokens": found.num_tokens, "total_tokens": found.num_tokens, "completion_tokens": 0}
    return await dump_list({**head, "usage": usage}, "data", data, len(found.scores), found.scores.size)


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
