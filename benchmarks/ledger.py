"""The ledger with a million rows of 1,000 keys: how long usage, writing and pruning take.

    python -m benchmarks.ledger [--rows 1000000] [--keys 1000] [--days 90]

The rows are made by SQL. Medians of some repeats are printed.
"""

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from time import perf_counter

import apsw

from sluice.gateway.tenancy.ledger.rows import DAY_US, LedgerRow, day_number, sum_days, today
from sluice.gateway.tenancy.ledger.store import LedgerBatch, UsageQuery, open_ledger

_COLUMNS = ", ".join(LedgerRow._fields)
_FILL = f"""
WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i + 1 < :rows)
INSERT INTO sluice_calls ({_COLUMNS})
SELECT (:first + i * :days / :rows) * {DAY_US} + i, NULL, (:first + i * :days / :rows) * {DAY_US} + i + 1000000,
       printf('%024x', i), printf('key%04d', i % :keys), printf('name%04d', i % :keys), printf('t%d', i % 20),
       printf('model%d', i % 3), '', 'openai', '/v1/chat/completions', 500, 100, 200, 'stop', 200, 2000, 4000, 300,
       '', '', ''
FROM n
"""
_SUM = f"""
INSERT INTO sluice_usage_days
SELECT arrived_us / {DAY_US}, key_id, tenant, model, adapter, max(key_name), count(*), 0, sum(prompt_tokens),
       sum(cached_tokens), sum(generated_tokens), sum(bytes_in), sum(bytes_out), sum(price_micros)
FROM sluice_calls GROUP BY 1, 2, 3, 4, 5
"""


async def _measure(name: str, work: Callable[[], Awaitable[object]], repeats: int = 5) -> None:
    times = []
    for _ in range(repeats):
        began = perf_counter()
        await work()
        times.append(perf_counter() - began)
    print(f"{name:<44} {statistics.median(times) * 1e3:9.1f} ms")


async def _run(options: argparse.Namespace, folder: Path) -> None:
    path, last = folder / "ledger.sqlite", today()
    first = last - timedelta(days=options.days - 1)
    store = open_ledger(str(path))
    await store.write(LedgerBatch("benchmark", 1, [], []))
    with apsw.Connection(str(path)) as connection:
        values = {"rows": options.rows, "keys": options.keys, "days": options.days, "first": day_number(first)}
        connection.execute(_FILL, values)
        connection.execute(_SUM)
    print(f"{options.rows} rows of {options.keys} keys and {options.days} days: {path.stat().st_size / 1e6:.0f} MB")
    month = last - timedelta(days=29)
    for name, query in (
        ("usage by day, 30 days", UsageQuery(month, last)),
        ("usage by key, 30 days", UsageQuery(month, last, ("key",))),
        ("usage by day and model, all days", UsageQuery(first, last, ("day", "model"))),
        ("usage of one key by day, all days", UsageQuery(first, last, key_id="key0007")),
    ):
        await _measure(name, lambda query=query: store.sum_usage(query))  # type: ignore[misc]
    numbers = iter(range(2, 100))
    at = day_number(last) * DAY_US
    row = LedgerRow(at, at, at, "id", "k", "n", "t", "m", "", "openai", "/v1", 1, 0, 1, "stop", 200, 1, 1, 1)
    rows = [row] * 1000
    await _measure("write of 1,000 rows", lambda: store.write(LedgerBatch("b", next(numbers), rows, sum_days(rows))))
    await _measure("deletion of 5,000 old rows", lambda: store.delete_before(last, 5000))

    async def export() -> None:
        async for _ in store.read_rows(UsageQuery(first, last)):
            pass

    await _measure("export of all rows", export, 1)
    await store.close()


def main() -> None:
    """Measure on a file in a temporary folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("--rows", 1_000_000), ("--keys", 1000), ("--days", 90)):
        parser.add_argument(name, type=int, default=default)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_run(parser.parse_args(), Path(folder)))


if __name__ == "__main__":
    main()
