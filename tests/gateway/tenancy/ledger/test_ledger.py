"""The ledger as the observer of calls: a row for each that reached a model, none lost while the store is away."""

import asyncio
import resource
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from sluice.engine.config import EngineConfig
from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.calls import Call
from sluice.gateway.tenancy.access.identity import Identity, RouteGroup
from sluice.gateway.tenancy.ledger import ledger as module
from sluice.gateway.tenancy.ledger.ledger import CallLedger
from sluice.gateway.tenancy.ledger.prices import ModelPrices, PriceTable, read_prices
from sluice.gateway.tenancy.ledger.rows import LedgerRow, today
from sluice.gateway.tenancy.ledger.store import LedgerBatch, open_ledger
from tests.engine.fake_runner import EchoRunner
from tests.engine.in_process_client import InProcessEngineClient
from tests.gateway.answering import MODEL, Answering, answering
from tests.gateway.tenancy.access.test_calls import OPENAI, infer_request
from tests.gateway.tenancy.ledger.test_stores import read_all
from tests.paths import RILL_TOKENIZER
from tests.waiting import PATIENCE_S, until

WHO = Identity(key_id="k1", name="ci", tenant="team")
PRICES = PriceTable({"rill:*": ModelPrices(prompt=9.0), "rill": ModelPrices(2.0, 5.0, 0.5), "*": ModelPrices(1.0)})


def ended_call(model: str = "rill", identity: Identity | None = WHO, **fields: Any) -> Call:
    call = Call((), "openai", "/v1/x", "req")
    call.group, call.model, call.identity, call.status = RouteGroup.INFERENCE, model, identity, 200
    for name, value in fields.items():
        setattr(call, name, value)
    call.release()
    return call


