"""The OpenAPI document, with descriptions of routes that FastAPI cannot derive, and the page /docs that shows it.

We parse request bodies ourselves, and the v2 routes are no routes of the framework.
"""

from collections.abc import Collection
from functools import cache
from importlib.resources import files
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.staticfiles import StaticFiles

from sluice.gateway.front.http.parsing import RequestObject
from sluice.gateway.front.http.request import SCHEDULING_PARAMETERS
from sluice.pipelines.text.types import OWNER_KEY_HEADER

_COLLECTION_KEY: dict[str, Any] = {
    "name": OWNER_KEY_HEADER,
    "in": "header",
    "schema": {"type": "string"},
    "description": "The owner's key of the collection that a pipeline looks into, where it has one.",
}
_PATH_EXAMPLES = {"model": "rill", "region": "input_data", "collection": "sluice", "name": "sluice"}
"""Values to try for the parameters of paths."""
_ASSETS = "docs/assets"
_OWN_RESOURCES = (
    "default-src 'none'; connect-src 'self'; img-src 'self' data:; script-src 'self' 'unsafe-inline'; "
    "style-src 'self' 'unsafe-inline'"
)
"""Content-Security-Policy of a page that loads nothing from other servers."""
_PAGE_SETTINGS = {
    "validatorUrl": None,  # else the page shows the document to a public validator
    "defaultModelsExpandDepth": -1,
    "docExpansion": "list",
}
_TAG = "Triton v2"
_MODEL = "/v2/models/{model}"
_TENSOR = {
    "type": "object",
    "required": ["name", "datatype", "shape"],
    "properties": {
        "name": {"type": "string"},
        "datatype": {"type": "string", "description": "BOOL, UINT8 … INT64, FP16, FP32, FP64, BF16 or BYTES."},
        "shape": {"type": "array", "items": {"type": "integer"}},
        "data": {"type": "array", "items": {}, "description": "The elements, flat or nested."},
        "parameters": {"type": "object", "description": "binary_data_size, shared_memory_region and its place."},
    },
}
_OUTPUT = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string"},
        "parameters": {"type": "object", "description": "binary_data, classification, shared_memory_region."},
    },
}
_INFER = {
    "type": "object",
    "required": ["inputs"],
    "properties": {
        "id": {"type": "string", "description": "Comes back with the response."},
        "inputs": {"type": "array", "items": _TENSOR},
        "outputs": {"type": "array", "items": _OUTPUT, "description": "All where absent."},
        "parameters": {
            "type": "object",
            "description": "priority, timeout (microseconds), sequence_id, sequence_start, sequence_end, "
            "binary_data_output, and the model's own.",
        },
    },
    "example": {
        "inputs": [
            {"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": ["What is a block table?"]},
            {"name": "max_tokens", "datatype": "INT32", "shape": [1, 1], "data": [20]},
        ]
    },
}
_GENERATE = {
    "type": "object",
    "additionalProperties": True,
    "description": "Each key that is an input of the model is its value, of which an LLM has text_input, max_tokens, "
    "temperature, stop_words and more (see the model's metadata). Other keys are request parameters.",
    "properties": {
        "id": {"type": "string", "description": "Comes back with every response."},
        "parameters": {"type": "object", "description": "Counts as if its keys stood beside it."},
    },
    "example": {"text_input": "What is a block table?", "max_tokens": 20},
}
_LOAD = {
    "type": "object",
    "properties": {
        "parameters": {"type": "object", "description": "config: a configuration as JSON; file:PATH: a file in base64."}
    },
    "example": {},
}
_UNLOAD = {
    "type": "object",
    "properties": {"parameters": {"type": "object", "description": "unload_dependents."}},
    "example": {"parameters": {"unload_dependents": True}},
}
_ROUTING = {
    "type": "object",
    "required": ["weights"],
    "properties": {"weights": {"description": "Weights by version; null for the configured ones."}},
    "example": {"weights": {"1": 90, "2": 10}},
}
_REGION = {
    "type": "object",
    "required": ["key", "byte_size"],
    "properties": {"key": {"type": "string"}, "offset": {"type": "integer"}, "byte_size": {"type": "integer"}},
    "example": {"key": "/input_data", "offset": 0, "byte_size": 4096},
}
_INDEX = {"type": "object", "properties": {"ready": {"type": "boolean"}}, "example": {"ready": True}}
_SETTINGS = {
    "type": "object",
    "additionalProperties": True,
    "description": "The settings to change; null takes a change back.",
}


def describe_body(schema: type[RequestObject], headers: Collection[str] | None = None) -> dict[str, Any]:
    """Return the part of an operation's OpenAPI entry that describes its body and headers: the scheduling headers, of
    which it takes `headers` alone where given."""
    content = {"application/json": {"schema": orjson.loads(_schema(schema)), "example": orjson.loads(schema.example)}}
    body = {"required": True, "content": content}
    parameters = [*SCHEDULING_PARAMETERS, _COLLECTION_KEY]
    if headers is not None:
        parameters = [each for each in parameters if each["name"] in headers]
    return {"requestBody": body, "parameters": parameters}


@cache
def _schema(schema: type[RequestObject]) -> bytes:
    """Return the JSON schema without references. It is as bytes, so that nobody changes it for the next application."""
    whole = schema.model_json_schema()
    return orjson.dumps(_inlined(whole, whole.pop("$defs", {})))


