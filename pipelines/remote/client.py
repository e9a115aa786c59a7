"""The client of the API behind a model: its connections, its requests, their deadlines and their failures."""

import asyncio
import math
import ssl
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.pipelines.llm.parse import parse_timeout
from sluice.pipelines.llm.services import RequestLimits
from sluice.pipelines.remote.options import DEFAULT_TIMEOUT_S, RemoteOptions, read_headers, read_key
from sluice.record.spans import current_span
from sluice.serving.request import InferRequest

if TYPE_CHECKING:
    from openai import APIConnectionError, APIError, APIStatusError

_MAX_MESSAGE_CHARS = 500
"""Characters of the API's message that are passed on."""
_KEY_REFUSED = frozenset({401, 403})
_BAD_REQUEST = frozenset({400, 413, 422})
_CONTEXT_CODE = "context_length_exceeded"
_LATE = frozenset({408, 504})


class ApiErrors:
    """Makes the errors of one API, which name it in every message.

    No message shows the API's key, or lets a client believe that their own key was refused.
    """

    def __init__(self, model: str, host: str, key: str) -> None:
        """Take the model's name at the API, the API's host, and the key to hide in messages."""
        self._model = model
        self._subject = f"remote model '{model}' at {host}"
        self._key = key

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Translate failures within the context, including unreadable answers, to SluiceError."""
        from openai import APIConnectionError, APIError, APIStatusError, OpenAIError

        try:
            yield
        except APIStatusError as error:
            raise self._of_status(error) from None
        except APIConnectionError as error:
            raise self._of_connection(error) from None
        except APIError as error:
            raise self.unavailable(f"failed: {self._message(error)}") from None
        except TimeoutError:
            raise SluiceError(ErrorCode.DEADLINE, f"{self._subject} did not answer within the time limit") from None
        except OpenAIError as error:
            raise self.unavailable(f"cannot be asked: {self._shown(str(error))}") from None
        except (ValueError, msgspec.MsgspecError) as error:
            raise self.unreadable(error) from None

    def unreadable(self, error: Exception) -> SluiceError:
        return self.unavailable(f"gave an answer that no OpenAI-compatible API gives: {self._shown(str(error))}")

    def unavailable(self, what: str, retry_after_s: float | None = None) -> SluiceError:
        """Return the error for a remote model that cannot answer now. `what` completes the sentence about it."""
        return SluiceError(ErrorCode.UNAVAILABLE, f"{self._subject} {what}", retry_after_s=retry_after_s)

    def _of_status(self, error: "APIStatusError") -> SluiceError:
        status = error.status_code
        retry_after_s = parse_retry_after(error.response.headers)
        if status in _KEY_REFUSED:
            # Without the API's message, which may quote the key.
            return self.unavailable(f"refused our key ({status})")
        reason = self._message(error)
        if status in _BAD_REQUEST:
            refusal = SluiceError(
                ErrorCode.INVALID, f"{self._subject} refused the request: {reason}", param=error.param
            )
            refusal.exceeds_context = _exceeds_context(error)
            return refusal
        if status == HTTPStatus.TOO_MANY_REQUESTS:
            message = f"{self._subject} is overloaded: {reason}"
            return SluiceError(ErrorCode.OVERLOADED, message, retry_after_s=retry_after_s)
        if status == HTTPStatus.NOT_FOUND:
            return self.unavailable(f"is not found there (404): {reason}")
        if status in _LATE:
            return SluiceError(ErrorCode.DEADLINE, f"{self._subject} took too long ({status}): {reason}")
        return self.unavailable(f"failed ({status}): {reason}", retry_after_s)

    def _of_connection(self, error: "APIConnectionError") -> SluiceError:
        from httpx2 import ConnectTimeout
        from openai import APITimeoutError

        cause = error.__cause__
        if isinstance(error, APITimeoutError) and not isinstance(cause, ConnectTimeout):
            return SluiceError(ErrorCode.DEADLINE, f"{self._subject} did not answer within the time limit")
        reason = f"{type(cause).__name__} {cause}" if cause is not None else error.message
        return self.unavailable(f"cannot be reached, or broke off: {self._shown(reason)}")

    def _message(self, error: "APIError") -> str:
        """Return the API's own message, or the client's where the API gave none."""
        body = error.body
        if isinstance(body, Mapping):
            message = body.get("message") or body.get("detail") or body.get("error")
            if isinstance(message, str):
                return self._shown(message)
        return self._shown(body if isinstance(body, str) and body.strip() else error.message)

    def _shown(self, text: str) -> str:
        text = text.replace(self._key, "***") if self._key else text
        return text.strip()[:_MAX_MESSAGE_CHARS]  # cut last, or half a key could be left at the end


def _exceeds_context(error: "APIStatusError") -> bool:
    """Whether the request is too long for the model: by OpenAI's code, or by vLLM's words, which has no code."""
    return error.code == _CONTEXT_CODE or "maximum context length" in error.message


def parse_retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds after which the API asks to be called again, or None. A date is not understood."""
    for name, per_second in (("retry-after-ms", 1000), ("retry-after", 1)):
        try:
            seconds = float(headers.get(name, "")) / per_second
        except ValueError:
            continue
        if math.isfinite(seconds) and seconds >= 0:
            return seconds
    return None


