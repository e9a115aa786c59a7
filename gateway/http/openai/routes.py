"""OpenAI's API: chat completions, completions and the list of models."""

from typing import TypeVar

import orjson
from fastapi import APIRouter, Request, Response

from gateway.http.body import read_body
from gateway.http.openai.chat import chat_job
from gateway.http.openai.completions import completion_job
from gateway.http.openai.generation import answer
from gateway.http.openai.models import model_list, model_object
from gateway.http.openai.schemas import ChatCompletionRequest, CompletionRequest, GenerationRequest
from gateway.http.openapi import body_of
from gateway.http.parsing import parse, warning_header
from gateway.http.scheduling import Scheduling, scheduling_of
from gateway.options.config import ServeConfig
from gateway.service import InferenceService

RequestT = TypeVar("RequestT", bound=GenerationRequest)


def router(service: InferenceService, config: ServeConfig) -> APIRouter:
    """The routes under /v1, answering from `service`."""
    routes = OpenAIRoutes(service, config)
    api = APIRouter(prefix="/v1", tags=["OpenAI"], default_response_class=Response)
    api.post("/chat/completions", openapi_extra=body_of(ChatCompletionRequest))(routes.chat_completions)
    api.post("/completions", openapi_extra=body_of(CompletionRequest))(routes.completions)
    api.get("/models")(routes.models)
    api.get("/models/{model:path}")(routes.model)
    return api


class OpenAIRoutes:
    """The handlers of OpenAI's API over one service."""

    def __init__(self, service: InferenceService, config: ServeConfig) -> None:
        self._service = service
        self._options = config.http
        self._defaults = config.requests

    async def chat_completions(self, request: Request) -> Response:
        """Answer a conversation."""
        fields, headers = await self._parse(request, ChatCompletionRequest)
        return await answer(self._service, request, chat_job(fields), self._scheduling(request), headers)

    async def completions(self, request: Request) -> Response:
        """Continue one text or several."""
        fields, headers = await self._parse(request, CompletionRequest)
        return await answer(self._service, request, completion_job(fields), self._scheduling(request), headers)

    async def models(self) -> Response:
        """The models that can be asked."""
        return _json(model_list(self._service.text_models()))

    async def model(self, model: str) -> Response:
        """One of the models."""
        return _json(model_object(self._service.llm(model)))

    def _scheduling(self, request: Request) -> Scheduling:
        return scheduling_of(request.headers, self._defaults)

    async def _parse(self, request: Request, schema: type[RequestT]) -> tuple[RequestT, dict[str, str]]:
        """The request's fields, and the headers that its answer must carry."""
        body = await read_body(request, self._options.max_input_bytes)
        fields, ignored = parse(schema, body, self._options.is_strict)
        return fields, warning_header(ignored)


def _json(payload: dict[str, object]) -> Response:
    return Response(orjson.dumps(payload), media_type="application/json")
