"""Lines of one process that another one shows: what arrives, and that nobody waits for it."""

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from sluice.gateway.watch.logs.ring import LogLine, LogRing
from sluice.gateway.watch.logs.socket import MAX_LINE_BYTES, LogSocket
from sluice.log_relay import MAX_MESSAGE_CHARS, LogRelay, ProcessLog, about, relay_own_logs
from sluice.log_repeats import MOST
from tests.waiting import PATIENCE_S, until


@asynccontextmanager
async def collecting() -> AsyncIterator[LogRing]:
    ring = LogRing()
    log_socket = LogSocket(ring)
    try:
        yield ring
    finally:
        log_socket.close()
    assert ring.socket_name == ""


async def wait_for(ring: LogRing, count: int) -> list[LogLine]:
    await until(lambda: ring.since(0)[0] >= count)
    return ring.since(0)[1]


def warning(message: str, **more: object) -> logging.LogRecord:
    named = {"name": "sluice.engine.loop", "levelno": logging.WARNING, "levelname": "WARNING", "msg": message}
    return logging.makeLogRecord({**named, **more})


async def test_lines_arrive_as_they_were_logged_without_secrets() -> None:
    async with collecting() as ring:
        relay = LogRelay(ring.socket_name, "engine-7", lambda: "engine-7")
        relay.handle(warning("the key is Bearer abcdefgh12345\nand ends", created=12.5))
        relay.handle(warning("failed", **about("chatcmpl-1")))
        relay.handle(warning("é" * (MAX_MESSAGE_CHARS + 1)))
        first, second, third = await wait_for(ring, 3)
        relay.close()
    shown = "the key is Bearer [redacted]\nand ends"
    assert first == LogLine(12.5, "WARNING", "sluice.engine.loop", "-", shown, "engine-7"), (
        "its own name stands for none"
    )
    assert (second.request_id, second.message) == ("chatcmpl-1", "failed")
    assert third.message == "é" * MAX_MESSAGE_CHARS + " ..."


async def test_repeats_are_counted_for_each_request() -> None:
    async with collecting() as ring:
        relay = LogRelay(ring.socket_name, "engine-7")
        for _ in range(MOST + 3):
            relay.handle(warning("failed", **about("a")))
        relay.handle(warning("failed", **about("b")))
        relay.close()
        lines = await wait_for(ring, MOST + 2)
    assert [each.request_id for each in lines] == ["a"] * MOST + ["b", "a"]
    assert lines[-1].message == "failed (repeated 3 times)"


def test_a_process_that_does_not_read_delays_nobody() -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0sluice-test-{os.getpid()}")
        listener.listen()
        relay = LogRelay(listener.getsockname().decode(), "engine-7")
        peer, _ = listener.accept()
        for number in range(5000):  # more than a socket holds; a relay that waited would wait for ever
            relay.handle(warning(f"line {number}"))
        relay.handle(warning("the last one that has no room"))
        with peer, peer.makefile("rb") as file:
            first = file.readline()
            for _ in range(20):
                file.readline()
            peer.setblocking(False)
            while True:
                try:
                    if not peer.recv(1 << 20):
                        break
                except BlockingIOError:
                    break
            peer.setblocking(True)
            relay.handle(warning("there is room again"))
            relay.close()
            rest = file.read().decode()
    assert b'"line 0"' in first
    assert "the last one" not in rest
    *_, told, again = rest.splitlines()
    assert " lines before this one were left out" in told and "there is room again" in again


async def test_what_is_no_line_ends_its_own_connection_alone(caplog: pytest.LogCaptureFixture) -> None:
    async with collecting() as ring:
        relay = LogRelay(ring.socket_name, "engine-7")
        for garbage in (b"[]\n", b"x" * (2 * MAX_LINE_BYTES + 1) + b"\n"):
            reader, writer = await asyncio.open_unix_connection(ring.socket_name)
            writer.write(garbage)
            async with asyncio.timeout(PATIENCE_S):
                assert await reader.read() == b"", "the connection is closed"
            writer.close()
        relay.handle(warning("well"))
        assert (await wait_for(ring, 1))[0].message == "well"
        relay.close()
    assert caplog.text.count("cannot be read") == 2


async def test_a_library_with_a_log_of_its_own_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    library = logging.getLogger("tests.library_with_a_log_of_its_own")
    monkeypatch.setattr(library, "propagate", False)
    async with collecting() as ring:
        relay = LogRelay(ring.socket_name, "engine-7")
        monkeypatch.setattr(logging.root, "handlers", [*logging.root.handlers, relay])
        relay_own_logs()
        relay_own_logs()
        library.warning("the cache is small")
        library.removeHandler(relay)
        relay.close()
        assert [each.message for each in await wait_for(ring, 1)] == ["the cache is small"]


def test_a_process_is_told_how_to_log() -> None:
    told = ProcessLog("INFO", True, "\0sluice-log-1-ab")
    assert ProcessLog.from_argument(told.to_argument()) == told
    assert told.to_argument() == "INFO,json,@sluice-log-1-ab"
    nobody = ProcessLog("DEBUG", False, "")
    assert ProcessLog.from_argument(nobody.to_argument()) == nobody
    with pytest.raises(OSError):
        LogRelay("\0sluice-test-nobody-listens", "engine-7")
