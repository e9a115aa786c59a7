"""What a killed gateway leaves in its ledger: all but the last moment, and sums that equal the rows."""

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import httpx
import pytest

from sluice.gateway.tenancy.ledger.rows import LedgerRow, sum_days, today
from sluice.gateway.tenancy.ledger.store import UsageQuery, open_ledger
from tests.gateway.tenancy.ledger.test_stores import read_all
from tests.server_process import ServerProcess, running_bundled
from tests.waiting import PATIENCE_S, wait_for

pytestmark = pytest.mark.slow
_NUM_CLIENTS = 4
_LOST_S = 1.0
_SLACK_S = 2.0
"""Longest time that this machine, busy with other tests, may keep a thread of the server waiting."""


class Clients:
    """Send requests one after another until the server is gone, and note what was answered, and when."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._numbers = count()
        self.is_over = False
        self.answered: dict[str, tuple[int, float]] = {}
        """Generated tokens and the time of the answer by request id."""

    def ask(self, client: httpx.Client) -> None:
        number = next(self._numbers)
        body = {"model": "rill", "prompt": f"{number} a b c", "max_tokens": number % 7 + 1, "stream": number % 2 == 0}
        body |= {"stream_options": {"include_usage": True}} if body["stream"] else {}
        answer = client.post("/v1/completions", json=body, headers={"x-request-id": f"r{number}"})
        assert answer.status_code == 200, answer.text
        text = answer.text.rpartition("data: {")[2].partition("\n")[0]
        tokens = answer.json()["usage"] if not body["stream"] else httpx.Response(200, text="{" + text).json()["usage"]
        self.answered[f"r{number}"] = tokens["completion_tokens"], time.time()

    def start(self) -> list[threading.Thread]:
        self.is_over = False
        threads = [threading.Thread(target=self.run_until_killed) for _ in range(_NUM_CLIENTS)]
        for thread in threads:
            thread.start()
        return threads

    @contextmanager
    def working(self) -> Iterator[None]:
        """Send requests meanwhile, and wait for the last answers."""
        threads = self.start()
        try:
            yield
        finally:
            self.is_over = True
            for thread in threads:
                thread.join(PATIENCE_S)

    def run_until_killed(self) -> None:
        with self._server.client() as client:
            try:
                while not self.is_over:
                    self.ask(client)
            except httpx.HTTPError:
                return


def wait_for_rows(path: Path, at_least: int) -> Sequence[LedgerRow]:
    return wait_for(lambda: read_ledger(path)[0], lambda rows: len(rows) >= at_least)


def read_ledger(path: Path) -> tuple[Sequence[LedgerRow], list[tuple[object, ...]]]:
    async def read() -> tuple[Sequence[LedgerRow], list[tuple[object, ...]]]:
        store, day = open_ledger(str(path)), today()
        try:
            return await read_all(store, day, day), await store.sum_usage(UsageQuery(day, day, ()))
        finally:
            await store.close()

    return asyncio.run(read())


def generated(server: ServerProcess) -> int:
    page = httpx.get(server.metrics_url, timeout=PATIENCE_S).text
    [line] = [each for each in page.splitlines() if each.startswith('sluice_generation_tokens_total{model="rill"}')]
    return int(float(line.split()[-1]))


@pytest.mark.long
def test_kills_of_engine_and_gateway_cost_the_last_second_alone(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    arguments = ("--ledger", str(path), "--state-path", str(tmp_path / "state"))
    with running_bundled(tmp_path / "log.txt", *arguments) as server:
        server.wait_ready()
        clients = Clients(server)
        with server.client() as client:
            for _ in range(30):
                clients.ask(client)
        engine = server.engine()
        with clients.working():
            wait_for_rows(path, 60)
            engine.kill()
            wait_for_rows(path, 120)
        rows = wait_for_rows(path, len(clients.answered))
        assert {row.request_id: row.generated_tokens for row in rows} == {
            each: tokens for each, (tokens, _) in clients.answered.items()
        }
        assert sum(row.generated_tokens for row in rows) == generated(server)
        threads = clients.start()
        wait_for_rows(path, len(rows) + 60)
        killed = time.time()
        server.process.kill()
        for thread in threads:
            thread.join(PATIENCE_S)
    rows, [total] = read_ledger(path)
    kept = {row.request_id: row.generated_tokens for row in rows}
    assert len(kept) == len(rows) >= 180, "a row stands twice"
    lost = {each: at for each, (_, at) in clients.answered.items() if each not in kept}
    assert all(killed - at < _LOST_S + _SLACK_S for at in lost.values())
    assert {each: tokens for each, (tokens, _) in clients.answered.items() if each in kept}.items() <= kept.items()
    assert total == tuple(map(sum, zip(*(day[6:] for day in sum_days(rows)), strict=True)))
    assert total[0] == len(rows)
