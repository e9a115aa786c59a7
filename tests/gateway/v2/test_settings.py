"""Trace and log settings. Errors have Triton's words."""

import itertools
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from gateway.telemetry.logs import RequestIdFilter
from gateway.v2.log_settings import LogSettings
from gateway.v2.trace import TraceSettings
from gateway.v2.trace_values import TraceSetting
from serving.request import InferRequest
from sluice.errors import SluiceError
from tests.gateway.http.v2.models import identity

MODEL = identity("identity", "TYPE_FP32")
_NUMBERS = itertools.count()
ALL = TraceSetting(frozenset(("TIMESTAMPS",)), rate=1)


def request() -> InferRequest:
    return InferRequest(inputs={})


def trace_ids(text: str) -> list[int]:
    return [record["id"] for record in json.loads(text) if "model_name" in record]


class TestTraceValues:
    @pytest.mark.parametrize(
        ("name", "text", "value"),
        [
            ("trace_rate", "5x", "5"),
            ("trace_rate", " +7", "7"),
            ("trace_count", "-1", "-1"),
            ("log_frequency", "0", "0"),
        ],
    )
    def test_numbers_are_read_as_c_reads_them(self, name: str, text: str, value: str) -> None:
        settings = TraceSettings()
        settings.update({name: text})
        assert settings.get()[name] == value

    @pytest.mark.parametrize(
        ("name", "text", "error"),
        [
            ("trace_rate", "abc", "Unable to parse 'trace_rate', got: abc"),
            ("trace_rate", "", "Unable to parse 'trace_rate', got: "),
            (
                "trace_rate",
                "3000000000",
                "Unable to parse 'trace_rate', value is out of range [ 0, 4294967295 ], got: 3000000000",
            ),
            # Triton takes it for 4294967295
            ("trace_rate", "-1", "Unable to parse 'trace_rate', value is out of range [ 0, 4294967295 ], got: -1"),
            ("trace_count", "-2", "Unable to parse 'trace_count'. Expecting value >= -1, got:-2"),
            (
                "trace_count",
                "99999999999999999999999",
                "Unable to parse 'trace_count', value is out of range [ -1, 2147483647 ], got: 99999999999999999999999",
            ),
            ("log_frequency", "x", "Unable to parse 'log_frequency', got: x"),
        ],
    )
    def test_refuses(self, name: str, text: str, error: str) -> None:
        settings = TraceSettings()
        with pytest.raises(SluiceError) as caught:
            settings.update({"trace_rate": "5", name: text})
        assert caught.value.message == error
        assert settings.get() == TraceSettings().get(), "half of it was taken"

    @pytest.mark.parametrize(
        ("levels", "shown"),
        [
            (["TENSORS", "TIMESTAMPS"], ["TIMESTAMPS", "TENSORS"]),
            (["TIMESTAMPS", "NOPE"], ["TIMESTAMPS"]),
            (["NOPE"], ["OFF"]),
            ([], ["OFF"]),
            (["OFF"], ["OFF"]),
            ("TENSORS", ["TENSORS"]),
        ],
    )
    def test_levels(self, levels: Any, shown: list[str]) -> None:
        settings = TraceSettings("file")
        settings.update({"trace_level": levels})
        assert settings.get()["trace_level"] == shown

    def test_off_stands_alone(self) -> None:
        with pytest.raises(SluiceError, match="Expect only one trace level 'OFF' is specified"):
            TraceSettings("file").update({"trace_level": ["OFF", "TENSORS"]})

    def test_a_rate_of_0_cannot_trace(self) -> None:
        settings = TraceSettings("file")
        settings.update({"trace_rate": "0"})
        with pytest.raises(SluiceError, match="invalid trace setting :sample rate must be non-zero"):
            settings.update({"trace_level": ["TIMESTAMPS"]})


