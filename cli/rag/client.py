"""Calls the RAG routes of a running server. Error messages are for the user."""

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import quote

import httpx

from sluice.cli.errors import CommandError
from sluice.cli.server import JsonObject, SseEvent, open_client, parse_events, read_object
from sluice.gateway.options.rag import RagClientOptions
from sluice.pipelines.text.types import OWNER_KEY_HEADER

_CONNECT_S = 10.0
_SILENCE_S = 600.0
"""Timeout for a response. The server parses and encodes a long document, after earlier ones, before it responds."""
_PAGE = 1000
_COMMON_PARAMS = ("collection", "collection_key")
"""Parameters that are the same for all documents of an ingestion."""


class RagError(CommandError):
    """Raised if a command cannot go on."""


class UnreachableError(RagError):
    """Raised if there is no server, or if it stopped responding."""


class BrokenConnectionError(UnreachableError):
    """Raised if the connection ended within a request, which servers do to bodies that they reject unread."""


class RejectedRequestError(RagError):
    """Raised if the server rejected a request. `param` names the field at fault, "" if the server names none.

    `retry_after_s` are the seconds after which the server asks to try again, None if it does not say.
    """

    def __init__(self, message: str, status: int, retry_after_s: float | None = None, param: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s
        self.param = param

    @property
    def is_transient(self) -> bool:
        """Whether the same request may succeed later: the server is overloaded, or a part of it is down."""
        return self.status in (429, 503)

    @property
    def is_document_error(self) -> bool:
        """Whether the error concerns one document, so that another one may succeed."""
        return self.status in (400, 413, 422, 500, 504) and self.param not in _COMMON_PARAMS


@dataclass(frozen=True, slots=True)
class LocalContent:
    """The bytes of a file, and the encoding that the user names for it, "" for none."""

    pieces: AsyncGenerator[bytes, None]
    size_bytes: int
    encoding: str = ""


class RagClient:
    """A client of one server. Every method raises UnreachableError and RejectedRequestError."""

    def __init__(self, options: RagClientOptions) -> None:
        self.url = options.url
        headers = {} if options.collection_key is None else {OWNER_KEY_HEADER: options.collection_key}
        timeout = httpx.Timeout(_SILENCE_S, connect=_CONNECT_S)
        self._http = open_client(options.url, options.api_key, timeout, headers)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def collections(self) -> list[JsonObject]:
        found: list[JsonObject] = (await self._request("GET", "/collections"))["data"]
        return found

    async def delete_collection(self, name: str) -> None:
        await self._request("DELETE", f"/collections/{_quoted(name)}")

    async def documents(self, collection: str) -> AsyncIterator[JsonObject]:
        """Yield all documents of the collection by id, page by page."""
        after, has_more = "", True
        while has_more:
            page = await self._request(
                "GET", f"/{_quoted(collection)}/documents", params={"after": after, "limit": _PAGE}
            )
            for document in page["data"]:
                yield document
                after = document["id"]
            has_more = page["has_more"]

    async def put_document(self, collection: str, document_id: str, content: LocalContent, force: bool) -> JsonObject:
        """Send a document's bytes. The server detects its format."""
        charset = f"; charset={content.encoding}" if content.encoding else ""
        headers = {
            "content-type": f"application/octet-stream{charset}",
            "content-length": str(content.size_bytes),
        }
        path = _document_path(collection, document_id)
        return await self._request("PUT", path, content=content.pieces, headers=headers, params=_force(force))

    async def post_document(self, collection: str, document: Mapping[str, Any], force: bool) -> JsonObject:
        """Send a document as JSON."""
        path = f"/{_quoted(collection)}/documents"
        response = await self._request("POST", path, json=document, params=_force(force))
        [result] = response["data"]
        document_result: JsonObject = result
        return document_result

    async def delete_document(self, collection: str, document_id: str) -> None:
        await self._request("DELETE", _document_path(collection, document_id))

    async def search(self, collection: str, fields: Mapping[str, Any]) -> JsonObject:
        return await self._request("POST", f"/{_quoted(collection)}/search", json=fields)

    async def query(self, collection: str, fields: Mapping[str, Any]) -> JsonObject:
        """Return the whole answer."""
        return await self._request("POST", f"/{_quoted(collection)}/query", json=fields)

    @asynccontextmanager
    async def query_events(
        self, collection: str, fields: Mapping[str, Any]
    ) -> AsyncIterator[AsyncGenerator[SseEvent, None]]:
        """Stream the answer."""
        url = f"{self.url}/v1/rag/{_quoted(collection)}/query"
        with self._translate_errors():
            async with self._http.stream("POST", url, json={**fields, "stream": True}) as response:
                if response.status_code >= 400:
                    await response.aread()
                    raise _rejection(response)
                yield parse_events(response.aiter_bytes())

    async def _request(self, method: str, path: str, **settings: Any) -> JsonObject:
        with self._translate_errors():
            response = await self._http.request(method, f"{self.url}/v1/rag{path}", **settings)
        if response.status_code >= 400:
            raise _rejection(response)
        payload = read_object(response)
        if payload is None:
            raise RagError(f"{self.url} did not answer as Sluice does; is another server there?")
        return payload

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Turn errors of httpx into RagErrors with messages for the user."""
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout):
            raise UnreachableError(f"no server listens at {self.url}; start one with: sluice serve") from None
        except httpx.TimeoutException:
            raise UnreachableError(f"{self.url} did not answer within {_SILENCE_S:.0f} s") from None
        except httpx.TransportError as error:
            raise BrokenConnectionError(
                f"the connection to {self.url} broke ({str(error) or type(error).__name__})"
            ) from None
        except httpx.InvalidURL as error:
            raise RagError(f"{self.url}: {error}") from None


def _quoted(name: str) -> str:
    return quote(name, safe="")


def _document_path(collection: str, document_id: str) -> str:
    return f"/{_quoted(collection)}/documents/{quote(document_id, safe='/')}"


def _force(force: bool) -> dict[str, str]:
    return {"force": "true"} if force else {}


def _rejection(response: httpx.Response) -> RejectedRequestError:
    body = read_object(response) or {}
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
    return RejectedRequestError(message, response.status_code, retry_after_s, param if isinstance(param, str) else "")
