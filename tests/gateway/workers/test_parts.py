"""The parts of workers alone: wires, the choice of who answers, sums of metrics, quotas of several processes."""

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics_latest
from starlette.types import Message, Receive, Scope, Send

from sluice.gateway.front.http.access import count_writer
from sluice.gateway.front.http.sse import EventStreamResponse, push_all
from sluice.gateway.front.listeners import ListenError, listen, listen_together, listener_url
from sluice.gateway.telemetry.metrics import GatewayMetrics
from sluice.gateway.tenancy.access.identity import QuotaLimits
from sluice.gateway.tenancy.quotas.account import Charge, Hold, Refusal, make_party
from sluice.gateway.tenancy.quotas.store import MemoryQuotas
from sluice.gateway.workers import dispatch
from sluice.gateway.workers.answering import ForwardedServer
from sluice.gateway.workers.counts import SummedRegistry, WorkerCounts, read_counts
from sluice.gateway.workers.dispatch import Dispatch
from sluice.gateway.workers.forwarding import HostApplication
from sluice.gateway.workers.messages import Counts, Decision, OfRequest, Piece, Reserve, Settle
from sluice.gateway.workers.quotas import HostQuotas, QuotaDesk
from sluice.gateway.workers.slot import Slot, WorkerMaker
from sluice.gateway.workers.wire import Wire

DECODER: "msgspec.msgpack.Decoder[OfRequest]" = msgspec.msgpack.Decoder(OfRequest)


# --- wires ---


@given(st.lists(st.binary(max_size=300), max_size=12), st.integers(1, 64))
def test_messages_arrive_whole_however_they_are_cut(bodies: list[bytes], size: int) -> None:
    async def check() -> None:
        wire = Wire[OfRequest](DECODER)
        wire.connection_made(_Paused())
        encoded = [msgspec.msgpack.encode(Piece(body, is_last=True)) for body in bodies]
        data = b"".join(len(each).to_bytes(4) + each for each in encoded)
        for start in range(0, len(data), size):
            wire.data_received(data[start : start + size])
        wire.connection_lost(None)
        read = []
        while (message := await wire.read()) is not None:
            assert isinstance(message, Piece)
            read.append(message.body)
        assert read == bodies

    asyncio.run(check())


class _Paused(asyncio.Transport):
    """A transport that goes nowhere."""

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


@pytest.fixture
async def wires() -> AsyncIterator[tuple[Wire[OfRequest], Wire[OfRequest]]]:
    """Two ends of one connection."""
    loop = asyncio.get_running_loop()
    ends = []
    for each in socket.socketpair():
        each.setblocking(False)
        _, wire = await loop.create_connection(lambda: Wire[OfRequest](DECODER), sock=each)
        ends.append(wire)
    yield ends[0], ends[1]
    for wire in ends:
        wire.close()


async def test_a_slow_reader_holds_its_writer_back(wires: tuple[Wire[OfRequest], Wire[OfRequest]]) -> None:
    mine, theirs = wires
    num_written = 0

    async def write() -> None:
        nonlocal num_written
        for _ in range(400):
            await mine.write(Piece(bytes(1 << 16), is_last=False))
            num_written += 1

    writing = asyncio.create_task(write())
    await asyncio.sleep(0.3)
    assert num_written < 100
    for _ in range(400):
        assert await theirs.read() is not None
    await writing


async def test_an_end_that_closes_is_noticed(wires: tuple[Wire[OfRequest], Wire[OfRequest]]) -> None:
    mine, theirs = wires
    reading = asyncio.create_task(mine.read())
    await asyncio.sleep(0)
    theirs.close()
    assert await reading is None
    await mine.wait_closed()
    await mine.write(Piece(b"", is_last=True))  # into nothing


# --- who answers ---


class Client:
    """A request, and who has answered it with which body."""

    def __init__(self, *pieces: bytes, headers: dict[str, str] | None = None, method: str = "POST") -> None:
        self._pieces = list(pieces)
        self.answered: tuple[str, bytes] | None = None
        named = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        self.scope: Scope = {"type": "http", "method": method, "path": "/v1/completions", "headers": named}

    async def receive(self) -> Message:
        if not self._pieces:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": self._pieces.pop(0), "more_body": bool(self._pieces)}

    def app(self, name: str) -> Any:
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            body = b""
            while True:
                message = await receive()
                body += message.get("body", b"")
                if not message.get("more_body", False):
                    break
            self.answered = name, body

        return answer

    async def ask(self) -> str:
        await Dispatch(self.app("worker"), self.app("host"), {"rill"})(self.scope, self.receive, _ignore)
        assert self.answered is not None
        return self.answered[0]


async def _ignore(message: Message) -> None: ...


async def test_a_worker_answers_for_its_models_alone() -> None:
    assert await Client(b'{"prompt": "x", "model": "rill"}').ask() == "worker"
    assert await Client(b'{"model": "rill:en"}').ask() == "worker"
    assert await Client(b'{"model": "other"}').ask() == "host"
    assert await Client(b'{"model": 3}').ask() == "host"
    assert await Client(b"{").ask() == "host"
    assert await Client(b'{"model": "\xff"}').ask() == "host"
    assert await Client(b'{"a": ' + b"[" * 100_000).ask() == "host"
    assert await Client(b"").ask() == "host"
    assert await Client(b'{"model": "rill"}', headers={"idempotency-key": "a"}).ask() == "host"
    assert await Client(b'{"model": "rill"}', method="GET").ask() == "host"


