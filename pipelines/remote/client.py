"""The API behind a model: its connections, and one request to it."""

import asyncio
import ssl
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pipelines.llm.parse import parse_timeout
from pipelines.llm.services import RequestLimits
from pipelines.remote.errors import ApiErrors, parse_retry_after
from pipelines.remote.options import DEFAULT_TIMEOUT_S, RemoteOptions, read_headers, read_key
from serving.request import InferRequest
from sluice.errors import ErrorCode, SluiceError, invalid

if TYPE_CHECKING:
    from httpx2 import Response
    from openai import AsyncOpenAI, Omit


_NO_KEY = "none"
"""The client insists on one; without a key of ours, its header is left out."""

_LONGEST_PAUSE_S = 5.0
"""Before a request is tried again."""

Json = dict[str, Any]


class _Listed(msgspec.Struct, frozen=True):
    id: str


class _ModelList(msgspec.Struct, frozen=True):
    data: list[_Listed]


class ApiClient:
    """One API, with its connections. Times are the event loop's; every method raises SluiceError."""

    def __init__(self, client: "AsyncOpenAI", options: RemoteOptions, key: str) -> None:
        from openai import omit

        self.options = options
        self.failures = ApiErrors(options.model, options.host, key)
        self._client = client
        self._path = options.endpoint.path
        # The client looks for an omission of its key here alone, not among the headers of all requests.
        self._headers: dict[str, str | Omit] = {} if key else {"Authorization": omit}

    async def ask(self, body: Json, deadline: float) -> object:
        """The whole answer, as JSON has it."""
        with self.failures.translated():
            async with asyncio.timeout_at(deadline):
                return await self._client.post(
                    self._path, cast_to=object, body=self._whole(body), options={"headers": self._headers}
                )

    async def stream(self, body: Json, deadline: float) -> AsyncGenerator[object, None]:
        """The answer's chunks, for a reader in one task. Closing the generator ends the work at the other end too."""
        from openai import AsyncStream

        with self.failures.translated():
            # One timer a stream: the limit may span what the reader does between chunks, as it awaits nothing there.
            async with (
                asyncio.timeout_at(deadline),
                await self._client.post(
                    self._path,
                    cast_to=object,
                    body=self._whole(body) | {"stream": True},
                    options={"headers": self._headers},
                    stream=True,
                    stream_cls=AsyncStream[object],
                ) as chunks,
            ):
                async for chunk in chunks:
                    yield chunk

    async def check(self) -> None:
        """Raise UNAVAILABLE where the API does not list the model."""
        with self.failures.translated():
            async with asyncio.timeout(self.options.timeout_s or DEFAULT_TIMEOUT_S):
                answer = await self._client.get("/models", cast_to=object, options={"headers": self._headers})
            listed = [each.id for each in msgspec.convert(answer, _ModelList).data]
        if self.options.model not in listed:
            raise self.failures.unavailable(f"is not listed there; there are {', '.join(listed[:10]) or 'none'}")

    async def close(self) -> None:
        """Idempotent."""
        await self._client.close()

    def _whole(self, body: Json) -> Json:
        """What the configuration adds yields to what the request says."""
        return self.options.extra_body | {"model": self.options.model} | body


@dataclass(frozen=True, slots=True)
class _Files:
    """What the configuration names and does not show. `trust` True: the usual certificates."""

    key: str = field(repr=False)
    headers: dict[str, str] = field(repr=False)
    trust: ssl.SSLContext | bool


async def open_client(name: str, options: RemoteOptions, folder: Path) -> ApiClient:
    """Raises SluiceError UNAVAILABLE without the client's library, INVALID for files that cannot be used.

    `folder` is that of the model `name`, which relative paths start from.
    """
    files = await asyncio.to_thread(_read_files, name, options, folder)
    remote = ApiClient(_client(options, files), options, files.key)
    if options.check_on_load:
        try:
            await remote.check()
        except BaseException:
            await remote.close()
            raise
    return remote


def import_openai(name: str) -> None:
    """Takes most of a second: for a thread. Raises SluiceError UNAVAILABLE where it is not there or broken."""
    try:
        import openai  # noqa: F401
    except ImportError as error:
        how = "install it with: pip install 'sluice[openai]'"
        reason = f"backend 'openai' needs the package openai, which cannot be imported ({error}); {how}"
        raise SluiceError(ErrorCode.UNAVAILABLE, f"unable to load model '{name}', {reason}") from None


def _read_files(name: str, options: RemoteOptions, folder: Path) -> _Files:
    import_openai(name)
    return _Files(read_key(options, folder), read_headers(options, folder), _trust(options, folder))


def _trust(options: RemoteOptions, folder: Path) -> ssl.SSLContext | bool:
    if not options.ca_file:
        return True
    path = folder / options.ca_file
    try:
        return ssl.create_default_context(cafile=str(path))
    except OSError as error:  # an SSLError, for what is no certificate, is one too
        raise invalid("ca_file", f"ca_file {path} cannot be used: {error.strerror or error}") from None


def _client(options: RemoteOptions, files: _Files) -> "AsyncOpenAI":
    from openai import AsyncOpenAI, DefaultAsyncHttpx2Client, Omit, Timeout

    # Each request has its deadline; this limit only tells a host that is not there from a slow one.
    timeout = Timeout(None, connect=options.connect_timeout_s)
    headers: dict[str, Any] = dict(files.headers)
    # What is not configured is left out, not filled in from the environment of the server.
    headers["OpenAI-Organization"] = options.organization or Omit()
    headers["OpenAI-Project"] = options.project or Omit()
    return AsyncOpenAI(
        api_key=files.key or _NO_KEY,
        base_url=options.base_url,
        timeout=timeout,
        max_retries=options.max_retries,
        default_headers=headers,
        http_client=DefaultAsyncHttpx2Client(
            timeout=timeout, verify=files.trust, event_hooks={"response": [_forbid_long_pause]}
        ),
    )


async def _forbid_long_pause(response: "Response") -> None:
    """Where the API asks for a long pause, its client is told at once: waiting here would hold a place for nothing."""
    retry_after_s = parse_retry_after(response.headers)
    if retry_after_s is not None and retry_after_s > _LONGEST_PAUSE_S:
        response.headers["x-should-retry"] = "false"  # which the client obeys, as if the API had said it


@dataclass(frozen=True, slots=True)
class RequestDeadlines:
    """Times of the event loop: until when a place must be free, and until when the answer must be there."""

    start: float
    end: float


def request_deadlines(
    request: InferRequest, options: RemoteOptions, limits: RequestLimits, waited_s: float = 0.0
) -> RequestDeadlines:
    """What the request says comes before the model's configuration, and that before the server's limits.

    `waited_s` is how long ago the request came. Raises SluiceError INVALID for what is no duration.
    """
    came = asyncio.get_running_loop().time() - waited_s
    asked_s = parse_timeout("timeout", request.timeout_us)
    end = came + (asked_s or options.timeout_s or limits.timeout_s or DEFAULT_TIMEOUT_S)
    waits = request.queue_timeout_us or request.parameters.get("queue_timeout", 0)
    waits_s = parse_timeout("queue_timeout", waits) or limits.queue_timeout_s
    return RequestDeadlines(end if waits_s is None else min(end, came + waits_s), end)
