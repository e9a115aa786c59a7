"""The settings of Triton's trace extension, the requests that they pick, and the files that traces are written to."""

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.gateway.api.v2.trace import Record, Trace, TracedModel, send_as_spans, to_records
from sluice.gateway.options.telemetry import TraceOptions
from sluice.gateway.telemetry.tracer import SpanSink, open_export
from sluice.record.spans import remote_parent
from sluice.serving.model import Model
from sluice.serving.request import InferRequest

log = logging.getLogger(__name__)
_MAX_KEPT = 1000
"""Most traces that wait in memory for their group; where groups have no size, they go to the file then."""
TraceValue = str | list[str]
_LEVELS = ("TIMESTAMPS", "TENSORS")
TRACE_SETTINGS = ("trace_file", "trace_level", "trace_rate", "trace_count", "log_frequency")
"""Names of the settings, in the order in which Triton checks them."""
_FIELDS = {"trace_level": "levels", "trace_rate": "rate", "trace_count": "count", "log_frequency": "log_frequency"}
_INTEGER = re.compile(r"\s*[+-]?\d+", re.ASCII)
_MAX_INT32 = 2**31 - 1
_RANGES = {"trace_rate": (0, 2**32 - 1), "trace_count": (-1, _MAX_INT32), "log_frequency": (0, 2**32 - 1)}
"""The ranges that Triton's errors name. It accepts nothing above 32 bits with a sign."""


@dataclass(frozen=True, slots=True)
class TraceSetting:
    """The setting of a model or of all models. `count` -1: no limit. `log_frequency` 0: all traces go into one file."""

    levels: frozenset[str] = frozenset()
    rate: int = 1000
    count: int = -1
    log_frequency: int = 0


def _read_change(name: str, value: TraceValue | None) -> dict[str, Any]:
    """Return the field of a setting with its new value, None where a change is taken back; nothing for levels that are
    not known. Raises SluiceError in Triton's words."""
    if name == "trace_file":
        text = "trace file location can not be updated through network protocol"
        raise SluiceError(ErrorCode.UNIMPLEMENTED, text)
    if value is None:
        return {_FIELDS[name]: None}
    if name != "trace_level":
        return {_FIELDS[name]: _parse_number(name, value[0] if isinstance(value, list) and value else str(value))}
    levels = frozenset(value if isinstance(value, list) else [str(value)])
    if "OFF" in levels:
        if value not in ("OFF", ["OFF"]):
            raise invalid("trace_level", "Expect only one trace level 'OFF' is specified")
        return {"levels": frozenset[str]()}
    known = levels & frozenset(_LEVELS)
    return {"levels": known} if known else {}


def _parse_number(name: str, text: str) -> int:
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


class TraceFile:
    """Writes traces into one array at `path`, and groups of them into `path.0`, `path.1` …"""

    def __init__(self, path: str) -> None:
        self.path = path
        self._next_index = 0
        self._has_begun = False

    def write_group(self, records: list[Record]) -> None:
        self._write(f"{self.path}.{self._next_index}", "w", f"[{_json(records)}]")
        self._next_index += 1

    def append(self, records: list[Record]) -> None:
        """Add to the array at `path`, which `close` ends."""
        self._write(self.path, "a" if self._has_begun else "w", ("," if self._has_begun else "[") + _json(records))
        self._has_begun = True

    def close(self) -> None:
        """End the array, where one was begun."""
        if self._has_begun:
            self._write(self.path, "a", "]")
            self._has_begun = False

    def _write(self, path: str, mode: str, text: str) -> None:
        try:
            with Path(path).open(mode) as file:
                file.write(text)
        except OSError as error:
            log.error("failed creating trace file: %s", error)


def _json(records: list[Record]) -> str:
    return ",".join(json.dumps(record, separators=(",", ":")) for record in records)


