"""Ollama's routes about models: lists and descriptions; and the refusals of those that change what is served."""

import hashlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool

from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.gateway.api.ollama.schemas import ShowRequest
from sluice.gateway.front.http.bodies import json_response, read_fields
from sluice.gateway.front.http.openapi import describe_body
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.plane.data_plane import Plane
from sluice.pipelines.chat.registry import NO_FORMATS
from sluice.pipelines.encoding.encoder import TextEncoder
from sluice.pipelines.encoding.llm_encoder import LlmEncoder
from sluice.pipelines.llm.text import LlmText
from sluice.pipelines.llm.text_models import AdapterText
from sluice.pipelines.text.model import TextModel

OLLAMA_VERSION = "0.13.0"
"""The version of Ollama whose API this is: clients ask for a least one."""
_TAG = ":latest"
_NEVER = "2999-12-31T23:59:59Z"
"""When models are unloaded."""
_LOAD = "put it into the model repository (--model-repository) and POST /v2/repository/models/NAME/load"
_REFUSED = {
    "/pull": f"this server downloads no models: {_LOAD}",
    "/create": f"this server makes no models: {_LOAD}",
    "/copy": f"this server copies no models: {_LOAD}",
    "/push": "this server uploads no models: their files are in its model repository",
    "/delete": "this server deletes no models: POST /v2/repository/models/NAME/unload, and remove its files",
    "/blobs/{digest}": f"this server takes no blobs: {_LOAD}",
}
"""Routes that would change what is served, and for each what to do instead."""
AnyModel = TextModel | TextEncoder | LlmEncoder


def repository_name(plane: Plane, name: str) -> str:
    """Return the name in the repository of a model that a client may have given the tag `latest`."""
    plain = name.removesuffix(_TAG)
    if plain == name or any(each.name == name for each in plane.text_models()):
        return name
    return plain


def router(plane: Plane, config: ServeConfig) -> APIRouter:
    """Return the routes, which answer from `plane`."""
    api = APIRouter()

    def served() -> list[AnyModel]:
        return [*plane.text_models(), *plane.encoding.encoders()]

    @api.get("/tags")
    async def tags() -> Response:
        """List the models."""
        return json_response({"models": await run_in_threadpool(lambda: [_entry(each) for each in served()])})

    @api.get("/ps")
    async def running() -> Response:
        """List the models that are loaded: all."""
        found = await run_in_threadpool(lambda: [_running_entry(each) for each in served()])
        return json_response({"models": found})

    @api.get("/version")
    async def version() -> Response:
        """Return the version of Ollama whose API this is."""
        return json_response({"version": OLLAMA_VERSION})

    @api.post("/show", openapi_extra=describe_body(ShowRequest, ()))
    async def show(request: Request) -> Response:
        """Describe a model."""
        fields, headers = await read_fields(request, ShowRequest, config.http)
        name = fields.model or fields.name
        if name is None:
            raise invalid("model", "model is required")
        name = repository_name(plane, name)
        model = plane.encoding.encoder(name) if plane.encoding.has_embeddings(name) else plane.llm(name)
        return json_response(_description(model), headers=headers)

    for path, reason in _REFUSED.items():
        _refuse(api, path, reason)
    return api


def _refuse(api: APIRouter, path: str, reason: str) -> None:
    async def refuse() -> Response:
        raise SluiceError(ErrorCode.UNIMPLEMENTED, reason)

    api.add_api_route(path, refuse, methods=["GET", "POST", "DELETE"], include_in_schema=False)


def _entry(model: AnyModel) -> dict[str, Any]:
    name = model.name if _adapter_root(model) else model.name + _TAG
    loaded = f"{model.name} {getattr(model, 'version', '')} {model.created}"
    return {
        "name": name,
        "model": name,
        "modified_at": _time(model),
        "size": _size(model),
        "digest": hashlib.sha256(loaded.encode()).hexdigest(),
        "details": _details(model),
    }


def _running_entry(model: AnyModel) -> dict[str, Any]:
    return {
        **_entry(model),
        "expires_at": _NEVER,
        "size_vram": 0,
        "context_length": model.max_model_len or 0,
    }


def _time(model: AnyModel) -> str:
    return datetime.fromtimestamp(model.created, UTC).isoformat().replace("+00:00", "Z")


def _base(model: AnyModel) -> LlmText | None:
    """Return the language model that `model` is or adapts; None for pipelines and encoders."""
    base = model.base if isinstance(model, AdapterText) else model
    base = base.text if isinstance(base, LlmEncoder) else base
    return base if isinstance(base, LlmText) else None


def _size(model: AnyModel) -> int:
    """Return the size of the files of a language model or adapter in bytes; 0 for others. Blocks."""
    base = _base(model)
    if base is None:
        return 0
    folder = Path(_adapter_root(model) or base.engine.config.model_path)
    return sum(each.stat().st_size for each in folder.iterdir() if each.is_file()) if folder.is_dir() else 0


def _adapter_root(model: AnyModel) -> str:
    return model.root if isinstance(model, AdapterText) else ""


def _details(model: AnyModel) -> dict[str, Any]:
    base = _base(model)
    family = _family(model)
    quantization = ""
    if base is not None:
        quantization = base.info.quantization if base.info.quantization != "none" else base.info.dtype
    return {
        "parent_model": base.name + _TAG if base is not None and _adapter_root(model) else "",
        "format": "" if base is None else base.info.runtime,
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": quantization.upper(),
    }


def _family(model: AnyModel) -> str:
    base = _base(model)
    if base is not None:
        return base.info.model_type
    return "encoder" if isinstance(model, TextEncoder) else "pipeline"


def _capabilities(model: AnyModel) -> list[str]:
    if isinstance(model, TextEncoder | LlmEncoder):
        return ["embedding"]
    base = _base(model)
    formats = NO_FORMATS if base is None else base.formats
    return [
        "completion",
        *["tools"] * (formats.tools is not None),
        *["thinking"] * (formats.reasoning is not None),
        *["vision"] * (base is not None and bool(base.info.image_placeholders)),
    ]


def _description(model: AnyModel) -> dict[str, Any]:
    base, family = _base(model), _family(model)
    defaults = {} if base is None else dict(base.defaults)
    if "repetition_penalty" in defaults:
        defaults["repeat_penalty"] = defaults.pop("repetition_penalty")
    facts = {
        "general.architecture": family,
        "general.basename": model.name,
        f"{family}.context_length": model.max_model_len,
        f"{family}.vocab_size": base.info.vocab_size if base is not None else None,
    }
    return {
        "modelfile": "",
        "parameters": "\n".join(f"{name:<30} {value}" for name, value in defaults.items()),
        "template": "" if base is None else base.tokenizer.chat_template,
        "details": _details(model),
        "model_info": {name: value for name, value in facts.items() if value is not None},
        "capabilities": _capabilities(model),
        "modified_at": _time(model),
    }
