"""Usage as clients and `sluice usage` see it: sums of the ledger's days, grouped."""

import asyncio
from datetime import date
from typing import Any

from sluice.errors import invalid
from sluice.gateway.tenancy.ledger.rows import DAY_COUNTS, day_of, today
from sluice.gateway.tenancy.ledger.store import GROUPINGS, LedgerStore, UsageQuery, usage_statement

DEFAULT_DAYS = 30
_MICROS = 1_000_000


def parse_query(start: str, end: str, group_by: list[str]) -> UsageQuery:
    """Parse days as 2026-11-23, "" for the last 30 days, and groups, any of them several with commas between.

    Raises SluiceError INVALID, naming the field.
    """
    last = parse_day(end, "end") if end else today()
    first = parse_day(start, "start") if start else date.fromordinal(max(1, last.toordinal() - DEFAULT_DAYS + 1))
    groups = tuple(name for text in group_by for each in text.split(",") if (name := each.strip()))
    query = UsageQuery(first, last, groups)
    if first > last:
        raise invalid("start", f"start must not be after end ({last}), got {first}")
    unknown = next((each for each in groups if each not in GROUPINGS), None)
    if unknown is not None or len(set(groups)) != len(groups):
        problem = f"got {unknown[:40]!r}" if unknown is not None else "each once"
        raise invalid("group_by", f"group_by must be of {', '.join(GROUPINGS)}, {problem}")
    return query


def parse_day(text: str, name: str) -> date:
    """Parse a day. Raises SluiceError INVALID, naming the field."""
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise invalid(name, f"{name} must be a day such as 2026-11-23, got {text[:40]!r}") from None


async def describe_usage(store: LedgerStore, query: UsageQuery) -> dict[str, Any]:
    """Return the usage of a query as the answer of GET /v1/usage. Raises as the store, and INVALID for too much."""
    rows = await store.sum_usage(query)
    if len(rows) > query.most:
        raise invalid("group_by", f"there are more than {query.most} groups; ask for fewer days or a coarser grouping")
    return await asyncio.to_thread(_describe_rows, query, rows)


def _describe_rows(query: UsageQuery, rows: list[tuple[object, ...]]) -> dict[str, Any]:
    fields = usage_statement(query, "?").fields
    data = [_describe(dict(zip(fields, row, strict=True))) for row in rows]
    counts = (*DAY_COUNTS[:-1], "price")
    total = {name: sum(each[name] for each in data) for name in counts}
    total["price"] = round(total["price"], 6)
    return {
        "object": "list",
        "start": str(query.first),
        "end": str(query.last),
        "group_by": list(query.group_by),
        "data": data,
        "total": total,
    }


def _describe(fields: dict[str, Any]) -> dict[str, Any]:
    micros = fields.pop("price_micros")
    if "day" in fields:
        fields["day"] = str(day_of(fields["day"]))
    return {**fields, "price": micros / _MICROS}
