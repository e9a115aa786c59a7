"""The handlers of `POST /v1/rag/{collection}/query` and `/search`."""

from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import orjson
from fastapi import Request, Response

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.api.rag.bodies import JsonObject, collection_key, format_list
from sluice.gateway.api.rag.schemas import QUERY_SAMPLING, QueryRequest, SearchRequest
from sluice.gateway.api.translators import Answering, Reply, Translator, stop_strings
from sluice.gateway.front.http.bodies import json_response, read_fields
from sluice.gateway.front.http.errors import openai_error_body
from sluice.gateway.front.http.parsing import retriever_parameters
from sluice.gateway.front.http.request import run_while_connected
from sluice.gateway.front.http.sse import DONE, PLACEHOLDER, TextFrame, event_frame
from sluice.gateway.options.http import HttpOptions
from sluice.gateway.plane.data_plane import Plane
from sluice.pipelines.rag.filters import parse_filter
from sluice.pipelines.rag.library import DocumentLibrary
from sluice.pipelines.rag.search import SearchOptions, SearchQuery
from sluice.pipelines.rag.types import RetrievalMode, build_source
from sluice.pipelines.text.citations import encoding_field, to_json_objects
from sluice.pipelines.text.model import TextModel
from sluice.pipelines.text.types import ChatMessage, ChatReader, Conversation, Retrieval, TextEvent, TextRequest

DEFAULT_PIPELINE = "rag_pipeline"
_TOKEN_FRAME = TextFrame.around({"text": PLACEHOLDER}, "token")


class QueryRoutes:
    """The handlers of queries and searches over one library."""

    def __init__(self, answering: Answering, library: DocumentLibrary, options: HttpOptions) -> None:
        self._answering = answering
        self._library = library
        self._options = options

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
        return await self._answering.answer(request, QueryRequest, partial(QueryTranslator, collection=collection))


def build_search_options(fields: SearchRequest) -> SearchOptions:
    """Build the options of a search from the client's fields and the defaults."""
    sent = fields.model_dump(include={"top_k", "num_candidates", "min_similarity", "mmr_lambda"}, exclude_none=True)
    return SearchOptions(mode=RetrievalMode(fields.mode or RetrievalMode.HYBRID), **sent)


def encode_error(error: SluiceError) -> bytes:
    """Encode the last event of a stream that failed. No `[DONE]` follows it."""
    return b"event: error\ndata: " + openai_error_body(error) + b"\n\n"


class QueryTranslator(Translator[QueryRequest]):
    """A question to a collection's documents."""

    protocol = "rag"
    encode_error = staticmethod(encode_error)

    def __init__(self, fields: QueryRequest, request: Request, *, collection: str) -> None:
        super().__init__(fields, request)
        self.param_names = {"query": "question"}
        self._collection = collection

    @property
    def model_name(self) -> str:
        return self.fields.model or DEFAULT_PIPELINE

    def find_model(self, plane: Plane, key: str) -> TextModel:
        """Return the pipeline that answers. Raises NOT_FOUND, which lists such pipelines."""
        fault = "is no pipeline that answers questions; those that do"
        try:
            found = super().find_model(plane, key)
            if found.takes_parameters:
                return found
        except SluiceError as error:
            if error.code is not ErrorCode.NOT_FOUND:
                raise
            fault = "does not serve; pipelines that answer questions"
        names = ", ".join(model.name for model in plane.text_models() if model.takes_parameters)
        message = f"model {self.model_name!r} {fault}: {names or 'none'}"
        raise SluiceError(ErrorCode.NOT_FOUND, message, param="model")

    @property
    def priority(self) -> int | None:
        return self.fields.priority

    def parse(self, base: TextRequest) -> list[TextRequest]:
        """Return the pipeline's request: the earlier turns, then the question."""
        fields = self.fields
        parse_filter(fields.filter)  # refuses a bad one before anything runs
        turns = [ChatMessage(role=message.role, content=message.text()) for message in fields.history or ()]
        request = msgspec.structs.replace(
            base,
            prompt=Conversation((*turns, ChatMessage(role="user", content=fields.question))),
            sampling=fields.model_dump(include={"max_tokens", *QUERY_SAMPLING}, exclude_none=True),
            stop=stop_strings(fields.stop),
            cache_salt=fields.cache_salt or "",
            parameters=retriever_parameters(self._collection, fields.top_k, fields.mode, fields.filter),
        )
        return [request]

    def reply(self, model: TextModel, readers: Sequence[ChatReader]) -> Reply:
        head = {"id": f"rag-{self.request_id}", "object": "rag.answer", "model": model.name}
        return QueryReply({**head, "collection": self._collection})

    @property
    def is_streamed(self) -> bool:
        return bool(self.fields.stream)


class QueryReply(Reply):
    """Formats an answer as the event `sources`, a `token` for each text, then `citations`, `usage` and [DONE]; or as
    one object. `head` has the fields that identify it."""

    def __init__(self, head: JsonObject) -> None:
        self._head = head
        self._has_begun = False
        self._events: list[TextEvent] = []

    def frame(self, index: int, event: TextEvent) -> bytes:
        found = _retrieval(event)
        frame = b"" if self._has_begun else event_frame({**self._head, **_sources(found)}, "sources")
        self._has_begun = True
        if event.text:
            frame += _TOKEN_FRAME.fill(event.text)
        if event.finish_reason is not None:
            frame += event_frame(_citations(found), "citations") + event_frame(_ending(event), "usage") + DONE
        return frame

    def collector(self, index: int) -> Callable[[TextEvent], object]:
        return self._events.append

    async def whole(self) -> bytes:
        last, text = self._events[-1], "".join([event.text for event in self._events])
        found = _retrieval(last)
        return orjson.dumps({**self._head, "answer": text, **_sources(found), **_citations(found), **_ending(last)})


def _retrieval(event: TextEvent) -> Retrieval:
    found = event.detail.retrieval if event.detail is not None else None
    return Retrieval() if found is None else found


def _sources(found: Retrieval) -> JsonObject:
    sources, dropped = to_json_objects(found.sources), to_json_objects(found.dropped)
    return {"sources": sources, "dropped": dropped, **encoding_field(found.encoding)}


def _citations(found: Retrieval) -> JsonObject:
    return {"citations": to_json_objects(found.citations)}


def _ending(last: TextEvent) -> JsonObject:
    """Format finish reason and usage, with OpenAI's names. Counts are 0 if the pipeline's model does not count."""
    return {
        "finish_reason": last.finish_reason,
        "usage": {
            "prompt_tokens": last.prompt_tokens,
            "completion_tokens": last.completion_tokens,
            "total_tokens": last.prompt_tokens + last.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": last.cached_tokens},
        },
    }