async def test_a_body_in_pieces_reaches_whoever_answers_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(b'{"model": ', b'"rill"', b"}")
    assert await client.ask() == "worker"
    assert client.answered == ("worker", b'{"model": "rill"}')
    monkeypatch.setattr(dispatch, "MOST_BYTES", 10)
    client = Client(b'{"model": ', b'"rill"', b', "prompt": ', b'"x"}')
    assert await client.ask() == "host"
    assert client.answered == ("host", b'{"model": "rill", "prompt": "x"}')
    monkeypatch.setattr(dispatch, "BODY_TIMEOUT_S", 0.01)


async def test_a_client_that_stops_sending_is_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "BODY_TIMEOUT_S", 0.01)
    asked: list[Receive] = []

    async def receive() -> Message:
        if asked:
            await asyncio.Event().wait()
        asked.append(receive)
        return {"type": "http.request", "body": b"{", "more_body": True}

    reached = asyncio.Event()

    async def host(scope: Scope, receive: Receive, send: Send) -> None:
        assert await receive() == {"type": "http.request", "body": b"{", "more_body": True}
        reached.set()

    await Dispatch(_ignore_request, host, {"rill"})(Client().scope, receive, _ignore)
    assert reached.is_set()


async def _ignore_request(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError("nobody knows the model")


# --- what the host answers ---


async def test_the_host_s_event_streams_are_whole_and_counted(tmp_path: Path) -> None:
    frames, counted, sent = [b"data: %d\n\n" % number for number in range(200)], list[bytes](), list[Message]()

    async def generate() -> AsyncGenerator[bytes, None]:
        for each in frames:
            yield each

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        count_writer(counted.append, scope["extensions"])
        await EventStreamResponse(partial(push_all, generate()), lambda error: b"")(scope, receive, send)

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        if sent:
            await asyncio.Event().wait()  # the client stays
        return {"type": "http.request", "body": b"", "more_body": False}

    host, worker = ForwardedServer(app, tmp_path / "host"), HostApplication(str(tmp_path / "host"))
    await host.start()
    scope = {**Client().scope, "raw_path": b"/", "query_string": b"", "http_version": "1.1"}
    await worker(scope, receive, send)
    worker.close()
    await host.stop(1.0)
    assert b"".join(each.get("body", b"") for each in sent) == b"".join(frames)
    assert b"".join(counted) == b"".join(frames[1:])  # the first one comes with the answer's head, as a message


# --- metrics ---


class Process:
    """A process with metrics of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("sluice_requests", "Requests.", ("model",), registry=self.registry)
        self.times = Histogram("sluice_times", "Times.", registry=self.registry, buckets=(1.0, 2.0))
        self.open = Gauge("sluice_open", "Open.", registry=self.registry)


def test_counts_of_workers_that_have_ended_stay_and_gauges_go() -> None:
    host, workers, counts = Process(), [Process(), Process()], WorkerCounts()
    host.requests.labels("a").inc(1)
    for number, each in enumerate(workers, 1):
        each.requests.labels("a").inc(10 * number)
        each.requests.labels("b").inc(number)
        each.times.observe(1.5)
        each.open.set(number)
        counts.keep(number, read_counts(each.registry, 0).families)
    counts.keep(1, read_counts(workers[0].registry, 0).families)  # again: it says all since its start
    summed = SummedRegistry(host.registry, counts)
    expected = {("sluice_requests_total", "a"): 31, ("sluice_requests_total", "b"): 3, ("sluice_open", ""): 3}
    expected |= {("sluice_times_count", ""): 2, ("sluice_times_sum", ""): 3}
    assert {key: _values(summed)[key] for key in expected} == expected
    counts.end(2)
    assert {key: _values(summed)[key] for key in expected} == expected | {("sluice_open", ""): 1}
    text = generate_latest(summed).decode()
    assert text.count("# TYPE sluice_requests_total counter") == 1
    assert 'sluice_times_bucket{le="2.0"} 2.0' in text


def _values(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    return {
        (sample.name, sample.labels.get("model", "")): sample.value
        for family in registry.collect()
        for sample in family.samples
        if not sample.name.endswith(("_bucket", "_created"))
    }


def test_the_latest_exemplar_of_several_processes_stays() -> None:
    registries, counts = [], WorkerCounts()
    for number, age in enumerate((1.0, 3.0, 2.0)):
        metrics = GatewayMetrics()
        metrics.open_request("rill", "v2").close()
        [tally] = metrics.tallies.values()
        tally.request_duration.add_traced(0.02, {"trace_id": f"{number}" * 32, "span_id": "ab" * 8}, 100.0 + age)
        registries.append(metrics.registry)
    for number, registry in enumerate(registries[1:]):
        packed = msgspec.msgpack.encode(read_counts(registry, 0))
        counts.keep(number, msgspec.msgpack.decode(packed, type=Counts).families)
    text = openmetrics_latest(SummedRegistry(registries[0], counts)).decode()  # type: ignore[no-untyped-call]
    assert text.count("trace_id") == 1
    [line] = [line for line in text.splitlines() if "trace_id" in line]
    assert f'trace_id="{"1" * 32}"' in line
    assert line.endswith(" 0.02 103.0")


# --- quotas ---


class Desk:
    """Workers that ask one host, whose messages arrive in the order in which they were sent."""

    def __init__(self, limits: QuotaLimits) -> None:
        self.now = 1_000_000_000
        self.store = MemoryQuotas(lambda: self.now)
        party = make_party("key", "k", "key", limits)
        assert party is not None
        self.party = party

    def connect(self) -> tuple[HostQuotas, QuotaDesk]:
        desk = QuotaDesk(self.store)
        tasks = []

        def send(message: Reserve | Settle) -> None:
            if isinstance(message, Settle):
                desk.settle(message)
            else:
                tasks.append(asyncio.ensure_future(answer(message)))

        async def answer(message: Reserve) -> None:
            decision = msgspec.msgpack.decode(msgspec.msgpack.encode(await desk.reserve(message)), type=Decision)
            worker.decide(decision)

        worker = HostQuotas(send)
        return worker, desk


async def test_workers_share_one_limit() -> None:
    desk = Desk(QuotaLimits(requests_per_minute=10, tokens_per_minute=100))
    workers = [desk.connect()[0] for _ in range(4)]

    async def ask(worker: HostQuotas) -> Hold | Refusal:
        return await worker.reserve((worker.open(desk.party),), Charge(requests=1, streams=1), None)

    found = await asyncio.gather(*(ask(each) for each in workers for _ in range(5)))
    assert sum(isinstance(each, Hold) for each in found) == 10
    refusal = next(each for each in found if isinstance(each, Refusal))
    assert (refusal.limit, refusal.most, refusal.party) == ("requests_per_minute", 10, desk.party)
    assert refusal.wait_ms == pytest.approx(6000, abs=10)


async def test_what_was_reserved_is_settled_and_shown_to_the_worker() -> None:
    desk = Desk(QuotaLimits(tokens_per_day=100))
    worker, _ = desk.connect()
    accounts = (worker.open(desk.party),)
    hold = await worker.reserve(accounts, Charge(requests=1, streams=1), None)
    assert isinstance(hold, Hold)
    held = await worker.reserve(accounts, Charge(tokens=60), hold)
    assert isinstance(held, Hold)
    assert accounts[0].day_tokens == 60
    assert isinstance(await worker.reserve(accounts, Charge(tokens=60), held), Refusal)
    worker.settle(accounts, held, [20], 0)
    [account] = desk.store.accounts()
    assert (account.day_tokens, account.num_streams) == (20, 0)


async def test_a_lost_worker_holds_nothing() -> None:
    desk = Desk(QuotaLimits(concurrent_requests=1, tokens_per_day=100))
    worker, kept = desk.connect()
    accounts = (worker.open(desk.party),)
    hold = await worker.reserve(accounts, Charge(requests=1, streams=1), None)
    assert isinstance(hold, Hold)
    await worker.reserve(accounts, Charge(tokens=50), hold)
    kept.close()
    [account] = desk.store.accounts()
    assert (account.day_tokens, account.num_streams) == (0, 0)


async def test_a_request_that_ends_before_its_answer_gives_it_back() -> None:
    desk = Desk(QuotaLimits(concurrent_requests=1))
    worker, _ = desk.connect()
    asking = asyncio.create_task(worker.reserve((worker.open(desk.party),), Charge(requests=1, streams=1), None))
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait((asking,))
    for _ in range(5):
        await asyncio.sleep(0)
    [account] = desk.store.accounts()
    assert account.num_streams == 0


# --- starts ---


async def test_a_worker_that_never_starts_is_tried_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def pause(slot: Slot) -> None:
        pauses.append(slot._pause_s())
        if len(pauses) == 40:
            raise asyncio.CancelledError

    async def fail(slot: Slot) -> bool:
        return False

    monkeypatch.setattr(Slot, "_pause", pause)
    monkeypatch.setattr(Slot, "_fill", fail)
    with socket.socket() as listener, pytest.raises(asyncio.CancelledError):
        await Slot(1, listener, _ignore_request, cast(WorkerMaker, None))._keep()
    assert pauses == sorted(pauses)
    assert 0 < pauses[0] < pauses[-1] == 30


# --- the port ---


def test_sockets_of_one_port() -> None:
    sockets = listen_together("127.0.0.1", 0, "--http-port", 3)
    try:
        assert len({listener_url(each) for each in sockets}) == 1
        with pytest.raises(ListenError, match="is taken"):
            listen_together("127.0.0.1", sockets[0].getsockname()[1], "--http-port", 2)
    finally:
        for each in sockets:
            each.close()
    alone = listen("127.0.0.1", 0, "--http-port")
    alone.close()
