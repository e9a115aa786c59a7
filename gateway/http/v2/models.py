"""Health, metadata, configuration and statistics."""

from typing import Any

import orjson

from gateway.http.v2.exchange import Exchange
from gateway.http.v2.target import Target
from gateway.v2.description import model_metadata, server_metadata, statistics
from gateway.v2.service import Service
from serving.config.config_json import config_json
from sluice.errors import invalid

_NOT_READY = "Model version not ready"
_PLAIN = b"text/plain"


class ModelRoutes:
    """Answers what only asks."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def server(self, exchange: Exchange, target: Target) -> None:
        """What this server is."""
        await _reply(exchange, server_metadata(self._service.identity))

    async def live(self, exchange: Exchange, target: Target) -> None:
        """Whether the server should be left running: 200, or 400 where it should be restarted."""
        await _reply_health(exchange, self._service.is_live())

    async def ready(self, exchange: Exchange, target: Target) -> None:
        """Whether the server takes requests: 200 or 400."""
        await _reply_health(exchange, self._service.is_ready())

    async def model_ready(self, exchange: Exchange, target: Target) -> None:
        """Whether a model takes requests: 200, or 400 where it does not or is not there."""
        if not self._service.is_model_ready(target.name, target.version_number):
            raise invalid("model", _NOT_READY)
        await _reply_health(exchange, True)

    async def metadata(self, exchange: Exchange, target: Target) -> None:
        """What a model takes and gives."""
        model = self._service.find(target.name, target.version_number)
        if target.version:
            versions = [model.version]
        else:
            versions = [each.version for each in self._service.repository.versions(target.name)]
        await _reply(exchange, model_metadata(model, versions))

    async def config(self, exchange: Exchange, target: Target) -> None:
        """A model's configuration, with what was completed when it was loaded."""
        await exchange.reply(200, config_json(self._service.find(target.name, target.version_number).config))

    async def statistics(self, exchange: Exchange, target: Target) -> None:
        """What a model, or with no name every model, has done. Raises INVALID for one that is not there."""
        models = self._service.repository.models()
        await _reply(exchange, statistics(models, target.name, target.version_number))


async def _reply(exchange: Exchange, payload: dict[str, Any]) -> None:
    await exchange.reply(200, orjson.dumps(payload))


async def _reply_health(exchange: Exchange, is_ok: bool) -> None:
    await exchange.reply(200 if is_ok else 400, content_type=_PLAIN)
