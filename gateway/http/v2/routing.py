"""How versions share what names none, shown and changed while they serve: /v2/repository/models/NAME/routing."""

import orjson

from gateway.http.v2.body import BodyReader
from gateway.http.v2.exchange import Exchange
from gateway.http.v2.json_document import parse
from gateway.http.v2.target import Target
from gateway.v2.service import Service
from serving.repository.routing import Routing
from sluice.errors import invalid

_EXPECTED = (
    'weights must be an object of versions and numbers, such as {"1": 95, "2": 5}, or null for the configured ones'
)


class RoutingRoute:
    """GET shows the weights and the shares that they give; POST sets them and shows what then holds."""

    def __init__(self, service: Service, body: BodyReader) -> None:
        self._service = service
        self._body = body

    async def answer(self, exchange: Exchange, target: Target) -> None:
        """Raises SluiceError INVALID, naming the field, for a body that does not say weights."""
        repository = self._service.repository
        if exchange.method == "POST":
            repository.set_weights(target.name, _weights(await self._body.read(exchange)))
        await exchange.reply(200, orjson.dumps(_shown(target.name, repository.routing(target.name))))


def _weights(body: bytes | bytearray) -> dict[int, float] | None:
    document = parse(body) if body else None
    if not isinstance(document, dict) or document.keys() != {"weights"}:
        raise invalid("weights", f"the body must hold 'weights' and nothing else: {_EXPECTED}")
    weights = document["weights"]
    if weights is None:
        return None
    if not isinstance(weights, dict) or not all(map(_is_weight, weights.items())):
        raise invalid("weights", f"{_EXPECTED}, got {orjson.dumps(weights).decode()[:200]}")
    return {int(version): float(weight) for version, weight in weights.items()}


def _is_weight(entry: tuple[str, object]) -> bool:
    version, weight = entry
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    return version.isascii() and version.isdecimal() and len(version) < 20 and is_number


def _shown(name: str, routing: Routing) -> dict[str, object]:
    weights = routing.weights.by_version if routing.weights is not None else None
    return {
        "model_name": name,
        "weights": None if weights is None else {str(version): weight for version, weight in weights.items()},
        "is_set": routing.is_set,
        "shares": {str(version): share for version, share in routing.shares.items()},
    }
