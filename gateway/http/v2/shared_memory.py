"""The shared memory extensions: system memory, and CUDA memory, which this server does not offer."""

import base64
import binascii
from dataclasses import asdict

import orjson

from gateway.http.v2.exchange import Exchange, RequestTarget
from gateway.http.v2.json_document import find, has, parse, string, string_member, unsigned, unsigned_member
from gateway.http.v2.request import BodyReader
from gateway.v2.server import V2Service
from sluice.errors import ErrorCode, SluiceError, invalid

_CUDA_HANDLE_BYTES = 64


class SystemMemoryRoutes:
    """Answers under /v2/systemsharedmemory."""

    def __init__(self, service: V2Service, body: BodyReader) -> None:
        self._regions = service.shared_memory
        self._body = body

    async def status(self, exchange: Exchange, target: RequestTarget) -> None:
        """Return the named region, or all regions."""
        rows = [asdict(region) for region in self._regions.status(target.name or None)]
        await exchange.reply(200, orjson.dumps(rows))

    async def register(self, exchange: Exchange, target: RequestTarget) -> None:
        """Map the shared memory that the body describes under the region's name."""
        if not target.name:
            raise invalid("name", "'region name' is necessary to register system shared memory region")
        document = parse(await self._body.read(exchange))
        key = string(_required_member(document, "key"))
        offset = unsigned(find(document, "offset")) if has(document, "offset") else 0
        self._regions.register(target.name, key, offset, unsigned(_required_member(document, "byte_size")))
        await exchange.reply(200)

    async def unregister(self, exchange: Exchange, target: RequestTarget) -> None:
        """Unregister the named region, or all regions."""
        self._regions.unregister(target.name)
        await exchange.reply(200)


class CudaMemoryRoutes:
    """Answers under /v2/cudasharedmemory as a server without a GPU: there is no region, and none can be registered."""

    def __init__(self, body: BodyReader) -> None:
        self._body = body

    async def status(self, exchange: Exchange, target: RequestTarget) -> None:
        if target.name:
            text = f"Unable to find cuda shared memory region: '{target.name}'"
            raise SluiceError(ErrorCode.NOT_FOUND, text)
        await exchange.reply(200, b"[]")

    async def register(self, exchange: Exchange, target: RequestTarget) -> None:
        """Refuse: first for what the body lacks, then because there is no GPU."""
        if not target.name:
            raise invalid("name", "'region name' is necessary to register cuda shared memory region")
        document = parse(await self._body.read(exchange))
        handle = string_member(_required_member(document, "raw_handle"), "b64")
        unsigned_member(document, "byte_size")
        unsigned_member(document, "device_id")
        if not _is_handle(handle):
            raise invalid("raw_handle", "'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t")
        text = f"failed to register CUDA shared memory region: '{target.name}', GPUs not supported"
        raise invalid("raw_handle", text)

    async def unregister(self, exchange: Exchange, target: RequestTarget) -> None:
        await exchange.reply(200)


def _required_member(document: object, name: str) -> object:
    if not has(document, name):
        raise invalid(name, f"Shared memory register request has no '{name}' field")
    return find(document, name)


def _is_handle(text: str) -> bool:
    try:
        return len(base64.b64decode(text)) == _CUDA_HANDLE_BYTES
    except (binascii.Error, ValueError):
        return False
