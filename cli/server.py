"""Asks a running server over HTTP: what it is, how it is, its metrics, its open requests, its ledger."""

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from time import monotonic
from typing import Any, NamedTuple, NoReturn, Self

import httpx
import orjson

from sluice.addresses import is_loopback
from sluice.cli.errors import CommandError
from sluice.gateway.options.config import read_client_options
from sluice.gateway.options.option import OneLineParser
from sluice.gateway.tenancy.ledger.store import PAGE_ROWS
from sluice.gateway.watch.live.bounds import Health
from sluice.gateway.watch.live.scrape import Scrape, parse_scrape

TIMEOUT_S = 10.0
DONE = "[DONE]"
_LEDGER_S = 30.0
"""Seconds for the answers that take longest: a ledger's, and a profile's beyond its recording."""
_LIVE, _LOGS, _USAGE = "/v1/admin/live", "/v1/admin/logs", "/v1/usage"
_UNAVAILABLE = 503
_REFUSED = (401, 403)

JsonObject = dict[str, Any]


class ServerError(CommandError):
    """The server did not answer, or refused. `is_refusal`: it wants another key."""

    def __init__(self, text: str, *, is_refusal: bool = False) -> None:
        super().__init__(text)
        self.is_refusal = is_refusal


def open_client(
    url: str, api_key: str | None, timeout: float | httpx.Timeout, headers: Mapping[str, str] | None = None
) -> httpx.AsyncClient:
    """Return a client of the server at `url`, which the caller closes. No proxy stands before one of this machine."""
    key = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(
        headers={**key, **(headers or {})}, timeout=timeout, limits=limits, trust_env=not is_loopback(url)
    )


def read_object(answer: httpx.Response) -> JsonObject | None:
    """Return the JSON object in an answer; None where its body is none."""
    try:
        value = orjson.loads(answer.content)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


class SseEvent(NamedTuple):
    """An event with its JSON. The last event of a complete answer of many routes is DONE, without payload."""

    name: str
    payload: Any


async def parse_events(chunks: AsyncIterator[bytes]) -> AsyncGenerator[SseEvent, None]:
    """Yield the events in `chunks`, which may be cut anywhere. Comments and an incomplete last event are dropped."""
    rest = b""
    async for chunk in chunks:
        *frames, rest = (rest + chunk).split(b"\n\n")
        for frame in frames:
            if (event := _parse_event(frame)) is not None:
                yield event


def _parse_event(frame: bytes) -> SseEvent | None:
    name, payload = "message", None
    for line in frame.split(b"\n"):  # not splitlines(): the text itself may contain U+2028
        field, _, value = line.partition(b": ")
        if field == b"event":
            name = value.decode()
        elif field == b"data":
            payload = value
    if payload is None:
        return None
    if payload == DONE.encode():
        return SseEvent(DONE, None)
    return SseEvent(name, orjson.loads(payload))


def add_server_arguments(parser: OneLineParser, metavar: str = "URL", dest: str = "url") -> None:
    """Add the arguments that name a server, for `find_server`. The first may also name something else."""
    parser.add_argument(dest, nargs="?", metavar=metavar, help="the server. Default: SLUICE_URL, else the local one")
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help="a key of the group admin, where the server asks for one. Better set SLUICE_API_KEY: every user of the "
        "machine can read a command line",
    )


def find_server(url: str | None, api_key: str | None, metrics_url: str | None = None) -> "RunningServer":
    """Return the server that the arguments name, or else the environment. Raises OptionError."""
    given = {"--url": url, "--api-key": api_key}
    options = read_client_options({flag: value for flag, value in given.items() if value is not None})
    return RunningServer(options.url, options.api_key, metrics_url)


