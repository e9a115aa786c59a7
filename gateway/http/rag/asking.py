"""`POST /v1/rag/{collection}/query` and `/search`."""

from contextlib import aclosing

from fastapi import Request, Response

from gateway.http.parsing import retriever_parameters
from gateway.http.rag.answer import AnswerHead, Events, answer_frames, whole_answer
from gateway.http.rag.exchange import collection_key, json_response, parsed_body
from gateway.http.rag.frames import error_frame
from gateway.http.rag.objects import list_object
from gateway.http.rag.schemas import QueryRequest, SearchRequest
from gateway.http.request import Scheduling, get_request_id, parse_scheduling, run_while_connected
from gateway.http.sse import EventStreamResponse
from gateway.options.config import ServeConfig
from gateway.service import InferenceService
from pipelines.rag.filters import parse_filter
from pipelines.rag.library import Library
from pipelines.rag.retrieval.search import SearchOptions, SearchQuery
from pipelines.rag.types import RetrievalMode, source_of
from pipelines.text.model import TextModel
from pipelines.text.sources import as_objects
from pipelines.text.types import ChatMessage, SamplingOverrides, TextRequest
from sluice.errors import ErrorCode, SluiceError

DEFAULT_PIPELINE = "rag_pipeline"
_PROTOCOL = "rag"
"""The label of answers in the metrics."""
_SAMPLING = {
    "max_tokens",
    "temperature",
    "top_p",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
}


class AskingRoutes:
    """The handlers of questions over one service and its library."""

    def __init__(self, service: InferenceService, library: Library, config: ServeConfig) -> None:
        self._service = service
        self._library = library
        self._options = config.http
        self._defaults = config.requests

    async def search(self, request: Request, collection: str) -> Response:
        """The chunks that may answer a question, best first."""
        fields, headers = await parsed_body(request, SearchRequest, self._options)
        query = SearchQuery(fields.question, None, parse_filter(fields.filter))
        search = self._library.search(collection, query, search_options(fields), key=collection_key(request))
        hits = await run_while_connected(request.receive, search)
        return json_response(list_object(as_objects([source_of(hit) for hit in hits])), headers=headers)

    async def query(self, request: Request, collection: str) -> Response:
        """Answer a question from a collection's documents.

        Streamed as server-sent events: `sources`, a `token` for each piece of text, `citations`, `usage`, then [DONE].
        """
        fields, headers = await parsed_body(request, QueryRequest, self._options)
        scheduling = parse_scheduling(request.headers, self._defaults)
        model = pipeline(self._service, fields.model or DEFAULT_PIPELINE, scheduling.sticky_key)
        request_id = get_request_id(request)
        parameters = retrieval_parameters(fields, collection, collection_key(request))
        asked = text_request(fields, request_id, scheduling, parameters)
        events = _in_client_s_words(self._service.generate(model, asked, _PROTOCOL))
        head = AnswerHead(f"rag-{request_id}", model.name, collection)
        if fields.stream:
            return EventStreamResponse(answer_frames(events, head), error_frame, headers)
        return json_response(await run_while_connected(request.receive, whole_answer(events, head)), headers=headers)


async def _in_client_s_words(events: Events) -> Events:
    """The same events; an error about the pipeline's input names the field `question`."""
    try:
        async with aclosing(events):
            async for event in events:
                yield event
    except SluiceError as error:
        if error.param == "query":
            error.param = "question"
        raise


def pipeline(service: InferenceService, name: str, key: str) -> TextModel:
    """The model that answers questions from collections. Raises NOT_FOUND, which names those that do."""
    fault = "is no pipeline that answers questions; those that do"
    try:
        found = service.llm(name, key)
        if found.takes_parameters:
            return found
    except SluiceError as error:
        if error.code is not ErrorCode.NOT_FOUND:
            raise
        fault = "does not serve; pipelines that answer questions"
    names = ", ".join(model.name for model in service.text_models() if model.takes_parameters)
    message = f"model {name!r} {fault}: {names or 'none'}"
    raise SluiceError(ErrorCode.NOT_FOUND, message, param="model")


def search_options(fields: SearchRequest) -> SearchOptions:
    """What the client sent, over the defaults."""
    sent = fields.model_dump(include={"top_k", "num_candidates", "min_similarity", "mmr_lambda"}, exclude_none=True)
    return SearchOptions(mode=RetrievalMode(fields.mode or RetrievalMode.HYBRID), **sent)


def retrieval_parameters(fields: QueryRequest, collection: str, key: str) -> dict[str, str | int | float | bool]:
    """The request parameters of the retrieving step. Raises INVALID for a filter that is none."""
    parse_filter(fields.filter)
    return retriever_parameters(collection, fields.top_k, fields.mode, fields.filter, key)


def text_request(
    fields: QueryRequest, request_id: str, scheduling: Scheduling, parameters: dict[str, str | int | float | bool]
) -> TextRequest:
    """The question behind the earlier turns."""
    turns = [ChatMessage(role=message.role, content=message.text()) for message in fields.history or ()]
    stop = fields.stop if fields.stop is not None else ()
    return TextRequest(
        request_id=request_id,
        prompt=(*turns, ChatMessage(role="user", content=fields.question)),
        sampling=SamplingOverrides(**fields.model_dump(include=_SAMPLING, exclude_none=True)),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        cache_salt=fields.cache_salt or "",
        parameters=parameters,
        **scheduling.fields(fields.priority),
    )
