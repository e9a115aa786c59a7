"""Pings in both directions and the age of a connection, by a clock that the test moves."""

import asyncio
import heapq
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from sluice.gateway.front.http2.frames import ConnectionFault, H2ErrorCode
from sluice.gateway.front.http2.pings import PingRules, Pings

HOUR_S = 3600.0


class Timers:
    """As much of an event loop as pings use."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, asyncio.Handle]] = []

    def time(self) -> float:
        return self.now

    def call_later(self, delay_s: float, call: Callable[..., None], *arguments: Any) -> asyncio.Handle:
        handle = asyncio.Handle(call, arguments, asyncio.get_running_loop())
        heapq.heappush(self._due, (self.now + delay_s, len(self._due), handle))
        return handle

    def wait(self, seconds: float) -> None:
        """Let time pass, and run what is due meanwhile."""
        until = self.now + seconds
        while self._due and self._due[0][0] <= until:
            self.now, _, handle = heapq.heappop(self._due)
            if not handle.cancelled():
                handle._run()
        self.now = until


class Connection:
    """As much of a connection as its pings see. It reads nothing by itself."""

    def __init__(self, transport: asyncio.Transport, has_calls: bool) -> None:
        self.transport = transport
        self.loop: Any = Timers()
        self.has_read = self.has_sent = False
        self.streams: Mapping[int, Any] = {1: object()} if has_calls else {}
        self.said: list[str] = []
        self.pinged: list[bytes] = []

    def send_ping(self, payload: bytes) -> None:
        self.said.append("ping")
        self.pinged.append(payload)

    def announce_end(self) -> None:
        self.said.append("announce")

    def refuse_more(self) -> None:
        self.said.append("refuse")

    def close(self) -> None:
        self.said.append("close")


@asynccontextmanager
async def watched(
    rules: PingRules, *, has_calls: bool = True
) -> AsyncIterator[tuple[Connection, Pings, socket.socket]]:
    """Yield a connection, its pings and its client."""
    own, client = socket.socketpair()
    with client:
        transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=own)
        transport.pause_reading()
        connection = Connection(transport, has_calls)
        pings = Pings(cast(Any, connection), rules)
        yield connection, pings, client
        pings.close()
        transport.abort()


# --- pings of the client ---


@pytest.mark.parametrize(
    ("rules", "has_calls", "every_s", "sends", "num_taken"),
    [
        pytest.param(PingRules(max_strikes=1), True, 0.0, False, 2, id="the first is no strike, nor is one allowed"),
        pytest.param(PingRules(max_strikes=2), True, 299.0, False, 3, id="within five minutes"),
        pytest.param(PingRules(max_strikes=2), True, 301.0, False, None, id="every five minutes"),
        pytest.param(PingRules(max_strikes=0), True, 0.0, False, None, id="where any number is allowed"),
        pytest.param(PingRules(max_strikes=1), True, 0.0, True, None, id="behind data, as to measure the bandwidth"),
        pytest.param(
            PingRules(min_received_interval_s=0, max_strikes=1), True, 0.0, False, None, id="as often as said"
        ),
        pytest.param(PingRules(min_received_interval_s=0, max_strikes=1), False, 60.0, False, 2, id="without calls"),
        pytest.param(PingRules(max_strikes=1), False, 2 * HOUR_S, False, None, id="without calls, every two hours"),
        pytest.param(
            PingRules(min_received_interval_s=0, max_strikes=1, permits_without_calls=True),
            *(False, 60.0, False, None),
            id="without calls where that is permitted",
        ),
    ],
)
async def test_how_often_a_client_may_ping(
    rules: PingRules, has_calls: bool, every_s: float, sends: bool, num_taken: int | None
) -> None:
    async with watched(rules, has_calls=has_calls) as (connection, pings, _):
        taken = 0
        try:
            for _ in range(20):
                connection.has_sent |= sends
                pings.count()
                taken += 1
                connection.loop.wait(every_s)
        except ConnectionFault as fault:
            assert (fault.code, str(fault.args[-1])) == (H2ErrorCode.ENHANCE_YOUR_CALM, "too_many_pings")
        assert taken == (20 if num_taken is None else num_taken)


async def test_strikes_from_before_data_are_forgiven() -> None:
    async with watched(PingRules(max_strikes=1)) as (connection, pings, _):
        for _ in range(3):
            pings.count()
            pings.count()
            connection.has_sent = True


# --- pings of the server ---

RULES = PingRules(time_s=10.0, timeout_s=5.0, max_without_data=2)


async def test_a_silent_client_is_pinged_and_then_dropped() -> None:
    async with watched(RULES) as (connection, _, _):
        connection.loop.wait(9.9)
        assert connection.said == []
        connection.loop.wait(0.2)
        assert connection.said == ["ping"]
        connection.loop.wait(4.8)
        assert not connection.transport.is_closing()
        connection.loop.wait(0.2)
        assert connection.transport.is_closing() and connection.said == ["ping"]


async def test_a_client_whose_answer_is_not_read_yet_stays() -> None:
    """The server may have stood still: what lies there unread counts."""
    async with watched(RULES) as (connection, _, client):
        connection.loop.wait(10)
        client.send(b"pong")
        connection.loop.wait(30)
        assert not connection.transport.is_closing()


async def test_pings_of_a_client_that_answers_end_while_there_is_nothing_to_send() -> None:
    async with watched(RULES) as (connection, pings, _):

        def wait_and_answer() -> int:
            for _ in range(20):
                connection.loop.wait(5)
                if connection.pinged:
                    pings.take_answer(connection.pinged[-1])
            return len(connection.pinged)

        assert wait_and_answer() == 2
        connection.has_sent = True
        assert wait_and_answer() == 4 == len(set(connection.pinged))
        assert not connection.transport.is_closing()


@pytest.mark.parametrize("permits", [False, True])
async def test_idle_connections_are_probed_where_that_is_permitted(permits: bool) -> None:
    rules = PingRules(time_s=10.0, permits_without_calls=permits)
    async with watched(rules, has_calls=False) as (connection, _, _):
        connection.loop.wait(11)
        assert connection.said == ["ping"] * permits


async def test_whoever_has_sent_something_is_not_pinged() -> None:
    async with watched(RULES) as (connection, _, _):
        for _ in range(5):
            connection.has_read = True
            connection.loop.wait(10)
        assert connection.said == []


# --- age ---


@pytest.mark.parametrize("answers", [True, False])
async def test_an_old_connection_announces_its_end_and_has_a_grace(answers: bool) -> None:
    async with watched(PingRules(max_age_s=100.0, max_age_grace_s=50.0)) as (connection, pings, _):
        connection.loop.wait(89.9)
        assert connection.said == []
        connection.loop.wait(20.2)
        assert connection.said[:2] == ["announce", "ping"]
        if answers:
            pings.take_answer(b"another!")
            pings.take_answer(connection.pinged[0])
        connection.loop.wait(1.1)  # and no longer than a second
        assert "refuse" in connection.said and "close" not in connection.said
        connection.loop.wait(50)
        assert connection.said[-1] == "close"
