"""What clients may change while the server runs: what is traced, and what is logged."""

import logging
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gateway.v2.trace import Record, Trace, TraceFile
from serving.model import Model
from serving.request import InferRequest
from sluice.errors import ErrorCode, SluiceError, invalid

SettingValue = bool | int | str | list[str]

LEVELS = ("TIMESTAMPS", "TENSORS")
TRACE_SETTINGS = ("trace_file", "trace_level", "trace_rate", "trace_count", "log_frequency")
"""In the order in which Triton looks at them."""

_INTEGER = re.compile(r"\s*[+-]?\d+", re.ASCII)
_MAX_INT32 = 2**31 - 1
_RANGES = {"trace_rate": (0, 2**32 - 1), "trace_count": (-1, _MAX_INT32), "log_frequency": (0, 2**32 - 1)}
"""The ranges that Triton names; above 32 bits with a sign it takes nothing."""
_MOST_KEPT = 1000
"""Traces that wait in memory for their group to be complete; where groups have no size, they go to the file."""


@dataclass(frozen=True, slots=True)
class TraceSetting:
    """What holds for a model or for all. `count` -1: no limit. `log_frequency` 0: all into one file."""

    levels: frozenset[str] = frozenset()
    rate: int = 1000
    count: int = -1
    log_frequency: int = 0


_FIELDS = {"trace_level": "levels", "trace_rate": "rate", "trace_count": "count", "log_frequency": "log_frequency"}


class TraceSettings:
    """Triton's trace extension: a setting for all models, and for single ones what differs from it."""

    def __init__(self, file: str = "", defaults: TraceSetting | None = None) -> None:
        """`file` is where traces are written; without one tracing cannot be switched on."""
        self._file = TraceFile(file)
        self._defaults = defaults or TraceSetting()
        self._num_traces = 0
        self._all = _Sampling(self._defaults, {}, self._file)
        self._models: dict[str, _Sampling] = {}

    def get(self, model: str | None = None) -> dict[str, SettingValue]:
        """The setting of `model`, or of all, as the protocol writes it."""
        sampling = self._sampling(model)
        setting = sampling.setting
        return {
            "trace_level": [level for level in LEVELS if level in setting.levels] or ["OFF"],
            "trace_rate": str(setting.rate),
            "trace_count": str(sampling.count_left),
            "log_frequency": str(setting.log_frequency),
            "trace_file": self._file.path,
            "trace_mode": "triton",
        }

    def update(self, values: Mapping[str, SettingValue | None], model: str | None = None) -> None:
        """Change what `values`, which are text, name; None takes a change back. What is no setting is ignored.

        Raises SluiceError, and then nothing has changed.
        """
        new = {name: _parsed(name, values[name]) for name in TRACE_SETTINGS if name in values}
        changes = {_FIELDS[name]: value for name, value in new.items() if value is not _UNCHANGED}
        if model:
            self._change_model(model, changes)
        else:
            self._change_all(changes)

    def begin(self, model: Model, request: InferRequest) -> Trace | None:
        """The trace of `request` where it is one of those to be traced."""
        sampling = self._models.get(model.name, self._all) if self._models else self._all
        if not sampling.takes_next():
            return None
        self._num_traces += 1
        return Trace(self._num_traces, sampling.setting.levels, model, request, sampling.collect)

    def close(self) -> None:
        """Write what is still in memory."""
        for sampling in (*self._models.values(), self._all):
            sampling.flush()
        self._file.close()

    def _sampling(self, model: str | None) -> "_Sampling":
        return self._models.get(model, self._all) if model else self._all

    def _change_all(self, changes: Mapping[str, Any]) -> None:
        own = _changed(self._all, changes)
        sampling = _Sampling(replace(self._defaults, **own), own, self._file)
        sampling.check(self._file)
        self._all.flush()
        self._all = sampling
        for name in list(self._models):
            self._change_model(name, {})

    def _change_model(self, model: str, changes: Mapping[str, Any]) -> None:
        present = self._models.get(model)
        own = _changed(present, changes)
        above = replace(self._all.setting, count=self._all.count_left)
        sampling = _Sampling(replace(above, **own), own, self._file)
        sampling.check(self._file)
        if present is not None:
            present.flush()
        if own:
            self._models[model] = sampling
        else:
            self._models.pop(model, None)


_UNCHANGED: Any = object()
_CLEARED: Any = object()


def _changed(present: "_Sampling | None", changes: Mapping[str, Any]) -> dict[str, Any]:
    """What differs from the setting above after `changes`."""
    own = dict(present.own) if present is not None else {}
    if present is not None and "count" in own:
        own["count"] = present.count_left
    own.update(changes)
    return {name: value for name, value in own.items() if value is not _CLEARED}


def _parsed(name: str, value: SettingValue | None) -> Any:
    """The value of a setting. Raises SluiceError in Triton's words."""
    if name == "trace_file":
        text = "trace file location can not be updated through network protocol"
        raise SluiceError(ErrorCode.UNIMPLEMENTED, text)
    if value is None:
        return _CLEARED
    if name == "trace_level":
        return _levels(value if isinstance(value, list) else [str(value)])
    return _number(name, value[0] if isinstance(value, list) and value else str(value))


def _levels(values: Sequence[str]) -> Any:
    if "OFF" in values:
        if len(values) != 1:
            raise invalid("trace_level", "Expect only one trace level 'OFF' is specified")
        return frozenset[str]()
    known = frozenset(values) & frozenset(LEVELS)
    return known or _UNCHANGED


