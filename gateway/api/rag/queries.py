"""The handlers of `POST /v1/rag/{collection}/query` and `/search`."""

from functools import partial

from fastapi import Request, Response

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.api.rag.answers import collect_answer, encode_error, stream_answer
from sluice.gateway.api.rag.bodies import collection_key, format_list
from sluice.gateway.api.rag.schemas import QUERY_SAMPLING, QueryRequest, SearchRequest
from sluice.gateway.front.http.bodies import json_response, read_fields
from sluice.gateway.front.http.parsing import retriever_parameters
from sluice.gateway.front.http.request import Scheduling, get_request_id, parse_scheduling, run_while_connected
from sluice.gateway.front.http.sse import EventStreamResponse
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.plane.data_plane import Plane
from sluice.pipelines.rag.filters import parse_filter
from sluice.pipelines.rag.library import DocumentLibrary
from sluice.pipelines.rag.search import SearchOptions, SearchQuery
from sluice.pipelines.rag.types import RetrievalMode, build_source
from sluice.pipelines.text.citations import encoding_field, to_json_objects
from sluice.pipelines.text.model import TextModel
from sluice.pipelines.text.types import ChatMessage, Conversation, TextRequest

DEFAULT_PIPELINE = "rag_pipeline"
_PROTOCOL = "rag"
"""The label of answers in metrics."""


class QueryRoutes:
    """The handlers of queries and searches over one data plane and its library."""

    def __init__(self, plane: Plane, library: DocumentLibrary, config: ServeConfig) -> None:
        self._plane = plane
        self._library = library
        self._options = config.http
        self._defaults = config.requests

    async def search(self, request: Request, collection: str) -> Response:
        """Find the chunks that may answer a question, best first."""
        fields, headers = await read_fields(request, SearchRequest, self._options)
        query = SearchQuery(fields.question, None, parse_filter(fields.filter))
        encoding = await self._library.encoding_progress(collection)
        search = self._library.search(collection, query, build_search_options(fields), key=collection_key(request))
        hits = await run_while_connected(request.receive, search)
        found = format_list(to_json_objects([build_source(hit) for hit in hits]))
        return json_response({**found, **encoding_field(encoding)}, headers=headers)

    async def query(self, request: Request, collection: str) -> Response:
        """Answer a question from a collection's documents.

        Streamed as server-sent events: `sources`, a `token` for each piece of text, `citations`, `usage`, then [DONE].
        """
        fields, headers = await read_fields(request, QueryRequest, self._options)
        scheduling = parse_scheduling(request.headers, self._defaults)
        model = find_pipeline(self._plane, fields.model or DEFAULT_PIPELINE, scheduling.sticky_key)
        request_id = get_request_id(request)
        parse_filter(fields.filter)  # refuses a bad one before anything runs
        key = collection_key(request)
        parameters = retriever_parameters(collection, fields.top_k, fields.mode, fields.filter, key)
        text_request = build_text_request(fields, request_id, scheduling, parameters)
        generate = self._plane.generate(model, text_request)
        head = {"id": f"rag-{request_id}", "object": "rag.answer", "model": model.name, "collection": collection}
        if fields.stream:
            frames = partial(stream_answer, generate, head)
            return EventStreamResponse(frames, encode_error, headers, keep_alive_s=self._options.sse_keep_alive_s)
        answer = await run_while_connected(request.receive, collect_answer(generate, head))
        return json_response(answer, headers=headers)


def find_pipeline(plane: Plane, name: str, key: str) -> TextModel:
    """Return the pipeline that answers questions from collections. Raises NOT_FOUND, which lists such pipelines."""
    fault = "is no pipeline that answers questions; those that do"
    try:
        found = plane.llm(name, key)
        if found.takes_parameters:
            return found
    except SluiceError as error:
        if error.code is not ErrorCode.NOT_FOUND:
            raise
        fault = "does not serve; pipelines that answer questions"
    names = ", ".join(model.name for model in plane.text_models() if model.takes_parameters)
    message = f"model {name!r} {fault}: {names or 'none'}"
    raise SluiceError(ErrorCode.NOT_FOUND, message, param="model")


def build_search_options(fields: SearchRequest) -> SearchOptions:
    """Build the options of a search from the client's fields and the defaults."""
    sent = fields.model_dump(include={"top_k", "num_candidates", "min_similarity", "mmr_lambda"}, exclude_none=True)
    return SearchOptions(mode=RetrievalMode(fields.mode or RetrievalMode.HYBRID), **sent)


def build_text_request(
    fields: QueryRequest, request_id: str, scheduling: Scheduling, parameters: dict[str, str | int | float | bool]
) -> TextRequest:
    """Build the pipeline's request: the earlier turns, then the question."""
    turns = [ChatMessage(role=message.role, content=message.text()) for message in fields.history or ()]
    stop = fields.stop if fields.stop is not None else ()
    return TextRequest(
        request_id=request_id,
        prompt=Conversation((*turns, ChatMessage(role="user", content=fields.question))),
        sampling=fields.model_dump(include={"max_tokens", *QUERY_SAMPLING}, exclude_none=True),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        cache_salt=fields.cache_salt or "",
        parameters=parameters,
        protocol=_PROTOCOL,
        **scheduling.fields(fields.priority),
    )