class SwitchableStore:
    """Keeps batches, and raises what `error` is."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.batches: list[LedgerBatch] = []
        self.asked = asyncio.Event()

    async def write(self, batch: LedgerBatch) -> None:
        self.asked.set()
        if self.error is not None:
            raise self.error
        self.batches.append(batch)

    async def delete_before(self, day: Any, most: int) -> int:
        return 0

    async def close(self) -> None: ...

    @property
    def rows(self) -> list[LedgerRow]:
        return [row for batch in self.batches for row in batch.rows]


@pytest.fixture
def store() -> SwitchableStore:
    return SwitchableStore()


@pytest.fixture
async def ledger(store: SwitchableStore, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[CallLedger]:
    monkeypatch.setattr(module, "FLUSH_S", 0.01)
    monkeypatch.setattr(module, "_LAST_WRITE_S", 0.5)
    made = CallLedger(store, PRICES)  # type: ignore[arg-type]  # it is not asked for usage
    yield made
    await made.close()


def metric(ledger: CallLedger, name: str) -> float:
    return next(each.samples[0].value for each in ledger.collect() if each.name == f"sluice_ledger_{name}")


async def test_calls_without_a_model_have_no_row(ledger: CallLedger, store: SwitchableStore) -> None:
    for call in (
        ended_call(""),
        ended_call(group=None),
        ended_call(group=RouteGroup.REPOSITORY),
        ended_call("nope", status=404),
        ended_call("not yours", status=403),
    ):
        ledger.end(call)
    ledger.end(ended_call(status=429, finish="overloaded"))
    ledger.end(ended_call(group=RouteGroup.EMBEDDINGS, status=None, finish="cancelled", identity=None))
    await ledger.flush()
    assert [(row.status, row.finish, row.key_id, row.has_failed) for row in store.rows] == [
        (429, "overloaded", "k1", True),
        (None, "cancelled", "", False),
    ]


async def test_rows_wait_while_the_store_is_away(
    ledger: CallLedger, store: SwitchableStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 5)
    store.error = SluiceError(ErrorCode.UNAVAILABLE, "the ledger cannot be used: disk is full")
    ledger.end(ended_call(request_id="0"))
    await store.asked.wait()
    for number in range(1, 8):
        ledger.end(ended_call(request_id=str(number)))
    await until(lambda: metric(ledger, "failing"))
    assert (metric(ledger, "waiting_rows"), metric(ledger, "dropped_rows"), metric(ledger, "rows")) == (6, 2, 0)
    store.error = None
    await ledger.flush()
    assert [row.request_id for row in store.rows] == ["0", "1", "2", "3", "4", "5"]
    assert (metric(ledger, "waiting_rows"), metric(ledger, "dropped_rows"), metric(ledger, "rows")) == (0, 2, 6)
    assert not metric(ledger, "failing")
    assert [record.message for record in caplog.records if "disk is full" in record.message].__len__() == 1


async def test_a_fault_of_ours_costs_one_batch_and_is_logged(
    ledger: CallLedger, store: SwitchableStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.error = TypeError("bug")
    ledger.end(ended_call())
    await ledger.flush()
    assert "1 rows of the ledger are lost" in caplog.text
    store.error = None
    ledger.end(ended_call())
    await ledger.flush()
    assert (len(store.rows), metric(ledger, "dropped_rows")) == (1, 1)


async def test_a_closed_ledger_says_what_it_lost(
    store: SwitchableStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_LAST_WRITE_S", 0.01)
    ledger = CallLedger(store, PRICES)  # type: ignore[arg-type]  # it is not asked for usage
    store.error = SluiceError(ErrorCode.UNAVAILABLE, "gone")
    ledger.end(ended_call())
    await ledger.close()
    assert "1 rows of the ledger are lost" in caplog.text


@pytest.mark.parametrize(
    ("model", "adapter", "price"), [("rill", "", 28), ("rill", "a", 90), ("other", "", 10), ("other", "b", 10)]
)
def test_prices(model: str, adapter: str, price: int) -> None:
    # Ten prompt tokens, of which four were cached, and three generated: 6 x 2 + 4 x 0.5 + 3 x 5 = 29.
    assert PRICES.price(model, adapter, 10, 4, 3) == price + (model == "rill" and not adapter)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("rill: {prompt: x}", "Expected `float`"),
        ("rill: {promt: 1}", "unknown field `promt`"),
        ("rill: {prompt: -1}", "rill.prompt must be at least 0"),
        ("rill: {prompt: .nan}", "rill.prompt must be at least 0"),
        ("- 1", "Expected `object`"),
        ("a: [", "expected"),
        (None, "No such file"),
    ],
)
def test_a_bad_price_table_is_explained(tmp_path: Path, text: str | None, problem: str) -> None:
    path = tmp_path / "prices.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match="--price-table") as raised:
        read_prices(str(path))
    assert problem in str(raised.value)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Answering, Path]]:
    def make_engine() -> InProcessEngineClient:
        return InProcessEngineClient(EngineConfig(model_path="none"), EchoRunner(num_blocks=256))

    path = tmp_path_factory.mktemp("ledger") / "ledger.sqlite"
    with answering(make_engine, RILL_TOKENIZER) as served:
        ledger = CallLedger(open_ledger(str(path)), PRICES)
        served.server.accounts.calls.observe(ledger)
        served.server.rooms.join(close=ledger.close)
        yield served, path


async def test_rows_of_a_server_s_calls(served: tuple[Answering, Path]) -> None:
    server, path = served
    server.openai("/v1/completions", OPENAI)
    server.model_infer(infer_request())
    server.client.get(f"/v2/models/{MODEL}/config")
    server.client.post("/v1/completions", json={"model": "nope", "prompt": "a"})
    server.client.post("/v1/completions", json={"model": MODEL, "prompt": "a", "max_tokens": 10**9})
    day, other = today(), open_ledger(str(path))

    async def are_all_there() -> list[LedgerRow]:
        rows = await read_all(other, day, day)
        return rows if len(rows) == 3 else []

    rows: list[LedgerRow] = await until(are_all_there)
    await other.close()
    assert [(row.protocol, row.generated_tokens, row.finish, row.status) for row in rows] == [
        ("openai", 4, "length", 200),
        ("grpc", 4, "length", 0),
        ("openai", 0, "invalid", 400),
    ]
    assert all(row.model == MODEL and row.arrived_us <= row.ended_us for row in rows)
    assert all(row.arrived_us < (row.first_token_us or 0) <= row.ended_us for row in rows[:2])
    first = rows[0]
    cached = round(first.cached_tokens * 0.5)
    assert first.price_micros == (first.prompt_tokens - first.cached_tokens) * 2 + cached + 4 * 5


async def test_every_protocol_names_the_session_of_an_agent_s_request(served: tuple[Answering, Path]) -> None:
    server, path = served
    headers = {"x-claude-code-session-id": "program", "x-claude-code-agent-id": "explore"}
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 1}
    for url, body in (
        ("/v1/completions", {"model": MODEL, **OPENAI}),
        ("/v1/messages", chat),
        ("/api/chat", chat | {"stream": False}),
        (f"/v2/models/{MODEL}/generate", {"text_input": "a b", "max_tokens": 4}),
    ):
        assert server.client.post(url, json=body, headers=headers).status_code == 200, url
    server.stub.ModelInfer(infer_request(), metadata=[*headers.items()], timeout=PATIENCE_S)
    list(server.stub.ModelStreamInfer(iter([infer_request()]), metadata=[*headers.items()], timeout=PATIENCE_S))
    [use] = [each for each in server.server.metrics.sessions.latest(9) if each.name == "program/explore"]
    assert (use.parent, use.num_turns) == ("program", 6)
    assert use.generated_tokens > 6
    [row] = server.server.metrics.sessions.rows(1, use.seen_at + 2.5)
    assert (row.name, row.num_turns, row.seen_s) == (use.name, 6, 2.5)
    day, other = today(), open_ledger(str(path))

    async def named() -> list[LedgerRow]:
        rows = [row for row in await read_all(other, day, day) if row.session]
        return rows if len(rows) == 6 else []

    rows: list[LedgerRow] = await until(named)
    await other.close()
    assert {(row.session, row.parent_session) for row in rows} == {("program/explore", "program")}


async def test_a_full_disk_holds_rows_back_and_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "FLUSH_S", 0.01)
    ledger = CallLedger(open_ledger(str(tmp_path / "ledger.sqlite")), PRICES)
    ledger.end(ended_call(request_id="first"))
    await ledger.flush()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        for number in range(3000):
            ledger.end(ended_call(request_id=f"{number}" * 50))
        await until(lambda: metric(ledger, "failing"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "rows wait in memory" in caplog.text
    await ledger.flush()
    day = today()
    assert len(await read_all(ledger.store, day, day)) == 3001
    assert metric(ledger, "dropped_rows") == 0
    await ledger.close()
