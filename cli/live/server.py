"""Asks a running server over HTTP: what it is, how it is, its metrics and its open requests."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from time import monotonic
from types import TracebackType
from typing import Any, NoReturn, Self

import httpx
import orjson

from sluice.cli.loopback import is_loopback
from sluice.cli.sse import SseEvent, parse_events
from sluice.gateway.watch.live.bounds import Health
from sluice.gateway.watch.live.scrape import Scrape, parse_scrape

TIMEOUT_S = 10.0
_LIVE, _LOGS = "/v1/admin/live", "/v1/admin/logs"
_UNAVAILABLE = 503
_REFUSED = (401, 403)


class ServerError(Exception):
    """A server that cannot be asked; the text is for the user. `is_refusal`: it wants another key."""

    def __init__(self, text: str, *, is_refusal: bool = False) -> None:
        super().__init__(text)
        self.is_refusal = is_refusal


class RunningServer:
    """A server at a URL. An async context manager; used on one event loop."""

    def __init__(self, url: str, api_key: str | None = None, metrics_url: str | None = None) -> None:
        """`metrics_url` None: the server says at which port its metrics are."""
        self.url = url.rstrip("/")
        self._metrics_url = metrics_url
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._client = httpx.AsyncClient(headers=headers, timeout=TIMEOUT_S, trust_env=not is_loopback(url))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def health(self) -> Health:
        """Ask whether the server takes requests, and what is not as it should be."""
        answer = await self._ask("GET", f"{self.url}/health", allowed=(_UNAVAILABLE,))
        body = _read_object(answer, self.url)
        if answer.status_code == _UNAVAILABLE:
            return Health(str(body.get("reason", "it is not ready")))
        return Health("", [str(each) for each in body.get("degraded", [])])

    async def scrape(self) -> Scrape:
        """Read the metrics page."""
        url = await self._find_metrics()
        answer = await self._ask("GET", url, headers={"accept": "text/plain"})
        try:
            return parse_scrape(answer.text, monotonic())
        except ValueError as error:
            raise ServerError(f"{url} is no page of metrics: {error}") from None

    async def _find_metrics(self) -> str:
        if self._metrics_url is None:
            overview = _read_object(await self._ask("GET", f"{self.url}/"), self.url)
            if overview.get("name") != "Sluice":
                raise ServerError(f"{self.url} is no server of Sluice")
            self._metrics_url = find_metrics(self.url, overview)
            if not self._metrics_url:
                raise ServerError(f"{self.url} has no metrics (--allow-metrics=false), by which it is judged")
        return self._metrics_url

    async def model_config(self, name: str) -> dict[str, Any]:
        """Return a model's configuration, completed by the server."""
        return _read_object(await self._ask("GET", f"{self.url}/v2/models/{name}/config"), self.url)

    async def sample_once(self, interval_s: float) -> dict[str, Any]:
        """Ask what the server does; it measures for `interval_s`."""
        url = f"{self.url}{_LIVE}?once=true&interval_secs={interval_s:g}"
        return _read_object(await self._ask("GET", url, timeout_s=interval_s + TIMEOUT_S), self.url)

    async def samples(self, interval_s: float) -> AsyncGenerator[dict[str, Any], None]:
        """Yield what the server does, until it ends the stream."""
        async with aclosing(self._events(f"{_LIVE}?interval_secs={interval_s:g}", interval_s + TIMEOUT_S)) as events:
            async for event in events:
                if event.name == "sample":
                    yield event.payload

    async def log_lines(self, query: Mapping[str, str]) -> list[dict[str, Any]]:
        """Return lines of its log."""
        url = str(httpx.URL(f"{self.url}{_LOGS}", params=dict(query)))
        return list(_read_object(await self._ask("GET", url), self.url)["data"])

    async def follow_log(self, query: Mapping[str, str]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield lines of its log, and those that come, until it ends the stream."""
        path = str(httpx.URL(_LOGS, params={**query, "follow": "true"}))
        async with aclosing(self._events(path, 60.0)) as events:
            async for event in events:
                if event.name == "line":
                    yield event.payload

    async def _events(self, path: str, silence_s: float) -> AsyncGenerator[SseEvent, None]:
        """Yield the events of a stream, which is silent for at most so long."""
        url = f"{self.url}{path}"
        try:
            async with self._client.stream("GET", url, timeout=silence_s) as answer:
                if not answer.is_success:
                    await answer.aread()
                    _refuse(answer, url)
                async with aclosing(parse_events(answer.aiter_bytes())) as events:
                    async for event in events:
                        yield event
        except httpx.HTTPError as error:
            raise ServerError(f"{url} cannot be reached: {error or type(error).__name__}") from None
        except httpx.InvalidURL as error:
            raise ServerError(f"{url} is no address: {error}") from None

    async def cancel_request(self, id_: str) -> None:
        """End an open generation."""
        await self._ask("POST", f"{self.url}/v1/admin/requests/{id_}/cancel")

    async def _ask(
        self,
        method: str,
        url: str,
        allowed: tuple[int, ...] = (),
        headers: Mapping[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> httpx.Response:
        try:
            answer = await self._client.request(method, url, headers=headers, timeout=timeout_s)
        except httpx.HTTPError as error:
            raise ServerError(f"{url} cannot be reached: {error or type(error).__name__}") from None
        except httpx.InvalidURL as error:
            raise ServerError(f"{url} is no address: {error}") from None
        if not answer.is_success and answer.status_code not in allowed:
            _refuse(answer, url)
        return answer


def _refuse(answer: httpx.Response, url: str) -> NoReturn:
    """Raise ServerError for an answer that is none."""
    if answer.status_code in _REFUSED:
        text = f"{url}: {_message(answer)}; a key is given by --api-key or SLUICE_API_KEY"
        raise ServerError(text, is_refusal=True)
    raise ServerError(f"{url} answered with status {answer.status_code}: {_message(answer)}")


def find_metrics(url: str, overview: Mapping[str, Any]) -> str:
    """Return the address of the metrics page, by what the server at `url` says of itself at `/`; "" for none."""
    place = overview.get("metrics")
    if not isinstance(place, Mapping):
        return ""
    return str(httpx.URL(url).copy_with(scheme="http", port=place["port"], path=place["path"]))


def _read_object(answer: httpx.Response, url: str) -> dict[str, Any]:
    try:
        body = orjson.loads(answer.content)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise ServerError(f"{url} is no server of Sluice: {answer.request.url.path} is no JSON object")
    return body


def _message(answer: httpx.Response) -> str:
    try:
        error = orjson.loads(answer.content)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return answer.reason_phrase or "no reason given"
