"""Rows of the ledger, and their sums by day."""

from collections.abc import Iterable
from datetime import UTC, date, datetime
from typing import NamedTuple

from sluice.gateway.calls import CACHED, Call
from sluice.gateway.tenancy.access.identity import RouteGroup
from sluice.gateway.tenancy.ledger.prices import PriceTable

_MODEL_GROUPS = (RouteGroup.INFERENCE, RouteGroup.EMBEDDINGS, RouteGroup.RAG)
_REFUSED = (401, 403, 404, 5, 7, 16)
"""Statuses of HTTP and gRPC that mean, without a token, that no model was reached: the name is the client's own."""
_GOOD_FINISHES = ("", "stop", "length", "tool_calls", "cancelled", CACHED)
_FIRST_HTTP_STATUS, _FIRST_HTTP_ERROR = 100, 400
_US = 1_000_000
DAY_US = 86_400 * _US
_EPOCH = date(1970, 1, 1).toordinal()


class LedgerRow(NamedTuple):
    """The row of one request that reached a model. Times are microseconds since 1970, UTC.

    Ids of the OpenAI routes' answers are `request_id` behind a prefix. `status` is HTTP's or the number of gRPC's, None
    where the client got none; `price_micros` is in millionths of the price table's unit. `model` is the one that
    answered; `route` is the name that the client gave where that is a route, else "". `session` and `parent_session`
    are the client's names of its session and of the one that started that, "" for none.
    """

    arrived_us: int
    first_token_us: int | None
    ended_us: int
    request_id: str
    key_id: str
    key_name: str
    tenant: str
    model: str
    adapter: str
    protocol: str
    operation: str
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    finish: str
    status: int | None
    bytes_in: int
    bytes_out: int
    price_micros: int
    route: str = ""
    session: str = ""
    parent_session: str = ""

    @property
    def has_failed(self) -> bool:
        """Whether the server could not answer. A client that disconnects is no failure."""
        status = self.status or 0
        has_error = 1 < status < _FIRST_HTTP_STATUS or status >= _FIRST_HTTP_ERROR
        return has_error or self.finish not in _GOOD_FINISHES


class DaySum(NamedTuple):
    """The use that one key made of one model on one day, by UTC. `day` is the number of days since 1970."""

    day: int
    key_id: str
    tenant: str
    model: str
    adapter: str
    key_name: str
    requests: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    bytes_in: int
    bytes_out: int
    price_micros: int


DAY_KEY = DaySum._fields[:5]
"""The fields that tell sums apart."""
DAY_COUNTS = DaySum._fields[6:]
"""The fields that add up."""


def reached_model(call: Call) -> bool:
    """Whether an ended call has a row."""
    if not call.model or call.group not in _MODEL_GROUPS:
        return False
    return call.status not in _REFUSED or call.prompt_tokens > 0


def make_row(call: Call, prices: PriceTable) -> LedgerRow:
    """Return the row of an ended call."""
    identity = call.identity
    started, arrived = call.started, call.arrived_at
    prompt, cached, generated = call.prompt_tokens, call.cached_tokens, call.generated_tokens
    return LedgerRow(
        int(arrived * _US),
        int((arrived + call.first_token - started) * _US) if call.first_token else None,
        int((arrived + call.ended - started) * _US),
        call.request_id,
        "" if identity is None else identity.key_id,
        "" if identity is None else identity.name,
        call.tenant,
        call.model,
        call.adapter,
        call.protocol,
        call.operation,
        prompt,
        cached,
        generated,
        call.finish,
        call.status,
        call.bytes_in,
        call.bytes_out,
        prices.price(call.model, call.adapter, prompt, cached, generated),
        call.route,
        call.session,
        call.parent_session,
    )


def sum_days(rows: Iterable[LedgerRow]) -> list[DaySum]:
    """Return the sums of rows, in the order of their keys: writers that meet lock them in one order."""
    sums: dict[tuple[int, str, str, str, str], list[int]] = {}
    names: dict[str, str] = {}
    num_counts = len(DAY_COUNTS)
    for row in rows:
        key = (row.arrived_us // DAY_US, row.key_id, row.tenant, row.model, row.adapter)
        counts = sums.get(key)
        if counts is None:
            counts = sums[key] = [0] * num_counts
        names[row.key_id] = row.key_name
        counts[0] += 1
        counts[1] += row.has_failed
        counts[2] += row.prompt_tokens
        counts[3] += row.cached_tokens
        counts[4] += row.generated_tokens
        counts[5] += row.bytes_in
        counts[6] += row.bytes_out
        counts[7] += row.price_micros
    return [DaySum(*key, names[key[1]], *sums[key]) for key in sorted(sums)]


def day_number(day: date) -> int:
    return day.toordinal() - _EPOCH


def day_of(number: int) -> date:
    return date.fromordinal(number + _EPOCH)


def day_at(seconds: float) -> date:
    """Return the day of a time in seconds since 1970."""
    return datetime.fromtimestamp(seconds, UTC).date()


def today() -> date:
    return datetime.now(UTC).date()
