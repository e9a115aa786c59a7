"""Routes that belong to no protocol: `/` and `/version` say what this server is, `/health` and `/ping` are probes."""

from dataclasses import dataclass
from html import escape

import orjson
from fastapi import APIRouter, Request, Response

from sluice import __version__
from sluice.gateway.calls import is_visible
from sluice.gateway.front.http.access import CONSOLE, find_api_category
from sluice.gateway.front.http.openapi import PAGE_HEADERS
from sluice.gateway.front.listeners import GrpcEndpoint, OtherPorts
from sluice.gateway.front.path_masking import hide_paths
from sluice.gateway.front.restrictions import ApiCategory, Restrictions
from sluice.gateway.options.http import HttpOptions
from sluice.gateway.plane.data_plane import Plane
from sluice.gateway.plane.rooms import Rooms

_JSON = "application/json"
_LINKS = {
    f"{CONSOLE}/": "the console: watch the server and try its models in the browser",
    "/docs": "every route with its schema, to try out (/openapi.json: as a document)",
    "/v1/models": "OpenAI API: the language models",
    "/v1/rag/collections": "RAG: the collections of documents",
    "/v2": "Triton's v2 protocol: the server and its extensions",
    "/health": "whether the server takes requests",
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
:root {{ color-scheme: light dark; }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 3rem auto; padding: 0 1rem; }}
h1 {{ margin-bottom: 0; }}
h2 {{ font-size: 1.1rem; margin: 2rem 0 .5rem; }}
ul {{ margin: 0; padding-left: 1.2rem; }}
code, pre {{ font: .9em/1.5 ui-monospace, monospace; }}
pre {{ padding: .8rem 1rem; border: 1px solid #8886; border-radius: .4rem; overflow-x: auto; }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: .3rem 1.5rem; margin: 0; }}
dd {{ margin: 0; }}
</style>
</head>
<body>
<h1>Sluice {version}</h1>
<p>A streaming gateway for language models: the OpenAI API, Triton's v2 protocol and RAG. <strong>{state}</strong></p>
<h2>Models</h2>
<ul>
{models}
</ul>
{example}<h2>Where things are</h2>
<dl>
{links}
</dl>
</body>
</html>
"""
_EXAMPLE = """\
<h2>Try it</h2>
<pre>curl -N {url}v1/chat/completions \\
  -H 'content-type: application/json'{key} -d '
{{"model": "{model}", "stream": true,
 "messages": [{{"role": "user", "content": "What can you do?"}}]}}'</pre>
"""


def router(plane: Plane, rooms: Rooms, options: HttpOptions, ports: OtherPorts, *, has_library: bool) -> APIRouter:
    """Return the routes. `has_library`: there are collections of documents."""
    routes = APIRouter(tags=["server"])
    restrictions = Restrictions(options.restrictions)
    links = _find_links(restrictions, options, has_library=has_library)

    @routes.get("/", response_class=Response)
    async def overview(request: Request) -> Response:
        """Describe the server: HTML for a browser, JSON for others."""
        # Models that answer conversations come first, as in the list of the OpenAI API.
        llms = [model.name for model in plane.text_models()]
        models = list(
            dict.fromkeys(llms + [model.name for model in plane.repository.models() if is_visible(model.name)])
        )
        found = Overview(hide_paths(plane.health.why_not_ready()), models, links, *ports)
        headers = {"vary": "accept", "cache-control": "no-cache"}
        if "text/html" not in request.headers.get("accept", ""):
            return Response(found.json(), headers=headers, media_type=_JSON)
        is_open = restrictions.find(ApiCategory.INFERENCE) is None
        page = found.html(request, llms[0] if llms and is_open else "")
        return Response(
            page, headers={**headers, **PAGE_HEADERS, "content-security-policy": _NO_RESOURCES}, media_type="text/html"
        )

    @routes.get("/health", response_class=Response)
    async def health() -> Response:
        """Answer 200 while a new request would be served; else 503 and the reason."""
        problem = plane.health.why_not_ready()
        if not problem:
            degraded = list(map(hide_paths, rooms.degradations()))
            body = orjson.dumps({"status": "ok", "degraded": degraded}) if degraded else b'{"status":"ok"}'
            return Response(body, media_type=_JSON)
        body = orjson.dumps({"status": "unavailable", "reason": hide_paths(problem)})
        return Response(body, 503, media_type=_JSON)

    @routes.get("/ping", response_class=Response)
    @routes.post("/ping", response_class=Response)
    async def ping() -> Response:
        """Answer as /health: the probe of hosts that expect this path."""
        return await health()

    @routes.get("/version", response_class=Response)
    async def version() -> Response:
        """Return the server's version."""
        return Response(orjson.dumps({"version": __version__}), media_type=_JSON)

    return routes


def _find_links(restrictions: Restrictions, options: HttpOptions, *, has_library: bool) -> dict[str, str]:
    """Return the links that are served and need no other header than `GET /`, whose category is metadata."""
    found = dict(_LINKS)
    if not has_library:
        del found["/v1/rag/collections"]
    if not options.serves_console:
        del found[f"{CONSOLE}/"]
    categories = {path: find_api_category(path) for path in found}
    return {
        path: text
        for path, text in found.items()
        if categories[path] is ApiCategory.METADATA or restrictions.find(categories[path]) is None
    }


@dataclass(frozen=True, slots=True)
class Overview:
    """The server in short. `problem` says why it is not ready, and is empty where it is."""

    problem: str
    models: list[str]
    links: dict[str, str]
    metrics_port: int | None
    grpc: GrpcEndpoint | None = None

    def json(self) -> bytes:
        fields: dict[str, object] = {"name": "Sluice", "version": __version__, "ready": not self.problem}
        if self.problem:
            fields["reason"] = self.problem
        fields |= {"models": self.models, "links": self.links, "documentation": _DOCUMENTATION}
        if self.metrics_port is not None:
            fields["metrics"] = {"port": self.metrics_port, "path": "/metrics"}
        if self.grpc is not None:
            fields["grpc"] = {"port": self.grpc.port, "tls": self.grpc.uses_tls}
        return orjson.dumps(fields)

    def html(self, request: Request, llm: str) -> str:
        """Return the page for `request`, with an example request to `llm`, where that is not empty."""
        links = [f'<dt><a href="{path}">{path}</a></dt><dd>{text}</dd>' for path, text in self.links.items()]
        if self.metrics_port is not None:
            url = request.url.replace(scheme="http", port=self.metrics_port, path="/metrics", query="")
            links.append(f'<dt><a href="{escape(str(url))}">:{self.metrics_port}/metrics</a></dt><dd>Prometheus</dd>')
        links.append(f"<dt>documentation</dt><dd>{_DOCUMENTATION}</dd>")
        models = [f"<li><code>{escape(name)}</code></li>" for name in self.models] or ["<li>none</li>"]
        key = " -H 'authorization: Bearer KEY'" if "authorization" in request.headers else ""
        example = _EXAMPLE.format(url=escape(str(request.base_url)), key=key, model=escape(llm)) if llm else ""
        return _PAGE.format(
            version=__version__,
            state=f"Not ready: {escape(self.problem)}." if self.problem else "Ready.",
            models="\n".join(models),
            example=example,
            links="\n".join(links),
        )
