"""Health, metadata, configuration and statistics; and the model repository extension: index, load, unload, routing."""

import base64
import binascii
from typing import Any

import orjson

from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.gateway.api.v2.http.exchange import AsgiExchange, BodyReader, RequestTarget, refuse_encoding
from sluice.gateway.api.v2.http.json_document import (
    boolean,
    find,
    has,
    member_of_request,
    members,
    parse_document,
    string,
)
from sluice.gateway.api.v2.repository import (
    ADAPTER_PARAMETERS,
    BASE_MODEL,
    LoadRequest,
    build_load,
    index_rows,
    load_model,
    unload_model,
)
from sluice.gateway.api.v2.server import V2Server, model_metadata, server_metadata
from sluice.gateway.calls import note_model
from sluice.gateway.front.long_work import run_aside
from sluice.serving.config.config_json import config_json
from sluice.serving.repository.routing import Routing

_NOT_READY = "Model version not ready"
_PLAIN = b"text/plain"
_FILE_PREFIX = "file:"
_PIECE_CHARS = 1 << 20
"""Characters of a file in base64 that are decoded at once."""
_EXPECTED_WEIGHTS = (
    'weights must be an object of versions and numbers, such as {"1": 95, "2": 5}, or null for the configured ones'
)


class ModelRoutes:
    """Answers requests that change nothing."""

    def __init__(self, server: V2Server) -> None:
        self._server = server

    async def server(self, exchange: AsgiExchange, target: RequestTarget) -> None:
        await _reply(exchange, server_metadata(self._server.name))

    async def live(self, exchange: AsgiExchange, target: RequestTarget) -> None:
        """Answer 200, or 400 where the server should be restarted."""
        await _reply_health(exchange, self._server.health.is_live())

    async def ready(self, exchange: AsgiExchange, target: RequestTarget) -> None:
        """Answer 200 where the server takes requests, else 400."""
        await _reply_health(exchange, self._server.health.is_ready())

    async def model_ready(self, exchange: AsgiExchange, target: RequestTarget) -> None:
        """Answer 200 where a model takes requests, else 400."""
        if not self._server.is_model_ready(target.name, target.version_number):
            raise invalid("model", _NOT_READY)
        await _reply_health(exchange, True)

    async def metadata(self, exchange: AsgiExchange, target: RequestTarget) -> None:
        model = self._server.models.find(target.name, target.version_number)
        if target.version:
            versions = [model.version]
        else:
            versions = [each.version for each in self._server.repository.versions(target.name)]
        await _reply(exchange, model_metadata(model, versions))

    async def config(self, exchange: AsgiExchange, target: RequestTarget) -> None:
        """Return a model's configuration as completed at load."""
        await exchange.reply(200, config_json(self._server.models.find(target.name, target.version_number).config))

    async def statistics(self, exchange: AsgiExchange, target: RequestTarget) -> None:
        """Return the statistics of a model, or of every model. Raises INVALID for an unknown one."""
        await _reply(exchange, await self._server.statistics(target.name, target.version_number))


async def _reply(exchange: AsgiExchange, payload: dict[str, Any]) -> None:
    await exchange.reply(200, orjson.dumps(payload))


async def _reply_health(exchange: AsgiExchange, is_ok: bool) -> None:
    await exchange.reply(200 if is_ok else 400, content_type=_PLAIN)


class RepositoryRoutes:
    """Answers under /v2/repository."""

    def __init__(self, server: V2Server, body: BodyReader) -> None:
        self._server = server
        self._body = body

    async def index(self, exchange: AsgiExchange, target: RequestTarget) -> None:
        """Return every model of the repository and every adapter, or with `ready` those that are ready."""
        document = await self._body.read_settings(exchange, is_optional=True)
        with member_of_request("ready"):
            ready_only = has(document, "ready") and boolean(find(document, "ready"))
        await exchange.reply(200, orjson.dumps(await index_rows(self._server, ready_only)))

    async def load(self, exchange: AsgiExchange, target: RequestTarget) -> None:
        """Load or reload a model, with the configuration and files that the request brings; or an adapter."""
        refuse_encoding(exchange)
        body = await self._body.read(exchange)
        load = await run_aside(lambda: _parse_load(self._server, parse_document(body))) if body else LoadRequest()
        await load_model(self._server, target.name, load)
        await exchange.reply(200)

    async def unload(self, exchange: AsgiExchange, target: RequestTarget) -> None:
        """Unload a model or an adapter. A body that cannot be read counts as absent, as in Triton."""
        try:
            parameters = find(await self._body.read_settings(exchange), "parameters")
        except SluiceError as error:
            if error.code is not ErrorCode.INTERNAL:
                raise
            parameters = None
        base_model = find(parameters, BASE_MODEL)
        unload_dependents = find(parameters, "unload_dependents") is True
        await unload_model(
            self._server, target.name, base_model if isinstance(base_model, str) else "", unload_dependents
        )
        await exchange.reply(200)

    async def refuse_repository(self, exchange: AsgiExchange, target: RequestTarget) -> None:
        raise SluiceError(ErrorCode.UNIMPLEMENTED, "'repository_name' specification is not supported")