class TraceSettings:
    """The setting for all models, and for single models their differences from it."""

    def __init__(
        self,
        file: str = "",
        defaults: TraceSetting | None = None,
        collector: SpanSink | None = None,
        collector_settings: Mapping[str, str] | None = None,
    ) -> None:
        """`file` is the path that traces are written to; without one tracing cannot be switched on. With a `collector`
        they go there instead: Triton's mode `opentelemetry`. Its settings are shown to clients, by Triton's names."""
        self._collector = collector
        self._collector_settings = collector_settings or {}
        self._file = TraceFile(file)
        self._defaults = defaults or TraceSetting()
        self._num_traces = 0
        self._all = _Sampling(self._defaults, {}, self._file)
        self._models: dict[str, _Sampling] = {}

    def get(self, model: str | None = None) -> dict[str, TraceValue]:
        """Return the setting of `model`, or of all models, as the protocol writes it."""
        sampling = self._sampling(model)
        setting = sampling.setting
        common: dict[str, TraceValue] = {
            "trace_level": [level for level in _LEVELS if level in setting.levels] or ["OFF"],
            "trace_rate": str(setting.rate),
            "trace_count": str(sampling.count_left),
        }
        if self._collector is not None:
            return common | {"trace_mode": "opentelemetry"} | dict(self._collector_settings)
        own = {"log_frequency": str(setting.log_frequency), "trace_file": self._file.path, "trace_mode": "triton"}
        return common | own

    def update(self, values: Mapping[str, TraceValue | None], model: str | None = None) -> None:
        """Change the settings that `values` name; None takes a change back. Unknown names are ignored.

        Raises SluiceError, and then nothing has changed.
        """
        named = [name for name in TRACE_SETTINGS if name in values]
        changes = {field: value for name in named for field, value in _read_change(name, values[name]).items()}
        if model:
            self._change_model(model, changes)
        else:
            self._change_all(changes)

    def begin(self, model: Model, request: InferRequest) -> Trace | None:
        """Begin the trace of `request`, where it is to be traced."""
        sampling = self._models.get(model.name, self._all) if self._models else self._all
        if self._collector is not None:
            parent = remote_parent.get()
            # As in Triton, what comes with a context is traced whatever rate and count say.
            if not sampling.setting.levels or (parent is None and not sampling.takes_next()):
                return None
            done = partial(send_as_spans, self._collector, parent)
            return Trace(self._choose_number, frozenset({"TIMESTAMPS"}), model, request, done)
        if not sampling.takes_next():
            return None
        return Trace(self._choose_number, sampling.setting.levels, model, request, sampling.collect)

    def _choose_number(self) -> int:
        self._num_traces += 1
        return self._num_traces

    @property
    def is_on(self) -> bool:
        """Whether any request may be traced."""
        may_continue = self._collector is not None and bool(self._all.setting.levels)
        return self._all.is_on or may_continue or bool(self._models)

    def close(self) -> None:
        """Write the traces that are still in memory."""
        for sampling in (*self._models.values(), self._all):
            sampling.flush()
        self._file.close()

    async def close_collector(self) -> None:
        """Send the traces that a collector is still to get."""
        if self._collector is not None:
            await self._collector.close()

    def _check(self, setting: TraceSetting) -> None:
        """Raise INVALID for a setting that cannot be applied."""
        if self._collector is not None or not setting.levels:
            return
        reason = "sample rate must be non-zero" if setting.rate == 0 else ""
        if not reason and not self._file.path:
            reason = "trace file name is not given"
        if reason:
            raise invalid("trace_level", f"Attempting to set invalid trace setting :{reason}")

    def _sampling(self, model: str | None) -> "_Sampling":
        return self._models.get(model, self._all) if model else self._all

    def _change_all(self, changes: Mapping[str, Any]) -> None:
        own = _apply_changes(self._all, changes)
        sampling = _Sampling(replace(self._defaults, **own), own, self._file)
        self._check(sampling.setting)
        self._all.flush()
        self._all = sampling
        for name in list(self._models):
            self._change_model(name, {})

    def _change_model(self, model: str, changes: Mapping[str, Any]) -> None:
        present = self._models.get(model)
        own = _apply_changes(present, changes)
        above = replace(self._all.setting, count=self._all.count_left)
        sampling = _Sampling(replace(above, **own), own, self._file)
        self._check(sampling.setting)
        if present is not None:
            present.flush()
        if own:
            self._models[model] = sampling
        else:
            self._models.pop(model, None)


def _apply_changes(present: "_Sampling | None", changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the differences from the setting above after `changes`."""
    own = dict(present.own) if present is not None else {}
    if present is not None and "count" in own:
        own["count"] = present.count_left
    own.update(changes)
    return {name: value for name, value in own.items() if value is not None}


class _Sampling:
    """Picks requests by one setting, and collects their traces."""

    def __init__(self, setting: TraceSetting, own: dict[str, Any], file: TraceFile) -> None:
        """`own` has the fields of `setting` that differ from the setting above it."""
        self.setting = setting
        self.own = own
        self.count_left = setting.count
        self._file = file
        self.is_on = bool(setting.levels) and setting.rate > 0
        self._num_seen = 0
        self._num_open = 0
        self._kept: list[list[Record]] = []

    def takes_next(self) -> bool:
        """Whether the next request is traced."""
        if not self.is_on or self.count_left == 0:
            return False
        self._num_seen += 1
        if self._num_seen % self.setting.rate:
            return False
        if self.count_left > 0:
            self.count_left -= 1
        self._num_open += 1
        return True

    def collect(self, traced: list[TracedModel]) -> None:
        """Take a finished trace with its steps; write the group that it completes."""
        self._num_open -= 1
        self._kept.append([record for each in traced for record in to_records(each)])
        frequency = self.setting.log_frequency
        is_last = self.count_left == 0 and self._num_open == 0
        if is_last or 0 < frequency <= len(self._kept):
            self._file.write_group(self._take())
        elif len(self._kept) >= _MAX_KEPT:
            self.flush()

    def flush(self) -> None:
        if self._kept:
            write = self._file.write_group if self.setting.log_frequency else self._file.append
            write(self._take())

    def _take(self) -> list[Record]:
        records = [record for trace in self._kept for record in trace]
        self._kept.clear()
        return records


def make_trace_settings(options: TraceOptions) -> TraceSettings:
    """Build Triton's trace settings that apply until clients change them. Raises OptionError where a library is
    missing."""
    setting = TraceSetting(options.levels, options.rate, options.count, options.log_frequency)
    if options.mode == "triton":
        return TraceSettings(options.file, setting)
    names = (("bsp_max_queue_size", 2048), ("bsp_max_export_batch_size", 512), ("bsp_schedule_delay", 5000))
    numbers = [options.otel_number(*each) for each in names]
    resource = {"service.name": "triton-inference-server"} | options.resource
    export = open_export("--trace-config mode=opentelemetry", options.url, numbers, resource)
    return TraceSettings("", setting, export, options.otel_settings)
