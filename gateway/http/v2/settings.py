"""The trace and logging extensions: settings that clients may change while the server runs."""

from collections.abc import Callable

import orjson

from gateway.http.v2.exchange import Exchange, RequestTarget
from gateway.http.v2.json_document import array_member, boolean, find, has, parse, string, unsigned
from gateway.http.v2.request import BodyReader
from gateway.v2.log_settings import LOG_SETTINGS, LogValue
from gateway.v2.server import V2Service
from gateway.v2.trace import TRACE_SETTINGS, TraceValue
from serving.request import LATEST
from sluice.errors import invalid

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

    def __init__(self, service: V2Service, body: BodyReader) -> None:
        self._service = service
        self._body = body

    async def trace(self, exchange: Exchange, target: RequestTarget) -> None:
        """Answer for the trace settings of the named model or of all models."""
        if target.name and not self._service.is_model_ready(target.name, LATEST):
            raise invalid("model", f"Request for unknown model : {target.name}")
        settings, model = self._service.trace, target.name or None
        if exchange.method == "POST":
            settings.update(_trace_values(parse(await self._body.read(exchange))), model)
        await exchange.reply(200, orjson.dumps(settings.get(model)))

    async def log(self, exchange: Exchange, target: RequestTarget) -> None:
        settings = self._service.log_settings
        if exchange.method == "POST":
            settings.update(_log_values(parse(await self._body.read(exchange))))
        await exchange.reply(200, orjson.dumps(settings.get()))


def _trace_values(document: object) -> dict[str, TraceValue | None]:
    """Return the settings that the document names; null is None. Raises INTERNAL for types other than text."""
    return {name: _trace_value(document, name) for name in TRACE_SETTINGS if has(document, name)}


def _trace_value(document: object, name: str) -> TraceValue | None:
    value = find(document, name)
    if value is None:
        return None
    if name == "trace_level":
        return [string(each) for each in array_member(document, name)]
    return str(value) if name == "trace_file" else string(value)


def _log_values(document: object) -> dict[str, LogValue | None]:
    return {name: _log_value(document, name) for name in LOG_SETTINGS if has(document, name)}


def _log_value(document: object, name: str) -> LogValue | None:
    value = find(document, name)
    return None if value is None else _LOG_TYPES[name](value)
