"""The parts of workers alone: who answers, HTTP between processes, sums of metrics, quotas of several processes."""

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sluice.gateway.front.http.access import count_writer
from sluice.gateway.front.http.protocol import NAMES_AS_SENT
from sluice.gateway.front.http.sse import EventStreamResponse, push_all
from sluice.gateway.front.listeners import ListenError, listen, listen_together, listener_url
from sluice.gateway.telemetry.metrics import GatewayMetrics
from sluice.gateway.tenancy.access.identity import QuotaLimits
from sluice.gateway.tenancy.quotas.account import Charge, Hold, Refusal, make_party
from sluice.gateway.tenancy.quotas.store import MemoryQuotas
from sluice.gateway.workers import worker as dispatch
from sluice.gateway.workers.counts import Family, SummedRegistry, WorkerCounts, read_counts
from sluice.gateway.workers.models import Wanted, WorkerModels
from sluice.gateway.workers.private import Peer, PrivateRoute, PrivateServer
from sluice.gateway.workers.quotas import HostQuotas, QuotaDesk, Reserve, Settle
from sluice.gateway.workers.slot import Slot, WorkerMaker
from sluice.gateway.workers.worker import Dispatch

# --- who answers ---


class Client:
    """A request whose client stays until it `is_gone`; who has answered it with which body, and what was `sent`."""

    def __init__(self, *pieces: bytes, headers: dict[str, str] | None = None, **scope: Any) -> None:
        self._pieces = list(pieces)
        self.answered: tuple[str, bytes] | None = None
        self.sent: list[Message] = []
        self.is_gone = asyncio.Event()
        self.scope: Scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "raw_path": b"/x%20y",
            "query_string": b"a=1",
            "http_version": "1.1",
            "client": ("10.0.0.7", 4711),
            "headers": [(name.encode(), value.encode()) for name, value in (headers or {}).items()],
            **scope,
        }

    async def receive(self) -> Message:
        if self._pieces:
            return {"type": "http.request", "body": self._pieces.pop(0), "more_body": bool(self._pieces)}
        await self.is_gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(each.get("body", b"") for each in self.sent)

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
        await dispatch_to(self.app("worker"), self.app("host"))(self.scope, self.receive, _ignore)
        assert self.answered is not None
        return self.answered[0]


@dataclass
class Served:
    """The models of a worker: version 2 of one."""

    is_whole: bool
    wanted: Wanted

    def serves(self, name: str, version: str = "") -> bool:
        return name == "rill" and version in ("", "2")


def dispatch_to(worker: ASGIApp, host: ASGIApp, lacks: str = "") -> Dispatch:
    wanted = Wanted(takes_v2=lacks != "takes_v2", takes_rag=lacks != "takes_rag")
    return Dispatch(worker, host, cast(WorkerModels, Served(lacks != "is_whole", wanted)))


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


@pytest.mark.parametrize(
    ("path", "answerer", "needs"),
    [
        ("/v2/models/rill/infer", "worker", "takes_v2"),
        ("/v2/models/rill/versions/2/generate_stream", "worker", "takes_v2"),
        ("/v2/models/rill/versions/1/infer", "host", ""),
        ("/v2/models/other/infer", "host", ""),
        ("/v2/repository/models/rill/load", "host", ""),
        ("/v2/models/rill/trace/setting", "host", ""),
        ("/v1/rag/docs/query", "worker", "takes_rag"),
        ("/v1/rag/docs/search", "worker", "is_whole"),
        ("/v1/rag/docs/documents", "host", ""),
        ("/v1/files", "host", ""),
        ("/v1/responses", "host", ""),
    ],
)
async def test_a_path_names_its_model_or_is_the_hosts(path: str, answerer: str, needs: str) -> None:
    client = Client(b"{}", path=path)
    assert await client.ask() == answerer
    if needs:
        client = Client(b"{}", path=path)
        lacking = dispatch_to(client.app("worker"), client.app("host"), needs)
        await lacking(client.scope, client.receive, _ignore)
        assert client.answered == ("host", b"{}")


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

    await dispatch_to(_ignore_request, host)(Client().scope, receive, _ignore)
    assert reached.is_set()