if TYPE_CHECKING:
    from httpx2 import Response
    from openai import AsyncOpenAI, Omit


_NO_KEY = "none"
"""The openai library requires a key. Where none is configured, its header is left out."""

_MAX_RETRY_PAUSE_S = 5.0
"""Longest wait before a request is tried again."""

Json = dict[str, Any]


class _Listed(msgspec.Struct, frozen=True):
    id: str


class _ModelList(msgspec.Struct, frozen=True):
    data: list[_Listed]


class ApiClient:
    """The connections to one API. Deadlines are times of the event loop; every method raises SluiceError."""

    def __init__(self, client: "AsyncOpenAI", options: RemoteOptions, key: str) -> None:
        from openai import omit

        self.options = options
        self.errors = ApiErrors(options.model, options.host, key)
        self._client = client
        self._path = options.endpoint.path
        # The library honours an omitted key only among a request's own headers, not among those of all requests.
        self._headers: dict[str, str | Omit] = {} if key else {"Authorization": omit}

    async def ask(self, body: Json, deadline: float) -> object:
        """Send a request and return the whole answer, as decoded JSON."""
        with self.errors.translated():
            async with asyncio.timeout_at(deadline):
                return await self._client.post(
                    self._path, cast_to=object, body=self._whole(body), options={"headers": self._traced_headers()}
                )

    async def stream(self, body: Json, deadline: float) -> AsyncGenerator[object, None]:
        """Send a request and yield the answer's chunks, in one task. Closing the generator ends the request."""
        from openai import AsyncStream

        with self.errors.translated():
            # One timer for the stream: it may span the reader's work between chunks, where nothing is awaited.
            async with (
                asyncio.timeout_at(deadline),
                await self._client.post(
                    self._path,
                    cast_to=object,
                    body=self._whole(body) | {"stream": True},
                    options={"headers": self._traced_headers()},
                    stream=True,
                    stream_cls=AsyncStream[object],
                ) as chunks,
            ):
                async for chunk in chunks:
                    yield chunk

    async def check(self) -> None:
        """Raise UNAVAILABLE where the API does not list the model."""
        with self.errors.translated():
            async with asyncio.timeout(self.options.timeout_s or DEFAULT_TIMEOUT_S):
                answer = await self._client.get("/models", cast_to=object, options={"headers": self._headers})
            listed = [each.id for each in msgspec.convert(answer, _ModelList).data]
        if self.options.model not in listed:
            raise self.errors.unavailable(f"is not listed there; there are {', '.join(listed[:10]) or 'none'}")

    async def close(self) -> None:
        """Close the connections. May be called several times."""
        await self._client.close()

    def _traced_headers(self) -> "dict[str, str | Omit]":
        """Return the headers of a request, with the span that it belongs to."""
        here = current_span.get()
        if here is None or not (traceparent := here.traceparent):
            return self._headers
        parent = here.recording.parent
        state = {"tracestate": parent.state} if parent is not None and parent.state else {}
        return {**self._headers, "traceparent": traceparent, **state}

    def _whole(self, body: Json) -> Json:
        """Return the body with the model's name and the configuration's `extra_body`, over which the request wins."""
        return self.options.extra_body | {"model": self.options.model} | body


