"""The extensions for shared memory, tracing and logging. There is no CUDA memory: the server holds no GPU."""

import base64
import binascii
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import TypeVar

import orjson

from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.gateway.api.v2.http.exchange import AsgiExchange, BodyReader, RequestTarget
from sluice.gateway.api.v2.http.json_document import (
    array_member,
    boolean,
    find,
    has,
    member_of_request,
    string,
    string_member,
    unsigned,
)
from sluice.gateway.api.v2.log_settings import LOG_SETTINGS, LogValue
from sluice.gateway.api.v2.server import V2Server
from sluice.gateway.api.v2.trace_settings import TRACE_SETTINGS, TraceValue
from sluice.serving.request import LATEST

T = TypeVar("T")

_CUDA_HANDLE_BYTES = 64


class SystemMemoryRoutes:
    """Answers under /v2/systemsharedmemory."""

    def __init__(self, server: V2Server, body: BodyReader) -> None:
        self._regions = server.shared_memory
        self._body = body

    async def status(self, exchange: AsgiExchange, target: RequestTarget) -> None:
        """Return the named region, or all regions."""
        rows = [asdict(region) for region in self._regions.status(target.name or None)]
        await exchange.reply(200, orjson.dumps(rows))

    async def register(self, exchange: AsgiExchange, target: RequestTarget) -> None:
        """Map the shared memory that the body describes under the region's name."""
        self._regions.require_allowed()
        if not target.name:
            raise invalid("name", "'region name' is necessary to register system shared memory region")
        document = await self._body.read_settings(exchange)
        key = _required_member(document, "key", string)
        offset = _required_member(document, "offset", unsigned) if has(document, "offset") else 0
        self._regions.register(target.name, key, offset, _required_member(document, "byte_size", unsigned))
        await exchange.reply(200)

    async def unregister(self, exchange: AsgiExchange, target: RequestTarget) -> None:
        """Unregister the named region, or all regions."""
        self._regions.unregister(target.name)
        await exchange.reply(200)


class CudaMemoryRoutes:
    """Answers under /v2/cudasharedmemory as a server without a GPU: there is no region, and none can be registered."""

    def __init__(self, server: V2Server, body: BodyReader) -> None:
        self._regions = server.shared_memory
        self._body = body

    async def status(self, exchange: AsgiExchange, target: RequestTarget) -> None:
        if target.name:
            text = f"Unable to find cuda shared memory region: '{target.name}'"
            raise SluiceError(ErrorCode.NOT_FOUND, text)
        await exchange.reply(200, b"[]")

    async def register(self, exchange: AsgiExchange, target: RequestTarget) -> None:
        """Refuse: first where it is not allowed, then for what the body lacks, then because there is no GPU."""
        self._regions.require_allowed()
        if not target.name:
            raise invalid("name", "'region name' is necessary to register cuda shared memory region")
        document = await self._body.read_settings(exchange)
        handle = _required_member(document, "raw_handle", partial(string_member, name="b64"))
        _required_member(document, "byte_size", unsigned)
        _required_member(document, "device_id", unsigned)
        if not _is_handle(handle):
            raise invalid("raw_handle", "'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t")
        text = f"failed to register CUDA shared memory region: '{target.name}', GPUs not supported"
        raise invalid("raw_handle", text)

    async def unregister(self, exchange: AsgiExchange, target: RequestTarget) -> None:
        self._regions.require_allowed()
        await exchange.reply(200)


def _required_member(document: object, name: str, read: Callable[[object], T]) -> T:
    if not has(document, name):
        raise invalid(name, f"Shared memory register request has no '{name}' field")
    with member_of_request(name):
        return read(find(document, name))


def _is_handle(text: str) -> bool:
    try:
        return len(base64.b64decode(text)) == _CUDA_HANDLE_BYTES
    except (binascii.Error, ValueError):
        return False


_LOG_TYPES: dict[str, Callable[[object], LogValue]] = {
    "log_file": str,
    "log_info": boolean,
    "log_warning": boolean,
    "log_error": boolean,
    "log_verbose_level": unsigned,
    "log_format": string,
}


class SettingRoutes:
    """Answers …/trace/setting and /v2/logging: GET returns the settings, POST changes and then returns them."""

    def __init__(self, server: V2Server, body: BodyReader) -> None:
        self._server = server
        self._body = body

    async def trace(self, exchange: AsgiExchange, target: RequestTarget) -> None:
        """Answer for the trace settings of the named model or of all models."""
        if target.name and not self._server.is_model_ready(target.name, LATEST):
            raise invalid("model", f"Request for unknown model : {target.name}")
        settings, model = self._server.trace, target.name or None
        if exchange.method == "POST":
            settings.update(_trace_values(await self._body.read_settings(exchange)), model)
            await self._server.settle()
        await exchange.reply(200, orjson.dumps(settings.get(model)))

    async def log(self, exchange: AsgiExchange, target: RequestTarget) -> None:
        settings = self._server.log_settings
        if exchange.method == "POST":
            settings.update(_log_values(await self._body.read_settings(exchange)))
        await exchange.reply(200, orjson.dumps(settings.get()))


def _trace_values(document: object) -> dict[str, TraceValue | None]:
    """Return the settings that the document names; null is None. Raises INVALID for types other than text."""
    return {name: _trace_value(document, name) for name in TRACE_SETTINGS if has(document, name)}


def _trace_value(document: object, name: str) -> TraceValue | None:
    value = find(document, name)
    if value is None:
        return None
    with member_of_request(name):
        if name == "trace_level":
            return [string(each) for each in array_member(document, name)]
        return str(value) if name == "trace_file" else string(value)


def _log_values(document: object) -> dict[str, LogValue | None]:
    return {name: _log_value(document, name) for name in LOG_SETTINGS if has(document, name)}


def _log_value(document: object, name: str) -> LogValue | None:
    value = find(document, name)
    with member_of_request(name):
        return None if value is None else _LOG_TYPES[name](value)