class RunningServer:
    """A server at a URL. An async context manager; used on one event loop."""

    def __init__(self, url: str, api_key: str | None = None, metrics_url: str | None = None) -> None:
        """`metrics_url` None: the server says at which port its metrics are."""
        self.url = url.rstrip("/")
        self._metrics_url = metrics_url
        self._client = open_client(url, api_key, TIMEOUT_S)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def health(self) -> Health:
        """Return whether the server takes requests, and its degradations."""
        answer = await self._ask("GET", f"{self.url}/health", allowed=(_UNAVAILABLE,))
        body = _object(answer, self.url)
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
            overview = _object(await self._ask("GET", f"{self.url}/"), self.url)
            if overview.get("name") != "Sluice":
                raise ServerError(f"{self.url} is no server of Sluice")
            self._metrics_url = find_metrics(self.url, overview)
            if not self._metrics_url:
                raise ServerError(f"{self.url} has no metrics (--allow-metrics=false), by which it is judged")
        return self._metrics_url

    async def model_config(self, name: str) -> JsonObject:
        """Return a model's configuration, completed by the server."""
        return _object(await self._ask("GET", f"{self.url}/v2/models/{name}/config"), self.url)

    async def sample_once(self, interval_s: float) -> JsonObject:
        """Return one sample of the server's activity, measured over `interval_s`."""
        query = {"once": "true", "interval_secs": f"{interval_s:g}"}
        return _object(await self._ask("GET", self._url(_LIVE, query), timeout_s=interval_s + TIMEOUT_S), self.url)

    def samples(self, interval_s: float) -> AsyncGenerator[JsonObject, None]:
        """Yield samples of the server's activity, until it ends the stream."""
        return self._events("sample", self._url(_LIVE, {"interval_secs": f"{interval_s:g}"}), interval_s + TIMEOUT_S)

    async def log_lines(self, query: Mapping[str, str]) -> list[JsonObject]:
        """Return lines of the server's log."""
        return list(_object(await self._ask("GET", self._url(_LOGS, query)), self.url)["data"])

    def follow_log(self, query: Mapping[str, str]) -> AsyncGenerator[JsonObject, None]:
        """Yield lines of the server's log, then new ones, until it ends the stream."""
        return self._events("line", self._url(_LOGS, {**query, "follow": "true"}), 60.0)

    async def cancel_request(self, id_: str) -> None:
        """End an open generation."""
        await self._ask("POST", f"{self.url}/v1/admin/requests/{id_}/cancel")

    async def record_profile(self, seconds: float) -> bytes:
        """Record the server for `seconds`, and return the trace."""
        url = self._url("/v1/admin/profile", {"seconds": f"{seconds:g}"})
        return (await self._ask("POST", url, timeout_s=seconds + _LEDGER_S)).content

    async def usage(self, query: Mapping[str, str]) -> JsonObject:
        """Return the sums of the server's ledger."""
        return _object(await self._ask("GET", self._url(_USAGE, query), timeout_s=_LEDGER_S), self.url)

    async def usage_rows(self, query: Mapping[str, str]) -> AsyncGenerator[list[JsonObject], None]:
        """Yield the ledger's rows of requests, page by page."""
        page = []
        async with self._stream(self._url(f"{_USAGE}/requests", query), _LEDGER_S) as answer:
            async for line in answer.aiter_lines():
                page.append(orjson.loads(line))
                if len(page) == PAGE_ROWS:
                    yield page
                    page = []
        if page:
            yield page

    def _url(self, path: str, query: Mapping[str, str]) -> str:
        return str(httpx.URL(f"{self.url}{path}", params=dict(query)))

    async def _events(self, name: str, url: str, silence_s: float) -> AsyncGenerator[JsonObject, None]:
        """Yield the payloads of the events called `name` of a stream, which is silent for at most `silence_s`."""
        async with self._stream(url, silence_s) as answer, aclosing(parse_events(answer.aiter_bytes())) as events:
            async for event in events:
                if event.name == name:
                    yield event.payload

    @asynccontextmanager
    async def _stream(self, url: str, silence_s: float) -> AsyncIterator[httpx.Response]:
        with _translated(url):
            async with self._client.stream("GET", url, timeout=silence_s) as answer:
                if not answer.is_success:
                    await answer.aread()
                    _refuse(answer, url)
                yield answer

    async def _ask(
        self,
        method: str,
        url: str,
        allowed: tuple[int, ...] = (),
        headers: Mapping[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> httpx.Response:
        with _translated(url):
            answer = await self._client.request(method, url, headers=headers, timeout=timeout_s)
        if not answer.is_success and answer.status_code not in allowed:
            _refuse(answer, url)
        return answer


@contextmanager
def _translated(url: str) -> Iterator[None]:
    """Turn errors of httpx into ServerErrors."""
    try:
        yield
    except httpx.HTTPError as error:
        raise ServerError(f"{url} cannot be reached: {error or type(error).__name__}") from None
    except httpx.InvalidURL as error:
        raise ServerError(f"{url} is no address: {error}") from None


def _refuse(answer: httpx.Response, url: str) -> NoReturn:
    """Raise ServerError for an answer with an error's status."""
    error = (read_object(answer) or {}).get("error")
    message = str(error.get("message") if isinstance(error, dict) else error or answer.reason_phrase)
    if answer.status_code in _REFUSED:
        text = f"{url}: {message}; a key is given by --api-key or SLUICE_API_KEY"
        raise ServerError(text, is_refusal=True)
    raise ServerError(f"{url} answered with status {answer.status_code}: {message}")


def find_metrics(url: str, overview: Mapping[str, Any]) -> str:
    """Return the address of the metrics page, by the overview at `/` of the server at `url`; "" for none."""
    place = overview.get("metrics")
    if not isinstance(place, Mapping):
        return ""
    return str(httpx.URL(url).copy_with(scheme="http", port=place["port"], path=place["path"]))


def _object(answer: httpx.Response, url: str) -> JsonObject:
    body = read_object(answer)
    if body is None:
        raise ServerError(f"{url} is no server of Sluice: {answer.request.url.path} is no JSON object")
    return body
