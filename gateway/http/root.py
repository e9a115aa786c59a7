"""Routes that belong to no protocol: `GET /`, which says what this server is, and `GET /health`, a probe."""

from dataclasses import dataclass
from html import escape
from importlib.metadata import version

import orjson
from fastapi import APIRouter, Request, Response

from gateway.service import InferenceService

_JSON = "application/json"
_LINKS = {
    "/docs": "routes and schemas, to try out (/openapi.json: as a document)",
    "/v1/models": "OpenAI API: the models",
    "/v2": "Triton's v2 protocol: the server",
    "/health": "readiness",
}
_DOCUMENTATION = "README.md and docs/ in Sluice's source"
_NO_RESOURCES = "default-src 'none'; style-src 'unsafe-inline'"
"""Content-Security-Policy of a page that loads nothing."""
_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Sluice</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 42rem; margin: 3rem auto; padding: 0 1rem; }}
code {{ font-family: ui-monospace, monospace; }}
dt {{ margin-top: .5rem; }}
</style>
</head>
<body>
<h1>Sluice {version}</h1>
<p>LLM streaming gateway: OpenAI and Triton v2 APIs. <strong>{state}</strong></p>
<h2>Models</h2>
<ul>
{models}
</ul>
<h2>Where things are</h2>
<dl>
{links}
</dl>
</body>
</html>
"""


def router(service: InferenceService, metrics_port: int | None = None) -> APIRouter:
    """Return the routes. `metrics_port` None: there is no metrics page."""
    routes = APIRouter(tags=["server"])

    @routes.head("/", include_in_schema=False)
    @routes.get("/", response_class=Response)
    async def overview(request: Request) -> Response:
        """Describe the server: HTML for a browser, JSON for others."""
        found = _read_overview(service, metrics_port)
        headers = {"vary": "accept", "cache-control": "no-cache"}
        if "text/html" not in request.headers.get("accept", ""):
            return Response(found.json(), headers=headers, media_type=_JSON)
        return Response(
            found.html(), headers={**headers, "content-security-policy": _NO_RESOURCES}, media_type="text/html"
        )

    @routes.get("/health", response_class=Response)
    async def health() -> Response:
        """Answer 200 while a new request would be served; else 503 and the reason."""
        readiness = service.readiness()
        if readiness.is_ok:
            return Response(b'{"status":"ok"}', media_type=_JSON)
        body = orjson.dumps({"status": "unavailable", "reason": readiness.reason})
        return Response(body, 503, media_type=_JSON)

    return routes


@dataclass(frozen=True, slots=True)
class Overview:
    """The server in short. `problem` says why it is not ready, and is empty where it is."""

    version: str
    problem: str
    models: list[str]
    metrics_port: int | None

    def json(self) -> bytes:
        fields: dict[str, object] = {"name": "Sluice", "version": self.version, "ready": not self.problem}
        if self.problem:
            fields["reason"] = self.problem
        fields |= {"models": self.models, "links": _LINKS, "documentation": _DOCUMENTATION}
        if self.metrics_port is not None:
            fields["metrics"] = {"port": self.metrics_port, "path": "/metrics"}
        return orjson.dumps(fields)

    def html(self) -> str:
        links = [f'<dt><a href="{path}">{path}</a></dt><dd>{text}</dd>' for path, text in _LINKS.items()]
        if self.metrics_port is not None:
            links.append(f"<dt>port {self.metrics_port}, <code>/metrics</code></dt><dd>Prometheus metrics</dd>")
        links.append(f"<dt>documentation</dt><dd>{_DOCUMENTATION}</dd>")
        models = [f"<li><code>{escape(name)}</code></li>" for name in self.models] or ["<li>none</li>"]
        return _PAGE.format(
            version=escape(self.version),
            state=f"Not ready: {escape(self.problem)}." if self.problem else "Ready.",
            models="\n".join(models),
            links="\n".join(links),
        )


def _read_overview(service: InferenceService, metrics_port: int | None) -> Overview:
    """Read the server's state. Models that answer conversations come first, as in the list of the OpenAI API."""
    names = [model.name for model in service.text_models()] + [model.name for model in service.repository.models()]
    return Overview(version("sluice"), service.readiness().reason, list(dict.fromkeys(names)), metrics_port)
