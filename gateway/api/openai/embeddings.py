"""`POST /v1/embeddings` and `/pooling`: texts or token ids in, vectors out, by the repository's encoders."""

import base64
from typing import Annotated, Any, Literal, cast

from fastapi import APIRouter, Request, Response
from pydantic import AfterValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from sluice.gateway.api.openai.schemas import MAX_MODEL_CHARS, TokenIds, prompt_kind
from sluice.gateway.calls import admit_prompt, note_prompt
from sluice.gateway.front.http.bodies import dump_list, read_fields
from sluice.gateway.front.http.errors import TIMEOUT_HEADER
from sluice.gateway.front.http.openapi import describe_body
from sluice.gateway.front.http.parsing import RequestObject, union_error
from sluice.gateway.front.http.request import get_request_id, run_in_time
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.plane.data_plane import Plane
from sluice.pipelines.answers.cache import Embedder
from sluice.pipelines.encoding import Vector
from sluice.pipelines.encoding.encoder import DOCUMENT_PREFIX, MATRYOSHKA_DIMENSIONS, QUERY_PREFIX, TO_THE_MODEL
from sluice.pipelines.encoding.signature import Inputs

MAX_INPUTS = 2048
"""Most texts of one request: OpenAI's limit."""
_PREFIXES = {"query": QUERY_PREFIX, "document": DOCUMENT_PREFIX, "passage": DOCUMENT_PREFIX}
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


def router(plane: Plane, config: ServeConfig) -> APIRouter:
    """Return the routes, which answer from `plane`."""
    routes = EmbeddingRoutes(plane, config)
    api = APIRouter(tags=["OpenAI"], default_response_class=Response)
    headers = (TIMEOUT_HEADER,)
    api.post("/v1/embeddings", openapi_extra=describe_body(EmbeddingRequest, headers))(routes.embeddings)
    api.post("/pooling", openapi_extra=describe_body(PoolingRequest, headers))(routes.pooling)
    return api


class EmbeddingRoutes:
    """Handlers of the routes over one data plane."""

    def __init__(self, plane: Plane, config: ServeConfig) -> None:
        self._plane = plane
        self._options = config.http
        self._defaults = config.requests

    async def embeddings(self, request: Request) -> Response:
        """Encode one text or several as vectors of length 1."""
        return await self._answer(request, EmbeddingRequest, {"object": "list"}, "embedding", "embedding")

    async def pooling(self, request: Request) -> Response:
        """Encode as /v1/embeddings, in the shape of vLLM's route."""
        head = {"id": f"pool-{get_request_id(request)}", "object": "list"}
        return await self._answer(request, PoolingRequest, head, "pooling", "data")

    async def _answer(
        self, request: Request, schema: type[EmbeddingRequest], head: dict[str, str], kind: str, name: str
    ) -> Response:
        fields, headers = await read_fields(request, schema, self._options)
        encoder = self._plane.embedder(fields.model)
        body = await run_in_time(request, self._defaults, _write_answer(encoder, fields, head, kind, name))
        return Response(body, headers=headers, media_type="application/json")


async def _write_answer(
    encoder: Embedder, fields: EmbeddingRequest, head: dict[str, Any], kind: str, name: str
) -> bytes:
    """Encode the inputs. Each is an object of the `kind` with its vector under `name`."""
    inputs = fields.input
    is_single = isinstance(inputs, str) or isinstance(inputs[0], int)
    found = await encoder.embed(
        cast(Inputs, [inputs] if is_single else inputs),
        lambda index: "input" if is_single else f"input[{index}]",
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
