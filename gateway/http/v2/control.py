"""The model repository extension: what there is, load, unload."""

import base64
import binascii

import orjson

from gateway.http.v2.body import BodyReader
from gateway.http.v2.exchange import Exchange
from gateway.http.v2.json_document import boolean, find, has, members, parse, string, unreadable
from gateway.http.v2.target import Target
from gateway.v2.description import index_row
from gateway.v2.service import Service
from serving.backend import LoadOverrides
from sluice.errors import ErrorCode, SluiceError

_FILE = "file:"


class RepositoryRoutes:
    """Answers under /v2/repository."""

    def __init__(self, service: Service, body: BodyReader) -> None:
        self._service = service
        self._body = body

    async def index(self, exchange: Exchange, target: Target) -> None:
        """Every model that there is, or with `ready` those that are ready."""
        body = await self._body.read(exchange)
        document = parse(body) if body else {}
        ready_only = has(document, "ready") and boolean(find(document, "ready"))
        await self._service.repository.refresh()
        rows = [index_row(entry) for entry in self._service.repository.index(ready_only)]
        await exchange.reply(200, orjson.dumps(rows))

    async def load(self, exchange: Exchange, target: Target) -> None:
        """Load a model anew, with another configuration or other files where they are sent along."""
        body = await self._body.read(exchange)
        await self._service.repository.load(target.name, _overrides(parse(body)) if body else None)
        await exchange.reply(200)

    async def unload(self, exchange: Exchange, target: Target) -> None:
        """Unload a model. A body that says nothing clear is as none, as in Triton."""
        unload_dependents = _wants_dependents(await self._body.read(exchange))
        await self._service.repository.unload(target.name, unload_dependents)
        await exchange.reply(200)

    async def refuse_repository(self, exchange: Exchange, target: Target) -> None:
        """Models are named without their repository."""
        raise SluiceError(ErrorCode.UNIMPLEMENTED, "'repository_name' specification is not supported")


def _overrides(document: object) -> LoadOverrides | None:
    """What a load request brings along; None where it brings nothing."""
    if not has(document, "parameters"):
        return None
    config: str | None = None
    files: list[tuple[str, bytes]] = []
    for name, value in members(find(document, "parameters")).items():
        text = string(value)
        if name == "config":
            config = text
        elif name.startswith(_FILE):
            files.append((name.removeprefix(_FILE), _decoded(name, text)))
        else:
            raise unreadable("unexpected error on creating Triton parameter")
    return LoadOverrides(config, tuple(files)) if config is not None or files else None


def _decoded(name: str, text: str) -> bytes:
    try:
        return base64.b64decode(text)
    except (binascii.Error, ValueError):
        raise SluiceError(ErrorCode.INVALID, f"parameter '{name}' is not base64") from None


def _wants_dependents(body: bytes) -> bool:
    try:
        document = parse(body)
    except SluiceError:
        return False
    return find(find(document, "parameters"), "unload_dependents") is True
