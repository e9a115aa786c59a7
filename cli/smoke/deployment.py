"""The deployment under examination: its addresses, its models, and requests to it."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Any, NoReturn, Self
from urllib.parse import quote, urlsplit

import httpx
import orjson

from sluice.addresses import host_and_port
from sluice.cli.server import (
    DONE,
    JsonObject,
    SseEvent,
    find_metrics,
    open_client,
    parse_events,
    read_object,
)
from sluice.cli.terminal import shorten_line
from sluice.gateway.watch.live.scrape import Scrape, parse_scrape

_CONNECT_S = 10.0
_SHOWN_CHARS = 160


class SmokeFailedError(Exception):
    """Raised by a check that saw something wrong; the message says what came and what was expected."""


class SmokeSkippedError(Exception):
    """Raised by a check that this deployment has nothing for; the message says why."""


@dataclass(frozen=True, slots=True)
class SmokeTarget:
    """The addresses of the deployment. `grpc` and `metrics_url` are "" where they are not to be examined, and None
    where the server says at which port they are."""

    url: str
    grpc: str | None
    metrics_url: str | None
    api_key: str | None = None
    model: str = ""
    """The language model to ask; "" for the first that there is."""
    timeout_s: float = 60.0
    """Timeout of a request in seconds."""


class Deployment:
    """Sends requests to the deployment. What does not answer, or otherwise than expected, is a SmokeFailedError."""

    def __init__(self, target: SmokeTarget) -> None:
        self.target = target
        self.language_model = ""
        """A model that generates text; "" before `find_models` and where there is none."""
        self.encoder = ""
        """A model that makes vectors of texts; "" where there is none."""
        self._metrics_url = target.metrics_url
        self._grpc: JsonObject | None = None
        """The server's description of its gRPC, None before the first request for it."""
        timeout = httpx.Timeout(target.timeout_s, connect=min(_CONNECT_S, target.timeout_s))
        self._http = open_client(target.url, target.api_key, timeout)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def find_models(self) -> list[str]:
        """Choose the models to ask, and return the names of all that are ready."""
        names = [str(model["id"]) for model in (await self.get("/v1/models"))["data"]]
        if self.target.model and self.target.model not in names:
            raise SmokeFailedError(f"no model is named {self.target.model!r}; there are: {', '.join(names) or 'none'}")
        for name in names:
            about = await self._http.get(f"{self.target.url}/v2/models/{quote(name, safe='')}")
            if about.status_code != 200:  # a route or an adapter: no model of the v2 protocol
                continue
            inputs = {each["name"] for each in about.json().get("inputs", ())}
            outputs = {each["name"] for each in about.json().get("outputs", ())}
            if {"text_input"} <= inputs and {"text_output"} <= outputs and self.target.model in ("", name):
                self.language_model = self.language_model or name
            elif "text" in inputs and "embeddings" in outputs:
                self.encoder = self.encoder or name
        return names

    def required_language_model(self) -> str:
        """Return the language model's name. Raises SmokeSkippedError where there is none."""
        if not self.language_model:
            raise SmokeSkippedError("no language model is served")
        return self.language_model

    def required_encoder(self) -> str:
        """Return the encoder's name. Raises SmokeSkippedError where there is none."""
        if not self.encoder:
            raise SmokeSkippedError("no model makes vectors of texts")
        return self.encoder

    async def get(self, path: str) -> JsonObject:
        """Return the JSON object at `path`."""
        return _object(await self.send("GET", path))

    async def post(self, path: str, body: JsonObject) -> JsonObject:
        """Return the JSON object that answers `body`."""
        return _object(await self.send("POST", path, json=body))

    async def send(self, method: str, path: str, **settings: Any) -> httpx.Response:
        """Return the response, which has a status below 400."""
        response = await self.try_to_send(method, path, **settings)
        if response.status_code >= 400:
            fail(f"{method} {path}", response)
        return response

    async def try_to_send(self, method: str, path: str, **settings: Any) -> httpx.Response:
        """Return the response, whatever its status."""
        try:
            return await self._http.request(method, f"{self.target.url}{path}", **settings)
        except httpx.HTTPError as error:
            raise SmokeFailedError(f"{method} {path}: {describe(error)}") from None

    @asynccontextmanager
    async def stream(self, path: str, body: JsonObject) -> AsyncIterator[httpx.Response]:
        """Open a stream, which has status 200. To leave the context closes it, as a client does that goes away."""
        try:
            async with self._http.stream("POST", f"{self.target.url}{path}", json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    fail(f"POST {path}", response)
                yield response
        except httpx.HTTPError as error:
            raise SmokeFailedError(f"POST {path}: {describe(error)}") from None

    async def events(self, path: str, body: JsonObject) -> list[SseEvent]:
        """Return all events of a stream. An error event is a failure."""
        async with self.stream(path, body) as response:
            events = [event async for event in parse_events(response.aiter_bytes())]
        for event in events:
            if event.name == "error" or (isinstance(event.payload, dict) and event.payload.get("error")):
                raise SmokeFailedError(f"POST {path}: the stream ended with {shorten(orjson.dumps(event.payload))}")
        return events

    async def events_until_done(self, path: str, body: JsonObject) -> list[JsonObject]:
        """Return the payloads of a stream that must end with `[DONE]`."""
        events = await self.events(path, body)
        if not events or events[-1].name != DONE:
            raise SmokeFailedError(f"POST {path}: the stream of {len(events)} events did not end with [DONE]")
        return [event.payload for event in events[:-1]]

    async def lines(self, path: str, body: JsonObject) -> AsyncGenerator[JsonObject, None]:
        """Yield the objects of a stream of JSON lines."""
        async with self.stream(path, body) as response:
            async for line in response.aiter_lines():
                if line:
                    yield orjson.loads(line)

    async def find_grpc(self) -> tuple[str, bool]:
        """Return the address of gRPC, and whether it uses TLS. Raises SmokeSkippedError if gRPC is off."""
        address = self.target.grpc
        if address == "":
            raise SmokeSkippedError("--grpc none")
        if address is not None:
            return address, self.target.url.startswith("https://")
        if self._grpc is None:
            self._grpc = (await self.get("/")).get("grpc") or {}
        if not self._grpc:
            raise SmokeSkippedError("the server says that it has no gRPC (--allow-grpc=false)")
        host = urlsplit(self.target.url).hostname or ""
        return host_and_port(host, self._grpc["port"]), self._grpc["tls"]

    async def scrape(self) -> Scrape:
        """Read the metrics. Raises SmokeSkippedError where there are none."""
        if self._metrics_url is None:
            self._metrics_url = find_metrics(self.target.url, await self.get("/"))
        url = self._metrics_url
        if not url:
            raise SmokeSkippedError("--metrics none, or the server has no page of them (--allow-metrics=false)")
        try:
            response = await self._http.get(url, headers={"accept": "text/plain"})
        except httpx.HTTPError as error:
            raise SmokeFailedError(f"{url}: {describe(error)}; give its address with --metrics, or none") from None
        if response.status_code != 200:
            fail(f"GET {url}", response)
        return parse_scrape(response.text, monotonic())


def fail(request: str, response: httpx.Response) -> NoReturn:
    """Raise a SmokeFailedError about a response of the wrong status."""
    hint = "; give a key with --api-key or SLUICE_API_KEY" if response.status_code == 401 else ""
    raise SmokeFailedError(f"{request}: status {response.status_code}, {shorten(response.content)}{hint}")


def shorten(content: bytes) -> str:
    """Return the beginning of a body, on one line."""
    return shorten_line(content.decode(errors="replace"), _SHOWN_CHARS) or "an empty body"


def describe(error: httpx.HTTPError) -> str:
    """Describe in words how a request failed on the way."""
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return "nothing listens there"
    if isinstance(error, httpx.TimeoutException):
        return "no answer in time"
    return str(error) or type(error).__name__


def _object(response: httpx.Response) -> JsonObject:
    value = read_object(response)
    if value is None:
        raise SmokeFailedError(
            f"{response.request.method} {response.request.url.path}: expected a JSON object, got "
            f"{shorten(response.content)}"
        )
    return value
