"""The RAG routes of a running server, as `sluice rag` calls them."""

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote, urlsplit

import httpx
import orjson

from cli.rag.events import Event, events_of
from cli.rag.failures import Broken, RagError, Refused, Unreachable
from gateway.options.rag import RagClientOptions
from pipelines.rag import keys

JsonObject = dict[str, Any]

_CONNECT_S = 10.0
_SILENCE_S = 600.0
"""A long document is parsed and encoded before the server says anything, after those that came before it."""
_PAGE = 1000
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class RagClient:
    """One server. Every method raises Unreachable and Refused."""

    def __init__(self, options: RagClientOptions) -> None:
        self.url = options.url
        self._http = httpx.AsyncClient(
            headers=_headers(options),
            timeout=httpx.Timeout(_SILENCE_S, connect=_CONNECT_S),
            limits=httpx.Limits(max_connections=None),
            trust_env=urlsplit(options.url).hostname not in _LOOPBACK,  # a proxy would look for it on itself
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def collections(self) -> list[JsonObject]:
        found: list[JsonObject] = (await self._ask("GET", "/collections"))["data"]
        return found

    async def delete_collection(self, name: str) -> None:
        await self._ask("DELETE", f"/collections/{_quoted(name)}")

    async def documents(self, collection: str) -> AsyncIterator[JsonObject]:
        """All of them, by id."""
        after, has_more = "", True
        while has_more:
            page = await self._ask("GET", f"/{_quoted(collection)}/documents", params={"after": after, "limit": _PAGE})
            for document in page["data"]:
                yield document
                after = document["id"]
            has_more = page["has_more"]

    async def put_document(
        self, collection: str, document_id: str, content: AsyncGenerator[bytes, None], size_bytes: int, force: bool
    ) -> JsonObject:
        """The document as it is; its format is for the server to see."""
        headers = {"content-type": "application/octet-stream", "content-length": str(size_bytes)}
        path = _document_path(collection, document_id)
        return await self._ask("PUT", path, content=content, headers=headers, params=_force(force))

    async def post_document(self, collection: str, document: Mapping[str, Any], force: bool) -> JsonObject:
        """The document as JSON."""
        path = f"/{_quoted(collection)}/documents"
        answer = await self._ask("POST", path, json=document, params=_force(force))
        [told] = answer["data"]
        result: JsonObject = told
        return result

    async def delete_document(self, collection: str, document_id: str) -> None:
        await self._ask("DELETE", _document_path(collection, document_id))

    async def search(self, collection: str, fields: Mapping[str, Any]) -> JsonObject:
        return await self._ask("POST", f"/{_quoted(collection)}/search", json=fields)

    async def query(self, collection: str, fields: Mapping[str, Any]) -> JsonObject:
        """The whole answer."""
        return await self._ask("POST", f"/{_quoted(collection)}/query", json=fields)

    @asynccontextmanager
    async def query_events(
        self, collection: str, fields: Mapping[str, Any]
    ) -> AsyncIterator[AsyncGenerator[Event, None]]:
        """The answer as it comes."""
        url = f"{self.url}/v1/rag/{_quoted(collection)}/query"
        with self._failures():
            async with self._http.stream("POST", url, json={**fields, "stream": True}) as response:
                if response.status_code >= 400:
                    await response.aread()
                    raise _refusal(response)
                yield events_of(response.aiter_bytes())

    async def _ask(self, method: str, path: str, **settings: Any) -> JsonObject:
        with self._failures():
            response = await self._http.request(method, f"{self.url}/v1/rag{path}", **settings)
        if response.status_code >= 400:
            raise _refusal(response)
        answer = _json(response)
        if answer is None:
            raise RagError(f"{self.url} did not answer as Sluice does; is another server there?")
        return answer

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """What httpx raises, in words."""
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout):
            raise Unreachable(f"no server listens at {self.url}; start one with: sluice serve") from None
        except httpx.TimeoutException:
            raise Unreachable(f"{self.url} did not answer within {_SILENCE_S:.0f} s") from None
        except httpx.TransportError as error:
            raise Broken(f"the connection to {self.url} broke ({str(error) or type(error).__name__})") from None
        except httpx.InvalidURL as error:
            raise RagError(f"{self.url}: {error}") from None


def _headers(options: RagClientOptions) -> dict[str, str]:
    headers = {}
    if options.api_key is not None:
        headers["authorization"] = f"Bearer {options.api_key}"
    if options.collection_key is not None:
        headers[keys.HEADER] = options.collection_key
    return headers


def _quoted(name: str) -> str:
    return quote(name, safe="")


def _document_path(collection: str, document_id: str) -> str:
    return f"/{_quoted(collection)}/documents/{quote(document_id, safe='/')}"


def _force(force: bool) -> dict[str, str]:
    return {"force": "true"} if force else {}


def _refusal(response: httpx.Response) -> Refused:
    body = _json(response) or {}
    error = body.get("error")
    message, param = (error.get("message"), error.get("param")) if isinstance(error, dict) else (error, None)
    if not isinstance(message, str):
        message = f"{response.url.host} answered {response.status_code} {response.reason_phrase}"
    if response.status_code == 404 and message.startswith("no route"):
        message = f"the server at {response.url.netloc.decode()} has no collections of documents: {message}"
    if response.status_code == 401:
        message += " (sluice rag: set SLUICE_API_KEY)"
    after = response.headers.get("retry-after", "")
    retry_after_s = float(after) if after.isascii() and after.isdigit() else None
    return Refused(message, response.status_code, retry_after_s, param if isinstance(param, str) else "")


def _json(response: httpx.Response) -> JsonObject | None:
    """The answer's object; None where it is none."""
    try:
        answer = orjson.loads(response.content)
    except orjson.JSONDecodeError:
        return None
    return answer if isinstance(answer, dict) else None