def _parse_load(server: V2Server, document: object) -> LoadRequest:
    """Return the parameters of a load request."""
    if not has(document, "parameters"):
        return LoadRequest()
    config: str | None = None
    files: list[tuple[str, bytes]] = []
    adapter: dict[str, str] = {}
    with member_of_request("parameters"):
        parameters = members(find(document, "parameters"))
    for name, value in parameters.items():
        with member_of_request(name):
            text = string(value)
        if name == "config":
            config = text
        elif name in ADAPTER_PARAMETERS:
            adapter[name] = text
        elif name.startswith(_FILE_PREFIX):
            files.append((name.removeprefix(_FILE_PREFIX), _decode_file(name, text)))
        else:
            known = f"none of config, {_FILE_PREFIX}PATH, {', '.join(ADAPTER_PARAMETERS)}"
            raise invalid(name, f"parameter '{name}' is {known}")
    return build_load(server, config, files, adapter)


def _decode_file(name: str, text: str) -> bytes:
    pieces = [text[start : start + _PIECE_CHARS] for start in range(0, len(text), _PIECE_CHARS)]
    try:
        decoded = [base64.b64decode(piece) for piece in pieces]
        if any(len(each) * 4 != _PIECE_CHARS * 3 for each in decoded[:-1]):  # line breaks, which are no base64
            return base64.b64decode(text)
        return b"".join(decoded)
    except (binascii.Error, ValueError):
        raise SluiceError(ErrorCode.INVALID, f"parameter '{name}' is not base64") from None


class VersionRoutingRoute:
    """Answers /v2/repository/models/NAME/routing: how versions share the requests that name no version.

    GET returns the weights and the shares that they give; POST sets weights and returns the result.
    """

    def __init__(self, server: V2Server, body: BodyReader) -> None:
        self._server = server
        self._body = body

    async def answer(self, exchange: AsgiExchange, target: RequestTarget) -> None:
        """Answer either method. Raises SluiceError INVALID, naming the field, for a body without valid weights."""
        repository = self._server.repository
        note_model(target.name)
        if exchange.method == "POST":
            repository.set_weights(target.name, _parse_weights(await self._body.read_settings(exchange)))
            await self._server.settle()
        await exchange.reply(200, orjson.dumps(_routing_object(target.name, repository.routing(target.name))))


def _parse_weights(document: object) -> dict[int, float] | None:
    if not isinstance(document, dict) or document.keys() != {"weights"}:
        raise invalid("weights", f"the body must hold 'weights' and nothing else: {_EXPECTED_WEIGHTS}")
    weights = document["weights"]
    if weights is None:
        return None
    if not isinstance(weights, dict) or not all(map(_is_weight, weights.items())):
        raise invalid("weights", f"{_EXPECTED_WEIGHTS}, got {orjson.dumps(weights).decode()[:200]}")
    return {int(version): float(weight) for version, weight in weights.items()}


def _is_weight(entry: tuple[str, object]) -> bool:
    version, weight = entry
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    return version.isascii() and version.isdecimal() and len(version) < 20 and is_number


def _routing_object(name: str, routing: Routing) -> dict[str, object]:
    weights = routing.weights.by_version if routing.weights is not None else None
    return {
        "model_name": name,
        "weights": None if weights is None else {str(version): weight for version, weight in weights.items()},
        "is_set": routing.is_set,
        "shares": {str(version): share for version, share in routing.shares.items()},
    }
