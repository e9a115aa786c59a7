"""`POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`, in vLLM's shapes: LoRA adapters at run time."""

from fastapi import APIRouter, Request, Response
from pydantic import Field

from sluice.gateway.api.openai.schemas import MAX_MODEL_CHARS
from sluice.gateway.front.http.bodies import read_fields
from sluice.gateway.front.http.openapi import describe_body
from sluice.gateway.front.http.parsing import RequestObject
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.plane.adapters import MAX_PATH_CHARS, RuntimeAdapters


class UnloadAdapterRequest(RequestObject):
    """`POST /v1/unload_lora_adapter`."""

    example = '{"lora_name": "rill:sql"}'
    lora_name: str = Field(
        min_length=1,
        max_length=MAX_MODEL_CHARS,
        description="MODEL:NAME; or NAME alone, where the server has one language model.",
    )


class LoadAdapterRequest(UnloadAdapterRequest):
    """`POST /v1/load_lora_adapter`."""

    example = '{"lora_name": "rill:sql", "lora_path": "/adapters/sql"}'
    lora_path: str = Field(
        min_length=1, max_length=MAX_PATH_CHARS, description="A folder on the server that PEFT wrote."
    )
    load_inplace: bool = Field(
        False, description="Whether an adapter of that name is replaced; without it the name must be free."
    )


def router(adapters: RuntimeAdapters, config: ServeConfig) -> APIRouter:
    """Return the routes, which change `adapters`."""
    routes = AdapterRoutes(adapters, config)
    api = APIRouter(prefix="/v1", tags=["OpenAI"], default_response_class=Response)
    api.post("/load_lora_adapter", openapi_extra=describe_body(LoadAdapterRequest, ()))(routes.load)
    api.post("/unload_lora_adapter", openapi_extra=describe_body(UnloadAdapterRequest, ()))(routes.unload)
    return api


class AdapterRoutes:
    """Handlers of the routes."""

    def __init__(self, adapters: RuntimeAdapters, config: ServeConfig) -> None:
        self._adapters = adapters
        self._options = config.http

    async def load(self, request: Request) -> Response:
        """Load an adapter, which is then a model of its own."""
        fields, headers = await read_fields(request, LoadAdapterRequest, self._options)
        name = await self._adapters.load(fields.lora_name, fields.lora_path, replaces=fields.load_inplace)
        return _done(f"Success: LoRA adapter '{name}' added successfully.", headers)

    async def unload(self, request: Request) -> Response:
        """Remove an adapter. Requests in flight with it end as usual."""
        fields, headers = await read_fields(request, UnloadAdapterRequest, self._options)
        name = await self._adapters.unload(fields.lora_name)
        return _done(f"Success: LoRA adapter '{name}' removed successfully.", headers)


def _done(message: str, headers: dict[str, str] | None) -> Response:
    return Response(message, media_type="text/plain", headers=headers)
