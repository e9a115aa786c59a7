"""The life of a connection: pings both ways, its age, its end."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
from h2.errors import ErrorCodes as Code

from sluice.gateway.options.grpc import GrpcOptions
from tests.gateway.api.v2.grpc.http2.calls import DEAF, ECHO, HELD, STREAM, Calls, serving_calls
from tests.gateway.api.v2.grpc.http2.client import ACK, DATA, END_STREAM, PING, Client, connected, frame, message
from tests.waiting import PATIENCE_S, until

PROBE = frame(PING, 0, 0, b"12345678")
LAST_STREAM = 2**31 - 1


# --- pings; tests/gateway/api/v2/grpc/http2/test_pings.py has their rules ---


async def test_pings_that_come_too_often() -> None:
    options = GrpcOptions(port=0, http2_max_ping_strikes=1)
    async with serving_calls(options) as calls, connected(calls.port) as client:
        client.send(PROBE * 2)
        await client.until(lambda: client.pongs == [b"12345678"] * 2)
        client.send(PROBE)
        await client.until_closed()
        [(_, code, text)] = client.goaways
        assert (Code(code), text) == (Code.ENHANCE_YOUR_CALM, "too_many_pings")


async def test_a_client_that_answers_no_ping_is_dropped() -> None:
    options = GrpcOptions(port=0, keepalive_time_ms=50, keepalive_timeout_ms=50)
    async with serving_calls(options) as calls, connected(calls.port) as client:
        client.answers_pings = False
        client.send(client.request(1, HELD))
        await client.until_closed()
        assert len(client.pings) == 1
        await calls.until_idle()
        assert (calls.num_held, calls.num_cancelled) == (0, calls.num_begun)


# --- age ---


async def test_a_stock_client_outlives_its_connections() -> None:
    """Each lives for some 20 ms. No call fails, and none waits."""
    async with serving_calls(GrpcOptions(port=0, max_connection_age_ms=20)) as calls:
        peers: set[tuple[str, int]] = set()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{calls.port}") as channel:
            while len(peers) < 4:
                assert await channel.unary_unary(ECHO)(b"x", timeout=PATIENCE_S) == b"x"
                peers |= {each.transport.get_extra_info("peername") for each in calls.server.connections}


async def test_calls_of_an_old_connection_go_on() -> None:
    async with serving_calls(GrpcOptions(port=0, max_connection_age_ms=20)) as calls, connected(calls.port) as client:
        client.send(client.request(1, HELD))
        await client.until(lambda: len(client.goaways) == 2)
        assert [(last, Code(code)) for last, code, _ in client.goaways] == [
            (LAST_STREAM, Code.NO_ERROR),
            (1, Code.NO_ERROR),
        ]
        client.send(client.request(3))
        assert (await client.end_of(3)).reset == Code.REFUSED_STREAM
        calls.let_go.set()
        assert (await client.end_of(1)).status == 0
        await client.until_closed()


async def test_the_grace_of_an_old_connection_ends() -> None:
    options = GrpcOptions(port=0, max_connection_age_ms=20, max_connection_age_grace_ms=50)
    async with serving_calls(options) as calls, connected(calls.port) as client:
        client.send(client.request(1, HELD))
        await client.until_closed()
        await calls.until_idle()
        assert (calls.num_held, calls.num_cancelled) == (0, calls.num_begun)


async def test_calls_on_their_way_when_the_age_is_over_are_served() -> None:
    """Until the client has answered the ping behind the first GOAWAY, it may not have heard of it."""
    async with serving_calls(GrpcOptions(port=0, max_connection_age_ms=20)) as calls, connected(calls.port) as client:
        client.answers_pings = False
        client.send(client.request(1, HELD))
        await client.until(lambda: len(client.goaways) == 1 and len(client.pings) == 1)
        assert (await client.ask(3)).messages == [b"hello"]
        client.send(frame(PING, ACK, 0, client.pings[0]))
        await client.until(lambda: len(client.goaways) == 2)
        assert client.goaways[1][:2] == (3, Code.NO_ERROR)
        assert (await client.ask(5)).reset == Code.REFUSED_STREAM


# --- the end ---


@asynccontextmanager
async def stopping(calls: Calls, grace_s: float) -> AsyncIterator["asyncio.Task[None]"]:
    task = asyncio.ensure_future(calls.server.stop(grace_s))
    yield task
    async with asyncio.timeout(PATIENCE_S):
        await task


async def test_a_server_that_stops_ends_what_is_in_flight() -> None:
    async with serving_calls() as calls, connected(calls.port) as client:
        client.send(client.request(1, HELD), client.headers(3, STREAM), frame(DATA, 0, 3, message(b"before")))
        await client.until(lambda: client.stream(3).messages == [b"before"])
        async with stopping(calls, PATIENCE_S) as task:
            await client.until(lambda: len(client.goaways) == 2)
            assert (await client.ask(5)).reset == Code.REFUSED_STREAM
            client.send(frame(DATA, END_STREAM, 3, message(b"after")))
            calls.let_go.set()
            assert (await client.end_of(1)).status == 0
            assert (await client.end_of(3)).messages == [b"before", b"after"]
            await client.until_closed()
        assert task.done() and not calls.server.calls.tasks


async def test_a_server_that_stops_at_once_says_so() -> None:
    async with serving_calls() as calls, connected(calls.port) as client:
        client.send(client.request(1, HELD), client.headers(3, DEAF))
        await until(lambda: calls.num_held >= 2)
        async with stopping(calls, 0.01):
            for number in (1, 3):
                ended = await client.end_of(number)
                assert (ended.status, ended.blocks[-1]["grpc-message"]) == (14, "the server is shutting down")
            await client.until_closed()
        assert (calls.num_held, calls.num_cancelled) == (0, 2)


async def test_a_stop_waits_for_handlers_whose_clients_have_left() -> None:
    """And no longer: the end of the last one is heard of."""
    ended = asyncio.Event()

    async def clean_up(raw: bytes, context: object) -> bytes:
        try:
            await asyncio.sleep(PATIENCE_S)
        finally:
            await asyncio.shield(asyncio.sleep(0.05))
            ended.set()
        return b""

    handlers = {"/test/CleanUp": grpc.unary_unary_rpc_method_handler(clean_up)}
    async with serving_calls(more=handlers) as calls:
        async with connected(calls.port) as client:
            client.send(client.request(1, "/test/CleanUp"))
            async with asyncio.timeout(PATIENCE_S):
                await until(lambda: calls.server.calls.tasks)
                await asyncio.sleep(0.01)
        async with asyncio.timeout(PATIENCE_S):
            await calls.server.stop(PATIENCE_S)
        assert ended.is_set()


async def test_calls_that_a_stopping_server_refuses_are_repeated_by_stock_clients() -> None:
    """A hundred calls at a time, while servers on one port come and go: none fails."""
    async with (
        serving_calls(GrpcOptions(port=0, shares_port=True)) as first,
        grpc.aio.insecure_channel(f"127.0.0.1:{first.port}") as channel,
    ):
        ask = channel.unary_unary(ECHO)
        assert await ask(b"x", timeout=PATIENCE_S, wait_for_ready=True) == b"x"
        async with serving_calls(GrpcOptions(port=first.port, shares_port=True)):
            asked = [asyncio.ensure_future(_ask(ask)) for _ in range(100)]
            await asyncio.sleep(0)
            async with stopping(first, PATIENCE_S):
                more = [asyncio.ensure_future(_ask(ask)) for _ in range(100)]
                assert await asyncio.gather(*asked, *more) == [b"x"] * 200


async def _ask(ask: "grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]") -> bytes:
    answer: bytes = await ask(b"x", timeout=PATIENCE_S, wait_for_ready=True)
    return answer


async def test_a_client_that_leaves_ends_its_calls() -> None:
    async with serving_calls() as calls:
        client: Client
        async with connected(calls.port) as client:
            client.send(client.request(1, HELD), client.headers(3, DEAF), client.headers(5, STREAM), client.headers(7))
            await until(lambda: calls.num_held >= 2)
        await until(lambda: not calls.server.connections)
        await calls.until_idle()
        assert (calls.num_held, calls.num_cancelled) == (0, 2)