class TestSampling:
    def test_off_traces_nothing(self) -> None:
        assert TraceSettings("file").begin(MODEL, request()) is None

    def test_rate_and_count(self, tmp_path: Path) -> None:
        settings = TraceSettings(str(tmp_path / "t"), ALL)
        settings.update({"trace_rate": "3", "trace_count": "2"})
        taken = [settings.begin(MODEL, request()) for _ in range(12)]
        assert [index for index, trace in enumerate(taken) if trace] == [2, 5]
        assert settings.get()["trace_count"] == "0"
        for trace in filter(None, taken):
            trace.finish()
            trace.finish()
        assert trace_ids((tmp_path / "t.0").read_text()) == [1, 2]

    def test_a_model_may_differ(self, tmp_path: Path) -> None:
        settings = TraceSettings(str(tmp_path / "t"), ALL)
        settings.update({"trace_level": ["OFF"]}, "identity")
        assert settings.begin(MODEL, request()) is None
        assert settings.begin(identity("other", "TYPE_FP32"), request()) is not None
        settings.update({"trace_level": None}, "identity")
        assert settings.begin(MODEL, request()) is not None

    def test_groups_by_log_frequency(self, tmp_path: Path) -> None:
        settings = TraceSettings(str(tmp_path / "t"), ALL)
        settings.update({"log_frequency": "2"})
        for _ in range(5):
            trace = settings.begin(MODEL, request())
            assert trace is not None
            trace.finish()
        settings.close()
        assert [trace_ids((tmp_path / f"t.{index}").read_text()) for index in range(3)] == [[1, 2], [3, 4], [5]]

    def test_without_groups_all_is_one_array(self, tmp_path: Path) -> None:
        settings = TraceSettings(str(tmp_path / "t"), ALL)
        for _ in range(2):
            trace = settings.begin(MODEL, request())
            assert trace is not None
            trace.finish()
            settings.update({"trace_rate": "1"})
        settings.close()
        assert trace_ids((tmp_path / "t").read_text()) == [1, 2]

    def test_a_file_that_cannot_be_written_is_logged(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        settings = TraceSettings(str(tmp_path / "no" / "folder"), ALL)
        trace = settings.begin(MODEL, request())
        assert trace is not None
        trace.finish()
        settings.close()
        assert "failed creating trace file" in caplog.text


class TestLog:
    def logger(self) -> tuple[logging.Logger, list[str]]:
        lines: list[str] = []

        class Collect(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                lines.append(self.format(record))

        logger = logging.getLogger(f"{__name__}.{next(_NUMBERS)}")
        logger.setLevel(logging.INFO)
        logger.propagate = False
        handler = Collect()
        handler.addFilter(RequestIdFilter())
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logger.addHandler(handler)
        return logger, lines

    def say_all(self, logger: logging.Logger, lines: list[str]) -> list[str]:
        lines.clear()
        for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL):
            logger.log(level, "x")
        return [line.split(" ")[-2] for line in lines]

    @pytest.mark.parametrize(
        ("changes", "shown"),
        [
            ({}, ["INFO", "WARNING", "ERROR", "CRITICAL"]),
            ({"log_info": False}, ["WARNING", "ERROR", "CRITICAL"]),
            ({"log_warning": False}, ["INFO", "ERROR", "CRITICAL"]),
            ({"log_info": False, "log_warning": False, "log_error": False}, ["CRITICAL"]),
            ({"log_verbose_level": 1, "log_info": False}, ["DEBUG", "WARNING", "ERROR", "CRITICAL"]),
        ],
    )
    def test_levels(self, changes: dict[str, Any], shown: list[str]) -> None:
        logger, lines = self.logger()
        settings = LogSettings(logger)
        settings.update(changes)
        assert self.say_all(logger, lines) == shown
        settings.update({"log_info": True, "log_warning": True, "log_error": True, "log_verbose_level": 0})
        assert self.say_all(logger, lines) == ["INFO", "WARNING", "ERROR", "CRITICAL"]

    def test_starts_with_what_the_logger_does(self) -> None:
        logger, _ = self.logger()
        logger.setLevel(logging.WARNING)
        settings = LogSettings(logger)
        assert (settings.get()["log_info"], settings.get()["log_warning"]) == (False, True)

    def test_format(self) -> None:
        logger, lines = self.logger()
        settings = LogSettings(logger)
        settings.update({"log_format": "ISO8601"})
        logger.info("x")
        stamp = lines[0].split(" ")[0]
        assert stamp.endswith("Z")
        assert "T" in stamp
        settings.update({"log_format": "default"})
        logger.info("x")
        assert "T" not in lines[1].split(" INFO")[0]
