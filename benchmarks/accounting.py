"""Measures what keys, quotas and the ledger cost a request: microseconds beyond the same request without them.

    python -m benchmarks.accounting [--requests 20000] [--repeats 7] [--redis redis://127.0.0.1:6379/0]

There are 1,000 keys with limits of requests and tokens. The application under them admits one generation and answers;
no HTTP is parsed. The ledger's rows go to a SQLite file, whose thread shares the interpreter's lock. Medians of the
repeats, in turns; with --redis quotas are counted there, one request at a time.
"""

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from time import perf_counter
from uuid import uuid4

import uvloop
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sluice.gateway.calls import CallLog, current_call, note_model
from sluice.gateway.front.http.guard import Guard, GuardMiddleware
from sluice.gateway.tenancy.access.control import AccessControl
from sluice.gateway.tenancy.access.identity import Identity, QuotaLimits
from sluice.gateway.tenancy.access.keys import make_key
from sluice.gateway.tenancy.access.ring import KeyRing
from sluice.gateway.tenancy.ledger.ledger import CallLedger
from sluice.gateway.tenancy.ledger.prices import PriceTable
from sluice.gateway.tenancy.ledger.store import open_ledger
from sluice.gateway.tenancy.quotas.observer import QuotaObserver
from sluice.gateway.tenancy.quotas.redis_store import RedisQuotas
from sluice.gateway.tenancy.quotas.store import MemoryQuotas, QuotaStore

NUM_KEYS = 1000
LIMITS = QuotaLimits(requests_per_minute=10**9, tokens_per_minute=10**9)
KINDS = ("nothing", "keys", "keys and quotas", "keys, quotas and ledger")


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """Admit a generation, and answer."""
    await receive()
    call = current_call.get()
    if call is not None:
        note_model("model")
        await call.admit(100, 100)
        call.prompt_tokens, call.generated_tokens, call.finish = 100, 80, "stop"
        call.first_token = call.started
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


@asynccontextmanager
async def serving(kind: str, folder: Path, redis: str | None) -> AsyncIterator[tuple[ASGIApp, list[bytes]]]:
    """Yield the application behind what `kind` says, and keys that open it."""
    ring, new = KeyRing(None), [make_key(Identity(name=f"key{i}", limits=LIMITS)) for i in range(NUM_KEYS)]
    ring.keep(each.stored for each in new)
    calls, closes = CallLog(AccessControl(ring)), []
    if "ledger" in kind:
        store = open_ledger(str(folder / f"{uuid4().hex}.sqlite"))
        ledger = CallLedger(store, PriceTable())
        calls.observe(ledger)
        closes.append(ledger.close)
    if "quotas" in kind:
        quotas: QuotaStore = MemoryQuotas() if redis is None else RedisQuotas(redis)
        calls.observe(QuotaObserver(quotas, lambda: ring.tenants))
        closes.append(quotas.close)
        while quotas.problem:  # noqa: ASYNC110 - nobody else waits for it
            await asyncio.sleep(0.01)
    guard = Guard(calls, lambda path, status: None, lambda path: "openai")
    app: ASGIApp = application if kind == "nothing" else GuardMiddleware(application, guard)
    try:
        yield app, [b"Bearer " + each.text.encode() for each in new]
    finally:
        for close in closes:
            await close()


async def measure(kind: str, num_requests: int, folder: Path, redis: str | None) -> float:
    """Return the microseconds of a request."""

    async def receive() -> Message:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Message) -> None: ...

    async with serving(kind, folder, redis) as (app, keys):

        async def ask(number: int) -> None:
            headers = [(b"authorization", keys[number % NUM_KEYS])]
            fixed = {"type": "http", "method": "POST", "path": "/v1/completions", "client": ("10.0.0.1", 5)}
            await app({**fixed, "headers": headers, "state": {"request_id": "r"}}, receive, send)

        for number in range(NUM_KEYS):
            await ask(number)
        began = perf_counter()
        for number in range(num_requests):
            await ask(number)
        return (perf_counter() - began) * 1e6 / num_requests


async def run(options: argparse.Namespace, folder: Path) -> None:
    """Measure all kinds in turns, and print the medians."""
    samples: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(options.repeats):
        for kind, values in samples.items():
            values.append(await measure(kind, options.requests, folder, options.redis))
    base = statistics.median(samples[KINDS[0]])
    for kind, values in samples.items():
        median, span = statistics.median(values), f"({min(values):.1f} to {max(values):.1f})"
        print(f"{kind:<26} {median:7.1f} us  {median - base:+7.1f} us  {span}")


def main() -> None:
    """Measure in a temporary folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--redis", help="URL of a Redis where quotas are counted")
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(parser.parse_args(), Path(folder)))


if __name__ == "__main__":
    main()