@dataclass(frozen=True, slots=True)
class RequestDeadlines:
    """Deadlines of one request: for the start of the call to the API, and for the end of the answer.

    Both are times of the event loop.
    """

    start: float
    end: float


def request_deadlines(
    request: InferRequest, options: RemoteOptions, limits: RequestLimits, waited_s: float = 0.0
) -> RequestDeadlines:
    """Return the deadlines by the request's timeouts, else the model's configuration, else the server's limits.

    `waited_s` is the request's age in seconds. Raises SluiceError INVALID for a timeout that is not a duration.
    """
    arrival = asyncio.get_running_loop().time() - waited_s
    timeout_s = parse_timeout("timeout", request.timeout_us)
    end = arrival + (timeout_s or options.timeout_s or limits.timeout_s or DEFAULT_TIMEOUT_S)
    queue_timeout_us = request.queue_timeout_us or request.parameters.get("queue_timeout", 0)
    queue_timeout_s = parse_timeout("queue_timeout", queue_timeout_us) or limits.queue_timeout_s
    return RequestDeadlines(end if queue_timeout_s is None else min(end, arrival + queue_timeout_s), end)


@dataclass(frozen=True, slots=True)
class _Files:
    """Content of the files that the configuration names. `trust` True stands for the usual certificates."""

    key: str = field(repr=False)
    headers: dict[str, str] = field(repr=False)
    trust: ssl.SSLContext | bool


async def open_client(name: str, options: RemoteOptions, folder: Path) -> ApiClient:
    """Open the client of the model `name`, in whose `folder` relative paths start.

    Raises SluiceError UNAVAILABLE without the openai library, INVALID for files that cannot be used.
    """
    files = await asyncio.to_thread(read_files, name, options, folder)
    client = ApiClient(_make_openai_client(options, files), options, files.key)
    if options.check_on_load:
        try:
            await client.check()
        except BaseException:
            await client.close()
            raise
    return client


def import_openai(name: str) -> None:
    """Import the openai library, on a thread, as it takes most of a second. Raises SluiceError UNAVAILABLE."""
    try:
        import openai  # noqa: F401
    except ImportError as error:
        how = "install it with: pip install 'sluice[openai]'"
        reason = f"backend 'openai' needs the package openai, which cannot be imported ({error}); {how}"
        raise SluiceError(ErrorCode.UNAVAILABLE, f"unable to load model '{name}', {reason}") from None


def read_files(name: str, options: RemoteOptions, folder: Path) -> _Files:
    """Read the key, headers and certificates of the model `name`, on a thread. Raises as `open_client`."""
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


def _make_openai_client(options: RemoteOptions, files: _Files) -> "AsyncOpenAI":
    from openai import AsyncOpenAI, DefaultAsyncHttpx2Client, Omit, Timeout

    # Each request has its deadline; this limit only detects a host that does not answer at all.
    timeout = Timeout(None, connect=options.connect_timeout_s)
    headers: dict[str, Any] = dict(files.headers)
    # Omitted where not configured: the library would fill them in from the environment.
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
    """Forbid a retry after a long pause. The gateway's client learns the pause at once, and no place is held for it."""
    retry_after_s = parse_retry_after(response.headers)
    if retry_after_s is not None and retry_after_s > _MAX_RETRY_PAUSE_S:
        response.headers["x-should-retry"] = "false"  # the library obeys it as if the API had sent it
