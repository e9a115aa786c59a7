"""`POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`, in vLLM's shapes: LoRA adapters at run time."""

from fastapi import APIRouter, Request, Response
from pydantic import Field

from gateway.http.bodies import read_fields
from gateway.http.openai.schemas import MAX_MODEL_CHARS
from gateway.http.openapi import describe_body
from gateway.http.parsing import RequestObject
from gateway.options.config import ServeConfig
from gateway.service import InferenceService
from pipelines.llm.text_models import SEPARATOR, split_name
from sluice.errors import ErrorCode, SluiceError, invalid

FLAG = "--allow-runtime-lora-updating"
_MAX_PATH_CHARS = 4096


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
        min_length=1, max_length=_MAX_PATH_CHARS, description="A folder on the server that PEFT wrote."
    )
    load_inplace: bool = Field(
        False, description="Whether an adapter of that name is replaced; without it the name must be free."
    )


def router(service: InferenceService, config: ServeConfig) -> APIRouter:
    """Return the routes, which change the engines of `service`."""
    routes = AdapterRoutes(service, config)
    api = APIRouter(prefix="/v1", tags=["OpenAI"], default_response_class=Response)
    api.post("/load_lora_adapter", openapi_extra=describe_body(LoadAdapterRequest, ()))(routes.load)
    api.post("/unload_lora_adapter", openapi_extra=describe_body(UnloadAdapterRequest, ()))(routes.unload)
    return api


class AdapterRoutes:
    """Handlers of the routes over one service."""

    def __init__(self, service: InferenceService, config: ServeConfig) -> None:
        self._service = service
        self._options = config.http
        self._is_allowed = config.requests.allows_lora_updates

    async def load(self, request: Request) -> Response:
        """Load an adapter, which is then a model of its own."""
        self._refuse_unless_allowed()
        fields, headers = await read_fields(request, LoadAdapterRequest, self._options)
        if not fields.lora_path.isprintable():
            raise invalid("lora_path", f"lora_path must be a path of printable characters, got {fields.lora_path!r}")
        base, name = self._split(fields.lora_name)
        engine = self._service.language_model(base).engine
        await engine.load_adapter(name, fields.lora_path, replaces=fields.load_inplace)
        return _done(f"Success: LoRA adapter '{base}{SEPARATOR}{name}' added successfully.", headers)

    async def unload(self, request: Request) -> Response:
        """Remove an adapter. Requests in flight with it end as usual."""
        self._refuse_unless_allowed()
        fields, headers = await read_fields(request, UnloadAdapterRequest, self._options)
        base, name = self._split(fields.lora_name)
        await self._service.language_model(base).engine.unload_adapter(name)
        return _done(f"Success: LoRA adapter '{base}{SEPARATOR}{name}' removed successfully.", headers)

    def _refuse_unless_allowed(self) -> None:
        if not self._is_allowed:
            raise SluiceError(ErrorCode.FORBIDDEN, f"LoRA adapters are fixed on this server; start it with {FLAG}")

    def _split(self, name: str) -> tuple[str, str]:
        """Return the names of model and adapter. Raises INVALID for an adapter whose model is not clear."""
        models = [model.name for model in self._service.llms()]
        if any(name.startswith(model + SEPARATOR) for model in models):
            base, adapter = split_name(name, models)
        elif len(models) == 1 and name not in models:
            base, adapter = models[0], name
        else:
            known = ", ".join(models) or "none"
            raise invalid("lora_name", f"lora_name must be MODEL:NAME, got {name!r}; language models: {known}")
        if not adapter.isprintable() or SEPARATOR in adapter or " " in adapter:
            raise invalid("lora_name", f"an adapter's name must have no blanks and no colon, got {adapter!r}")
        return base, adapter


def _done(message: str, headers: dict[str, str] | None) -> Response:
    return Response(message, media_type="text/plain", headers=headers)
