"""Asks a running server over HTTP: what it is, how it is, its metrics and its open requests."""

from collections.abc import Mapping
from time import monotonic
from types import TracebackType
from typing import Any, Self

import httpx
import orjson

from gateway.live.bounds import Health
from gateway.live.scrape import Scrape, parse_scrape

TIMEOUT_S = 10.0
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
        self._client = httpx.AsyncClient(headers=headers, timeout=TIMEOUT_S)

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

    async def _ask(
        self, method: str, url: str, allowed: tuple[int, ...] = (), headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        try:
            answer = await self._client.request(method, url, headers=headers)
        except httpx.HTTPError as error:
            raise ServerError(f"{url} cannot be reached: {error or type(error).__name__}") from None
        except httpx.InvalidURL as error:
            raise ServerError(f"{url} is no address: {error}") from None
        if answer.is_success or answer.status_code in allowed:
            return answer
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
