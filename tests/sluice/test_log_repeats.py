import io
import logging
from contextlib import suppress

import pytest

from sluice.log_repeats import MAX_KNOWN, MOST, WINDOW_S, LimitedHandler, RepeatLimiter
from tests.clock import ManualClock


def record(message: str, *values: object) -> logging.LogRecord:
    return logging.makeLogRecord({"msg": message, "args": values, "name": "a", "levelno": logging.WARNING})


def messages(records: list[logging.LogRecord]) -> list[str]:
    return [each.getMessage() for each in records]


def test_repeats_are_counted_once_the_window_is_over() -> None:
    clock = ManualClock(0.0)
    limiter = RepeatLimiter(clock)
    passed = [messages(limiter.take(record("lost %s", "x"))) for _ in range(MOST + 57)]
    assert sum(map(len, passed)) == MOST
    assert messages(limiter.take(record("lost %s", "y"))) == ["lost y"], "another line passes"
    clock.now = WINDOW_S
    assert messages(limiter.take(record("well"))) == ["lost x (repeated 57 times)", "well"]
    assert messages(limiter.take(record("lost %s", "x"))) == ["lost x"], "it passes again"


def test_lines_that_are_told_apart_have_a_bound() -> None:
    limiter = RepeatLimiter(ManualClock(0.0))
    for number in range(3 * MAX_KNOWN):
        assert messages(limiter.take(record("line %d", number))) == [f"line {number}"]
    assert len(limiter._known) <= MAX_KNOWN


def test_the_end_of_the_log_tells_the_rest() -> None:
    stream = io.StringIO()
    handler = LimitedHandler(stream)
    for _ in range(MOST + 2):
        handler.handle(record("again"))
    handler.close()
    assert stream.getvalue().splitlines() == [*["again"] * MOST, "again (repeated 2 times)"]


def test_a_full_disk_is_told_once_and_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with open("/dev/full", "w", buffering=1) as full:
        handler = LimitedHandler(full)
        for number in range(3):
            handler.handle(record(f"line {number}"))
        with suppress(OSError):
            full.close()
    said = "the log cannot be written, and lines of it are lost: [Errno 28] No space left on device\n"
    assert capsys.readouterr().err == said


def test_lines_of_different_requests_are_no_repeats() -> None:
    clock, ids = ManualClock(0.0), iter(["a"] * (MOST + 1) + ["b", "-"])
    limiter = RepeatLimiter(clock, lambda: next(ids))
    passed = [messages(limiter.take(record("failed"))) for _ in range(MOST + 2)]
    assert passed == [*[["failed"]] * MOST, [], ["failed"]]
    clock.now = WINDOW_S
    counted, _ = limiter.take(record("later"))
    assert counted.getMessage() == "failed (repeated 1 times)" and vars(counted)["own_request_id"] == "a"
