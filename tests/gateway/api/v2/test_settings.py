"""Trace and log settings. Errors have Triton's words."""

import itertools
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from sluice.gateway.api.v2.log_settings import LogSettings
from sluice.gateway.api.v2.trace_settings import TraceSetting, TraceSettings
from sluice.gateway.telemetry.logs import RequestIdFilter
from sluice.serving.request import InferRequest
from tests.errors import error_of
from tests.gateway.api.v2.http.models import identity

MODEL = identity("identity", "TYPE_FP32")
_NUMBERS = itertools.count()
ALL = TraceSetting(frozenset(("TIMESTAMPS",)), rate=1)


def trace_ids(path: Path) -> list[int]:
    return [record["id"] for record in json.loads(path.read_text()) if "model_name" in record]


def run(settings: TraceSettings) -> None:
    """Trace a request from begin to end."""
    trace = settings.begin(MODEL, InferRequest(inputs={}))
    assert trace is not None
    trace.finish()


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("trace_rate", "5x", "5"),
        ("trace_rate", " +7", "7"),
        ("trace_count", "-1", "-1"),
        ("trace_level", ["TENSORS", "TIMESTAMPS"], ["TIMESTAMPS", "TENSORS"]),
        ("trace_level", ["TIMESTAMPS", "NOPE"], ["TIMESTAMPS"]),
        ("trace_level", ["NOPE"], ["OFF"]),
        ("trace_level", [], ["OFF"]),
        ("trace_level", "TENSORS", ["TENSORS"]),
    ],
)
def test_values_are_read_as_by_triton(name: str, text: Any, value: Any) -> None:
    settings = TraceSettings("file")
    settings.update({name: text})
    assert settings.get()[name] == value


RANGE = "Unable to parse '{}', value is out of range [ {} ], got: {}"


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("trace_rate", "abc", "Unable to parse 'trace_rate', got: abc"),
        ("trace_rate", "", "Unable to parse 'trace_rate', got: "),
        ("trace_rate", "3000000000", RANGE.format("trace_rate", "0, 4294967295", "3000000000")),
        ("trace_rate", "-1", RANGE.format("trace_rate", "0, 4294967295", "-1")),  # Triton takes it for 4294967295
        ("trace_count", "-2", "Unable to parse 'trace_count'. Expecting value >= -1, got:-2"),
        ("trace_count", "9" * 23, RANGE.format("trace_count", "-1, 2147483647", "9" * 23)),
        ("log_frequency", "x", "Unable to parse 'log_frequency', got: x"),
        ("trace_level", ["OFF", "TENSORS"], "Expect only one trace level 'OFF' is specified"),
    ],
)
def test_what_is_refused_changes_nothing(name: str, text: Any, error: str) -> None:
    settings = TraceSettings("file")
    assert error in error_of(settings.update, {"trace_rate": "5", name: text}).message
    assert settings.get() == TraceSettings("file").get(), "half of it was taken"


def test_neither_a_rate_of_0_nor_no_file_can_trace() -> None:
    settings = TraceSettings("file")
    settings.update({"trace_rate": "0"})
    for given, reason in (
        (settings, "sample rate must be non-zero"),
        (TraceSettings(), "trace file name is not given"),
    ):
        assert reason in error_of(given.update, {"trace_level": ["TIMESTAMPS"]}).message


def test_rate_and_count(tmp_path: Path) -> None:
    assert TraceSettings("file").begin(MODEL, InferRequest(inputs={})) is None
    settings = TraceSettings(str(tmp_path / "t"), ALL)
    settings.update({"trace_rate": "3", "trace_count": "2"})
    taken = [settings.begin(MODEL, InferRequest(inputs={})) for _ in range(12)]
    assert [index for index, trace in enumerate(taken) if trace] == [2, 5]
    assert settings.get()["trace_count"] == "0"
    for trace in filter(None, taken):
        trace.finish()
        trace.finish()
    assert trace_ids(tmp_path / "t.0") == [1, 2]


def test_a_model_may_differ(tmp_path: Path) -> None:
    settings = TraceSettings(str(tmp_path / "t"), ALL)
    settings.update({"trace_level": ["OFF"]}, "identity")
    assert settings.begin(MODEL, InferRequest(inputs={})) is None
    assert settings.begin(identity("other", "TYPE_FP32"), InferRequest(inputs={})) is not None
    settings.update({"trace_level": None}, "identity")
    assert settings.begin(MODEL, InferRequest(inputs={})) is not None


def test_groups_by_log_frequency_and_one_array_without(tmp_path: Path) -> None:
    settings = TraceSettings(str(tmp_path / "t"), ALL)
    settings.update({"log_frequency": "2"})
    for _ in range(5):
        run(settings)
    settings.close()
    assert [trace_ids(tmp_path / f"t.{index}") for index in range(3)] == [[1, 2], [3, 4], [5]]
    whole = TraceSettings(str(tmp_path / "whole"), ALL)
    for _ in range(2):
        run(whole)
        whole.update({"trace_rate": "1"})
    whole.close()
    assert trace_ids(tmp_path / "whole") == [1, 2]


def test_a_file_that_cannot_be_written_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = TraceSettings(str(tmp_path / "no" / "folder"), ALL)
    run(settings)
    settings.close()
    assert "failed creating trace file" in caplog.text


class Log:
    """A logger of its own, and what it has written."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.logger = logging.getLogger(f"{__name__}.{next(_NUMBERS)}")
        self.logger.setLevel(logging.INFO)
        self.logger.propagate = False
        handler = logging.Handler()
        handler.emit = lambda record: self.lines.append(handler.format(record))  # type: ignore[method-assign]
        handler.addFilter(RequestIdFilter())
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self.logger.addHandler(handler)

    def said(self) -> list[str]:
        """Say something at every level, and return the levels that are written."""
        self.lines.clear()
        for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL):
            self.logger.log(level, "x")
        return [line.split(" ")[-2] for line in self.lines]


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({}, "INFO WARNING ERROR CRITICAL"),
        ({"log_info": False}, "WARNING ERROR CRITICAL"),
        ({"log_warning": False}, "INFO ERROR CRITICAL"),
        ({"log_info": False, "log_warning": False, "log_error": False}, "CRITICAL"),
        ({"log_verbose_level": 1, "log_info": False}, "DEBUG WARNING ERROR CRITICAL"),
    ],
)
def test_levels_of_the_log(changes: dict[str, Any], shown: str) -> None:
    log = Log()
    settings = LogSettings(log.logger)
    settings.update(changes)
    assert log.said() == shown.split()
    settings.update({"log_info": True, "log_warning": True, "log_error": True, "log_verbose_level": 0})
    assert log.said() == ["INFO", "WARNING", "ERROR", "CRITICAL"]
    log.logger.setLevel(logging.WARNING)
    assert (LogSettings(log.logger).get()["log_info"], LogSettings(log.logger).get()["log_warning"]) == (False, True)


def test_the_format_of_the_log() -> None:
    log = Log()
    settings = LogSettings(log.logger)
    for name, has_t in (("ISO8601", True), ("default", False)):
        settings.update({"log_format": name})
        log.logger.info("x")
        stamp = log.lines[-1].split(" INFO")[0]
        assert ("T" in stamp, stamp.endswith("Z")) == (has_t, has_t)