async def _ignore_request(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError("nobody knows the model")


# --- HTTP between processes ---


@asynccontextmanager
async def serving(app: ASGIApp | None, folder: Path, routes: Mapping[str, PrivateRoute] = {}) -> AsyncIterator[Peer]:
    """Another process, as it is asked."""
    server, peer = PrivateServer(folder / "host", routes, app), Peer(folder / "host")
    server.start()
    yield peer
    peer.close()
    await server.stop(1.0)


async def test_a_request_passes_with_its_client_and_its_headers_as_they_were_sent(tmp_path: Path) -> None:
    seen: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        names = scope["extensions"][NAMES_AS_SENT]["names"]
        seen.append((scope["raw_path"], scope["query_string"], scope["client"], scope["headers"], names))
        body, has_more = b"", True
        while has_more:
            message = await receive()
            body, has_more = body + message["body"], message["more_body"]
        await send({"type": "http.response.start", "status": 201, "headers": [(b"x-of-host", b"yes")]})
        await send({"type": "http.response.body", "body": body})

    names = [b"Host", b"X-Own"]
    fixed = [(b"host", b"h"), (b"x-own", b"1")]
    async with serving(app, tmp_path) as peer:
        for framing in ([(b"transfer-encoding", b"chunked")], [(b"content-length", b"400000")]):
            extensions = {NAMES_AS_SENT: {"names": [*names, framing[0][0].title()]}}
            request = Client(bytes(100_000), b"x" * 300_000, extensions=extensions)
            request.scope["headers"] = fixed + framing
            await peer(request.scope, request.receive, request.send)
            assert request.sent[0]["status"] == 201
            assert (b"x-of-host", b"yes") in request.sent[0]["headers"]
            assert request.body == bytes(100_000) + b"x" * 300_000
    for raw_path, query, client, headers, sent in seen:
        assert (raw_path, query, client) == (b"/x%20y", b"a=1", ("10.0.0.7", 4711))
        assert headers[:2] == fixed
        assert sent[:2] == names
        assert len(sent) == len(headers)


async def test_an_event_stream_passes_whole_and_counted(tmp_path: Path) -> None:
    frames, counted = [b"data: %d\n\n" % number for number in range(200)], list[bytes]()

    async def generate() -> AsyncGenerator[bytes, None]:
        for each in frames:
            yield each

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        count_writer(counted.append, scope["extensions"])
        await EventStreamResponse(partial(push_all, generate()), lambda error: b"")(scope, receive, send)

    async with serving(app, tmp_path) as peer:
        request = Client(b"")
        await peer(request.scope, request.receive, request.send)
    assert request.body == b"".join(frames)
    assert b"".join(counted) == b"".join(frames[1:])  # the first one comes with the answer's head, as a message


async def test_a_client_that_leaves_is_gone_for_the_host_too(tmp_path: Path) -> None:
    has_begun, is_gone = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        has_begun.set()
        assert (await receive())["type"] == "http.disconnect"
        is_gone.set()

    async with serving(app, tmp_path) as peer:
        request = Client(b"")
        passing = asyncio.create_task(peer(request.scope, request.receive, request.send))
        await has_begun.wait()
        request.is_gone.set()
        await passing
        await is_gone.wait()
    assert not request.sent


async def test_a_host_that_is_away_is_unavailable_and_one_that_breaks_cuts_the_answer(tmp_path: Path) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"some", "more_body": True})
        raise RuntimeError

    async with serving(app, tmp_path) as peer:
        request = Client(b"")
        with pytest.raises(ConnectionError):
            await peer(request.scope, request.receive, request.send)
        assert request.body == b"some"
        with pytest.raises(ConnectionError):
            await peer.ask("nothing", None, int)
    request = Client(b"")
    await peer(request.scope, request.receive, request.send)
    assert request.sent[0]["status"] == 503
    with pytest.raises(OSError):
        await peer.ask("nothing", None, int)


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
        counts.keep(number, read_counts(each.registry))
    counts.keep(1, read_counts(workers[0].registry))  # again: it says all since its start
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
        packed = msgspec.msgpack.encode(read_counts(registry))
        counts.keep(number, msgspec.msgpack.decode(packed, type=list[Family]))
    text = openmetrics_latest(SummedRegistry(registries[0], counts)).decode()  # type: ignore[no-untyped-call]
    assert text.count("trace_id") == 1
    [line] = [line for line in text.splitlines() if "trace_id" in line]
    assert f'trace_id="{"1" * 32}"' in line
    assert line.endswith(" 0.02 103.0")


# --- quotas ---


class Desk:
    """Workers that ask one host."""

    def __init__(self, limits: QuotaLimits) -> None:
        self.now = 1_000_000_000
        self.store = MemoryQuotas(lambda: self.now)
        party = make_party("key", "k", "key", limits)
        assert party is not None
        self.party = party

    def connect(self) -> tuple[HostQuotas, QuotaDesk]:
        desk = QuotaDesk(self.store)

        async def ask(route: str, question: Reserve | Settle, answer: type[Any]) -> Any:
            sent = msgspec.msgpack.encode(question)
            await asyncio.sleep(0)
            if route == "settle":
                return desk.settle(msgspec.msgpack.decode(sent, type=Settle))
            decision = await desk.reserve(msgspec.msgpack.decode(sent, type=Reserve))
            await asyncio.sleep(0)
            return msgspec.msgpack.decode(msgspec.msgpack.encode(decision), type=answer)

        return HostQuotas(cast(Peer, SimpleNamespace(ask=ask)), 1), desk


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
    await worker.close()
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
    await worker.close()
    [account] = desk.store.accounts()
    assert account.num_streams == 0


async def test_a_later_charge_of_a_settled_request_counts_nothing() -> None:
    desk = Desk(QuotaLimits(tokens_per_day=100))
    worker, kept = desk.connect()
    accounts = (worker.open(desk.party),)
    hold = await worker.reserve(accounts, Charge(requests=1, streams=1), None)
    assert isinstance(hold, Hold)
    assert isinstance(hold.place, int)
    kept.settle(Settle(1, hold.place, [0], 0))
    await kept.reserve(Reserve(1, [desk.party], Charge(tokens=60), hold.place))  # it was on its way
    [account] = desk.store.accounts()
    assert account.day_tokens == 0


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
