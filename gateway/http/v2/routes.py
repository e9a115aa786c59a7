"""Triton's protocol over HTTP: health, metadata and the generate extension."""

from collections.abc import AsyncGenerator
from importlib.metadata import version as distribution_version
from typing import TYPE_CHECKING, Any

import orjson
from fastapi import APIRouter, Request, Response

from engine.errors import ErrorCode, SluiceError, invalid
from gateway.config import ServeConfig
from gateway.http.body import read_body
from gateway.http.disconnect import run_while_connected
from gateway.http.request_id import request_id_of
from gateway.http.scheduling import scheduling_of
from gateway.http.sse import EventStreamResponse
from gateway.http.v2 import llm_model
from gateway.http.v2.generate import (
    PROTOCOL,
    GenerateReply,
    error_frame,
    refuse_stream,
    stream_frames,
    text_request,
    whole_frame,
    whole_response,
)
from gateway.http.v2.openapi import generate_body
from gateway.http.v2.parsing import GenerateInputs, parse_inputs
from gateway.service import InferenceService
from pipelines.text.types import TextEvent

if TYPE_CHECKING:  # heavy to import, and the server listens before it is
    from pipelines.backends.llm.text import LlmText

EXTENSIONS = ["generate", "model_configuration"]
_MAX_VERSION_DIGITS = 18
"""As many as surely fit the 64 bits that Triton keeps a version in."""


def router(service: InferenceService, config: ServeConfig) -> APIRouter:
    """The routes under /v2, answering from `service`."""
    routes = V2Routes(service, config)
    api = APIRouter(prefix="/v2", tags=["Triton v2"], default_response_class=Response)
    api.get("")(routes.server_metadata)
    api.get("/health/live")(routes.live)
    api.get("/health/ready")(routes.ready)
    _add_model_routes(api, routes, "/models/{model}")
    _add_model_routes(api, routes, "/models/{model}/versions/{version}", in_schema=False)
    return api


def _add_model_routes(api: APIRouter, routes: "V2Routes", model: str, in_schema: bool = True) -> None:
    body = generate_body()
    api.get(model, include_in_schema=in_schema)(routes.model_metadata)
    api.get(f"{model}/ready", include_in_schema=in_schema)(routes.model_ready)
    api.get(f"{model}/config", include_in_schema=in_schema)(routes.model_config)
    api.post(f"{model}/generate", include_in_schema=in_schema, openapi_extra=body)(routes.generate)
    api.post(f"{model}/generate_stream", include_in_schema=in_schema, openapi_extra=body)(routes.generate_stream)


class V2Routes:
    """The handlers of Triton's protocol over one service."""

    def __init__(self, service: InferenceService, config: ServeConfig) -> None:
        self._service = service
        self._max_input_bytes = config.http.max_input_bytes
        self._defaults = config.requests

    async def server_metadata(self) -> Response:
        """What this server is."""
        return _json({"name": "sluice", "version": distribution_version("sluice"), "extensions": EXTENSIONS})

    async def live(self) -> Response:
        """Whether the server should be left running: 200, or 400 where it should be restarted."""
        return _health(self._service.is_live())

    async def ready(self) -> Response:
        """Whether the server takes requests: 200 or 400."""
        return _health(self._service.is_ready())

    async def model_metadata(self, request: Request, model: str) -> Response:
        """What a model takes and gives."""
        return _json(llm_model.metadata(self._model(request, model)))

    async def model_config(self, request: Request, model: str) -> Response:
        """A model's configuration, with what was decided when it was loaded."""
        return _json(llm_model.config(self._model(request, model)))

    async def model_ready(self, request: Request, model: str) -> Response:
        """Whether a model takes requests: 200, or 400 where it does not or is not there."""
        version = _version(request)
        try:
            self._find(model, version)
        except SluiceError as error:
            raise SluiceError(ErrorCode.INVALID, "Model version not ready", param="model") from error
        return _health(self._service.is_ready())

    async def generate(self, request: Request, model: str) -> Response:
        """Continue a text; one response."""
        found, inputs = await self._read(request, model)
        refuse_stream(inputs)
        reply = GenerateReply(inputs, found)
        return _json(
            await run_while_connected(request.receive, whole_response(self._events(request, found, inputs), reply))
        )

    async def generate_stream(self, request: Request, model: str) -> Response:
        """Continue a text; server-sent events, one for each piece of it."""
        found, inputs = await self._read(request, model)
        frames = stream_frames if inputs.values.get("stream", True) else whole_frame
        reply = GenerateReply(inputs, found)
        return EventStreamResponse(frames(self._events(request, found, inputs), reply), error_frame)

    async def _read(self, request: Request, name: str) -> "tuple[LlmText, GenerateInputs]":
        """The model that is asked, and what it is asked."""
        model = self._model(request, name)
        body = await read_body(request, self._max_input_bytes)
        return model, parse_inputs(body, model.name)

    def _events(self, request: Request, model: "LlmText", inputs: GenerateInputs) -> AsyncGenerator[TextEvent, None]:
        scheduling = scheduling_of(request.headers, self._defaults)
        return self._service.generate(model, text_request(inputs, scheduling, request_id_of(request)), PROTOCOL)

    def _model(self, request: Request, name: str) -> "LlmText":
        """The model in the request's path."""
        return self._find(name, _version(request))

    def _find(self, name: str, version: int | None) -> "LlmText":
        """The model and, where one is asked for, the version. Raises NOT_FOUND in Triton's words."""
        asked = f"'{name}'" if version is None else f"'{name}' version {version}"
        try:
            model = self._service.llm(name)
        except SluiceError as error:
            if error.code is ErrorCode.NOT_FOUND:
                raise _unknown(asked) from None
            raise
        if version not in (None, int(model.version)):
            raise _unknown(asked)
        return model


def _version(request: Request) -> int | None:
    """The version in the path, where it has one."""
    version: str | None = request.path_params.get("version")
    if version is None:
        return None
    if not (version.isascii() and version.isdigit()):
        raise SluiceError(ErrorCode.NOT_FOUND, "Not Found")
    if len(version) > _MAX_VERSION_DIGITS:
        detail = f"failed to get model version from specified version string '{version[:40]}' (details: stol)"
        raise invalid("version", f"{detail}, version should be an integral value > 0")
    return int(version)


def _unknown(asked: str) -> SluiceError:
    return SluiceError(ErrorCode.NOT_FOUND, f"Request for unknown model: {asked} is not found", param="model")


def _health(is_ok: bool) -> Response:
    return Response(status_code=200 if is_ok else 400)


def _json(payload: dict[str, Any]) -> Response:
    return Response(orjson.dumps(payload), media_type="application/json")