def _inlined(node: Any, definitions: dict[str, Any]) -> Any:
    """Return `node` with every reference replaced by its definition: an operation has no place for definitions."""
    if isinstance(node, list):
        return [_inlined(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        name = node["$ref"].removeprefix("#/$defs/")
        return _inlined(definitions[name], definitions)
    return {key: _inlined(value, definitions) for key, value in node.items()}


PAGE_HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
}
"""Headers of pages: no other site shows them in a frame or learns their addresses."""


def serve_docs(app: FastAPI) -> None:
    """Complete the document of `app`'s routes, and serve the page that shows it with its files. The page's addresses
    are relative, so that it works under a proxy's prefix too."""
    describe = app.openapi
    app.openapi = lambda: _complete(describe())  # type: ignore[method-assign]

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        page = get_swagger_ui_html(
            openapi_url="openapi.json",
            title="Sluice: the API",
            swagger_js_url=f"{_ASSETS}/swagger-ui-bundle.js",
            swagger_css_url=f"{_ASSETS}/swagger-ui.css",
            swagger_favicon_url="data:,",
            swagger_ui_parameters=_PAGE_SETTINGS,
        )
        page.headers.update({**PAGE_HEADERS, "content-security-policy": _OWN_RESOURCES})
        return page

    directory = str(files("fastapi_offline") / "static")
    app.mount(f"/{_ASSETS}", StaticFiles(directory=directory))


def _complete(document: dict[str, Any]) -> dict[str, Any]:
    """Return FastAPI's document of its routes with those of the v2 protocol, and an example for each path's parameter
    that has one."""
    paths = {**document["paths"], **v2_paths()}
    for operations in paths.values():
        for operation in operations.values():
            for parameter in operation.get("parameters", ()):
                if parameter["in"] == "path" and parameter["name"] in _PATH_EXAMPLES:
                    parameter["example"] = _PATH_EXAMPLES[parameter["name"]]
    return {**document, "paths": paths}


def v2_paths() -> dict[str, Any]:
    """Return the `paths` of the v2 routes. Each model route also exists with /versions/{version} after the model."""
    return {
        "/v2": {"get": _operation("The server's name, version and extensions.")},
        "/v2/health/live": {"get": _operation("Whether the server should be left running: 200 or 400.")},
        "/v2/health/ready": {"get": _operation("Whether the server takes requests: 200 or 400.")},
        _MODEL: {"get": _operation("A model's inputs, outputs and versions.", path=("model",))},
        f"{_MODEL}/ready": {"get": _operation("Whether a model takes requests: 200 or 400.", path=("model",))},
        f"{_MODEL}/config": {"get": _operation("A model's configuration.", path=("model",))},
        f"{_MODEL}/stats": {"get": _operation("A model's statistics.", path=("model",))},
        "/v2/models/stats": {"get": _operation("Every model's statistics.")},
        f"{_MODEL}/infer": {"post": _inference("Run a model on tensors.", _INFER)},
        f"{_MODEL}/generate": {"post": _inference("Run a model on one JSON object; one response.", _GENERATE)},
        f"{_MODEL}/generate_stream": {
            "post": _inference("As generate; every response is a server-sent event.", _GENERATE, "text/event-stream")
        },
        **_control_paths(),
    }


def _control_paths() -> dict[str, Any]:
    repository, system, cuda = "/v2/repository", "/v2/systemsharedmemory", "/v2/cudasharedmemory"
    region = ("region",)
    return {
        f"{repository}/index": {"post": _operation("The repository's models and their states.", _INDEX)},
        f"{repository}/models/{{model}}/load": {"post": _operation("Load a model.", _LOAD, ("model",))},
        f"{repository}/models/{{model}}/unload": {"post": _operation("Unload a model.", _UNLOAD, ("model",))},
        f"{repository}/models/{{model}}/routing": {
            "get": _operation("How versions share the requests that name no version.", path=("model",)),
            "post": _operation("Change how versions share them.", _ROUTING, ("model",)),
        },
        f"{system}/status": {"get": _operation("The registered regions.")},
        f"{system}/region/{{region}}/status": {"get": _operation("One registered region.", path=region)},
        f"{system}/region/{{region}}/register": {"post": _operation("Register shared memory.", _REGION, region)},
        f"{system}/region/{{region}}/unregister": {"post": _operation("Forget a region.", path=region)},
        f"{system}/unregister": {"post": _operation("Forget every region.")},
        f"{cuda}/status": {"get": _operation("The registered regions of GPU memory: none.")},
        "/v2/trace/setting": _settings("The trace settings.", (), {"trace_rate": "1000"}),
        f"{_MODEL}/trace/setting": _settings("The trace settings of a model.", ("model",), {"trace_rate": "100"}),
        "/v2/logging": _settings("The log settings.", (), {"log_verbose_level": 1}),
    }


def _settings(summary: str, path: tuple[str, ...], example: dict[str, Any]) -> dict[str, Any]:
    body = {**_SETTINGS, "example": example}
    return {
        "get": _operation(summary, path=path),
        "post": _operation(f"Change and return: {summary[0].lower()}{summary[1:]}", body, path),
    }


def _inference(summary: str, body: dict[str, Any], content: str = "application/json") -> dict[str, Any]:
    operation = _operation(summary, body, ("model",), content)
    operation["parameters"] += SCHEDULING_PARAMETERS
    return operation


def _operation(
    summary: str, body: dict[str, Any] | None = None, path: tuple[str, ...] = (), content: str = "application/json"
) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "tags": [_TAG],
        "summary": summary,
        "parameters": [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in path],
        "responses": {"200": {"description": "Done.", "content": {content: {}}}},
    }
    if body is not None:
        schema = {name: value for name, value in body.items() if name != "example"}
        operation["requestBody"] = {"content": {"application/json": {"schema": schema, "example": body["example"]}}}
    return operation
