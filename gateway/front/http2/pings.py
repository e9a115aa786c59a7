"""Pings in both directions, and the age of a connection: gRPC's rules of keepalive.

The settings are those of gRPC's core (https://github.com/grpc/grpc/blob/master/doc/keepalive.md).
"""

import random
from dataclasses import dataclass
from secrets import token_bytes

from sluice.gateway.front.http2.frames import ConnectionFault, H2ErrorCode
from sluice.gateway.front.http2.reading import FrameReader
from sluice.gateway.front.listeners import UNREAD_LOOK_S, has_unread

_IDLE_INTERVAL_S = 7200.0
"""Shortest interval of a client's pings while it has no calls."""
_AGE_JITTER = 0.1
"""Part of its age by which a connection may live longer or less, so that not all end at once."""
_DRAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class PingRules:
    """When to ping, how often a client may, and how old a connection may become; None and 0 are no limit."""

    time_s: float = 7200.0
    timeout_s: float = 20.0
    permits_without_calls: bool = False
    max_without_data: int = 2
    min_received_interval_s: float = 300.0
    max_strikes: int = 2
    max_age_s: float | None = None
    max_age_grace_s: float | None = None


class Pings:
    """Watches one connection. Lives on the event loop's thread."""

    def __init__(self, connection: FrameReader, rules: PingRules) -> None:
        self._connection = connection
        self._rules = rules
        self._num_strikes = 0
        self._last_received: float | None = None
        self._num_without_data = 0
        self._awaited: bytes | None = None
        self._drain: bytes | None = None
        loop = connection.loop
        self._timer = loop.call_later(rules.time_s, self._probe)
        self._age_timer = None
        if rules.max_age_s is not None:
            age_s = rules.max_age_s * random.uniform(1 - _AGE_JITTER, 1 + _AGE_JITTER)
            self._age_timer = loop.call_later(age_s, self._end_of_age)

    def close(self) -> None:
        """Watch no longer. Idempotent."""
        self._timer.cancel()
        if self._age_timer is not None:
            self._age_timer.cancel()

    def count(self) -> None:
        """Count a client's ping. Raises ConnectionFault for a client that pings too often."""
        rules, now = self._rules, self._connection.loop.time()
        self._begin_anew_if_sent()
        is_calm = not self._connection.streams and not rules.permits_without_calls
        interval_s = _IDLE_INTERVAL_S if is_calm else rules.min_received_interval_s
        if self._last_received is not None and now - self._last_received < interval_s:
            self._num_strikes += 1
            if rules.max_strikes and self._num_strikes > rules.max_strikes:
                raise ConnectionFault(H2ErrorCode.ENHANCE_YOUR_CALM, "too_many_pings")
        self._last_received = now

    def take_answer(self, payload: bytes) -> None:
        """Take the answer to a ping of this side; others mean nothing."""
        if payload == self._awaited:
            self._awaited = None
        elif payload == self._drain:
            self._drain = None
            self._connection.refuse_more()

    def drain(self) -> None:
        """End the connection when its calls have: the client has time to hear of it before any call is refused."""
        connection = self._connection
        if self._drain is None:
            self._drain = token_bytes(8)
            connection.announce_end()
            connection.send_ping(self._drain)
            connection.loop.call_later(_DRAIN_S, connection.refuse_more)

    def _probe(self) -> None:
        """Ping a silent connection, or close one that has not answered."""
        rules, connection = self._rules, self._connection
        if self._awaited is not None and not connection.has_read:
            if has_unread(connection.transport):
                self._timer = connection.loop.call_later(UNREAD_LOOK_S, self._probe)
            else:
                connection.transport.abort()
            return
        self._awaited = None
        delay_s = rules.time_s
        if not connection.has_read and self._may_ping():
            self._awaited = token_bytes(8)
            self._num_without_data += 1
            connection.send_ping(self._awaited)
            delay_s = rules.timeout_s
        connection.has_read = False
        self._timer = connection.loop.call_later(delay_s, self._probe)

    def _begin_anew_if_sent(self) -> None:
        if self._connection.has_sent:
            self._connection.has_sent = False
            self._num_without_data = 0
            self._num_strikes, self._last_received = 0, None

    def _may_ping(self) -> bool:
        self._begin_anew_if_sent()
        rules = self._rules
        if rules.max_without_data and self._num_without_data >= rules.max_without_data:
            return False
        return bool(self._connection.streams) or rules.permits_without_calls

    def _end_of_age(self) -> None:
        self.drain()
        grace_s = self._rules.max_age_grace_s
        if grace_s is not None:
            self._age_timer = self._connection.loop.call_later(grace_s, self._connection.close)
