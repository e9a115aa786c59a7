"""The trace and logging extensions: what clients may change while the server runs."""

from collections.abc import Callable

import orjson

from gateway.http.v2.body import BodyReader
from gateway.http.v2.exchange import Exchange
from gateway.http.v2.json_document import array_member, boolean, find, has, parse, string, unsigned
from gateway.http.v2.target import Target
from gateway.v2.service import Service
from gateway.v2.settings import LOG_SETTINGS, TRACE_SETTINGS, SettingValue
from serving.request import LATEST
from sluice.errors import invalid

_LOG_TYPES: dict[str, Callable[[object], SettingValue]] = {
    "log_file": str,
    "log_info": boolean,
    "log_warning": boolean,
    "log_error": boolean,
    "log_verbose_level": unsigned,
    "log_format": string,
}


class SettingRoutes:
    """Answers …/trace/setting and /v2/logging: GET tells, POST changes and then tells."""

    def __init__(self, service: Service, body: BodyReader) -> None:
        self._service = service
        self._body = body

    async def trace(self, exchange: Exchange, target: Target) -> None:
        """What is traced, of the model that is named or of all."""
        if target.name and not self._service.is_model_ready(target.name, LATEST):
            raise invalid("model", f"Request for unknown model : {target.name}")
        settings, model = self._service.trace, target.name or None
        if exchange.method == "POST":
            settings.update(_trace_values(parse(await self._body.read(exchange))), model)
        await exchange.reply(200, orjson.dumps(settings.get(model)))

    async def log(self, exchange: Exchange, target: Target) -> None:
        """What is logged."""
        settings = self._service.log_settings
        if exchange.method == "POST":
            settings.update(_log_values(parse(await self._body.read(exchange))))
        await exchange.reply(200, orjson.dumps(settings.get()))


def _trace_values(document: object) -> dict[str, SettingValue | None]:
    """The settings that are named; null is None. Raises SluiceError INTERNAL for other types than text."""
    return {name: _trace_value(document, name) for name in TRACE_SETTINGS if has(document, name)}


def _trace_value(document: object, name: str) -> SettingValue | None:
    value = find(document, name)
    if value is None:
        return None
    if name == "trace_level":
        return [string(each) for each in array_member(document, name)]
    return str(value) if name == "trace_file" else string(value)


def _log_values(document: object) -> dict[str, SettingValue | None]:
    return {name: _log_value(document, name) for name in LOG_SETTINGS if has(document, name)}


def _log_value(document: object, name: str) -> SettingValue | None:
    value = find(document, name)
    return None if value is None else _LOG_TYPES[name](value)