def _number(name: str, text: str) -> int:
    match = _INTEGER.match(text)
    if match is None:
        raise invalid(name, f"Unable to parse '{name}', got: {text}")
    value = int(match[0]) if len(match[0]) < 20 else _MAX_INT32 + 1
    lowest, highest = _RANGES[name]
    if name == "trace_count" and -_MAX_INT32 <= value < lowest:
        raise invalid(name, f"Unable to parse 'trace_count'. Expecting value >= -1, got:{text}")
    if not lowest <= value <= _MAX_INT32:
        reach = f"value is out of range [ {lowest}, {highest} ]"
        raise invalid(name, f"Unable to parse '{name}', {reach}, got: {text}")
    return value


class _Sampling:
    """Picks requests by one setting, and collects their traces."""

    def __init__(self, setting: TraceSetting, own: dict[str, Any], file: TraceFile) -> None:
        """`own` is what the setting does not have from the one above it."""
        self.setting = setting
        self.own = own
        self.count_left = setting.count
        self._file = file
        self._is_on = bool(setting.levels) and setting.rate > 0
        self._num_seen = 0
        self._num_open = 0
        self._kept: list[list[Record]] = []

    def check(self, file: TraceFile) -> None:
        """Raise INVALID where the setting asks for what cannot be."""
        if not self.setting.levels:
            return
        reason = "sample rate must be non-zero" if self.setting.rate == 0 else ""
        if not reason and not file.path:
            reason = "trace file name is not given"
        if reason:
            raise invalid("trace_level", f"Attempting to set invalid trace setting :{reason}")

    def takes_next(self) -> bool:
        """Whether the next request is traced."""
        if not self._is_on or self.count_left == 0:
            return False
        self._num_seen += 1
        if self._num_seen % self.setting.rate:
            return False
        if self.count_left > 0:
            self.count_left -= 1
        self._num_open += 1
        return True

    def collect(self, trace: Trace) -> None:
        """Take a finished trace; write the group that it completes."""
        self._num_open -= 1
        self._kept.append(trace.records)
        frequency = self.setting.log_frequency
        is_last = self.count_left == 0 and self._num_open == 0
        if is_last or 0 < frequency <= len(self._kept):
            self._file.write_group(self._take())
        elif len(self._kept) >= _MOST_KEPT:
            self.flush()

    def flush(self) -> None:
        """Write what was collected."""
        if self._kept:
            write = self._file.write_group if self.setting.log_frequency else self._file.append
            write(self._take())

    def _take(self) -> list[Record]:
        records = [record for trace in self._kept for record in trace]
        self._kept.clear()
        return records


_FORMATS = {"default": None, "ISO8601": "%Y-%m-%dT%H:%M:%SZ"}
LOG_SETTINGS = ("log_file", "log_info", "log_warning", "log_error", "log_verbose_level", "log_format")
"""In the order in which Triton looks at them."""
_SWITCHES = {"log_info": logging.INFO, "log_warning": logging.WARNING, "log_error": logging.ERROR}


class LogSettings:
    """Triton's logging extension over a logger: which levels it writes, and how it writes the time.

    A verbose level above 0 lets debug messages through; Triton has several, here they are one.
    """

    def __init__(self, logger: logging.Logger | None = None, file: str = "") -> None:
        """`logger` is the root logger by default. `file` is only told: clients cannot change where the log goes."""
        self._logger = logger or logging.getLogger()
        self._file = file
        present = self._logger.getEffectiveLevel()
        self._is_on = {name: present <= level for name, level in _SWITCHES.items()}
        self._verbose_level = int(present <= logging.DEBUG)
        self._format = "default"
        self._filter = _LevelFilter(self._is_on)
        self._level_before = self._logger.level

    def close(self) -> None:
        """Leave the logger as it was found."""
        self._logger.setLevel(self._level_before)
        for handler in self._logger.handlers:
            handler.removeFilter(self._filter)

    def get(self, model: str | None = None) -> dict[str, SettingValue]:
        """The settings as the protocol writes them; the log is the same for every model."""
        return {
            "log_file": self._file,
            **self._is_on,
            "log_verbose_level": self._verbose_level,
            "log_format": self._format,
        }

    def update(self, values: Mapping[str, SettingValue | None], model: str | None = None) -> None:
        """Change what `values` name; None changes nothing, nor does a name that is no setting.

        The types are the caller's to check. Raises SluiceError, and then nothing has changed.
        """
        given = {name: value for name, value in values.items() if value is not None}
        if "log_file" in given:
            text = "log file location can not be updated through network protocol"
            raise SluiceError(ErrorCode.UNIMPLEMENTED, text)
        log_format = str(given.get("log_format", self._format))
        if log_format not in _FORMATS:
            raise SluiceError(ErrorCode.UNAVAILABLE, f"invalid argument for --log_format, got: {log_format}")
        self._is_on |= {name: bool(given[name]) for name in _SWITCHES if name in given}
        self._verbose_level = int(str(given.get("log_verbose_level", self._verbose_level)))
        self._format = log_format
        self._apply()

    def _apply(self) -> None:
        levels = [level for name, level in _SWITCHES.items() if self._is_on[name]]
        lowest = logging.DEBUG if self._verbose_level else min(levels, default=logging.CRITICAL)
        self._logger.setLevel(lowest)
        self._filter.is_on = self._is_on
        for handler in self._logger.handlers:
            if self._filter not in handler.filters:
                handler.addFilter(self._filter)
            if handler.formatter is not None:
                handler.formatter.datefmt = _FORMATS[self._format]
                handler.formatter.converter = time.gmtime if _FORMATS[self._format] else time.localtime


class _LevelFilter(logging.Filter):
    """Drops the levels that are switched off while lower ones are on."""

    def __init__(self, is_on: Mapping[str, bool]) -> None:
        super().__init__()
        self.is_on = is_on

    def filter(self, record: logging.LogRecord) -> bool:
        name = next((name for name, level in _SWITCHES.items() if level == record.levelno), None)
        return name is None or self.is_on[name]
