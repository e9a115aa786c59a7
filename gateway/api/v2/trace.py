"""Triton's trace extension: its settings, the requests that they pick, and their traces in Triton's JSON."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from sluice.errors import invalid
from sluice.gateway.api.v2.trace_spans import TracesAsSpans
from sluice.gateway.api.v2.trace_steps import Record, TracedModel, find_steps, to_records
from sluice.gateway.api.v2.trace_values import (
    CLEARED,
    LEVELS,
    TRACE_FIELDS,
    TRACE_SETTINGS,
    UNCHANGED,
    TraceSetting,
    TraceValue,
    parse_setting,
)
from sluice.record.spans import Attributes, Recording, Span, current_span, remote_parent
from sluice.serving.job import InferJob
from sluice.serving.model import Model
from sluice.serving.request import InferRequest
from sluice.serving.tensors.tensor import Tensor

log = logging.getLogger(__name__)
_MAX_KEPT = 1000
"""Most traces that wait in memory for their group; where groups have no size, they go to the file then."""
_ENSEMBLE = "ensemble"


class Trace:
    """The trace of one request. Times are those of `perf_counter_ns`, which on Linux is the clock that Triton reads."""

    def __init__(
        self,
        choose_number: Callable[[], int],
        levels: frozenset[str],
        model: Model,
        request: InferRequest,
        done: Callable[[list[TracedModel]], None],
    ) -> None:
        """`choose_number` numbers this trace and those of its steps; `done` gets them once, when it is complete."""
        self._choose_number = choose_number
        self._levels = levels
        self._has_computation = model.spec.platform != _ENSEMBLE
        """Triton's ensembles compute nothing themselves."""
        self._done: Callable[[list[TracedModel]], None] | None = done
        self._root = Recording("trace", request.id, {}, _forget).root
        self._job_span: Span | None = None
        self._own = TracedModel(choose_number(), 0, model.name, model.version, self._root.events, request.id)
        self.capture_tensors("TENSOR_QUEUE_INPUT", list(request.inputs.values()))

    def capture(self, name: str, at_ns: int = 0) -> None:
        """Note that `name` (HTTP_RECV_START …) happened, by default now."""
        if "TIMESTAMPS" in self._levels:
            self._root.note(name, at_ns=at_ns)

    @contextmanager
    def following(self) -> Iterator[None]:
        """Note the steps of the job that is submitted within the context: in the spans of whoever records the request
        anyway, else in the trace's own."""
        before = current_span.get()
        above = before or self._root
        num_spans = len(above.recording.spans)
        current_span.set(above)
        try:
            yield
        finally:
            current_span.set(before)
            begun = above.recording.spans[num_spans:]
            self._job_span = begun[0] if begun and "TIMESTAMPS" in self._levels else None

    def capture_tensors(self, activity: str, tensors: Sequence[Tensor]) -> None:
        """Note the values of `tensors` (TENSOR_QUEUE_INPUT, TENSOR_BACKEND_OUTPUT)."""
        if "TENSORS" in self._levels:
            for tensor in tensors:
                self._root.note(activity, _describe_tensor(tensor))

    def capture_job(self, job: InferJob) -> None:
        """Note where the job's time went. Points that it did not pass are left out."""
        ended_ns = perf_counter_ns()
        computation = (
            ("COMPUTE_START", job.compute_started_ns),
            ("COMPUTE_INPUT_END", job.infer_started_ns),
            ("COMPUTE_OUTPUT_START", job.infer_ended_ns),
            ("COMPUTE_END", ended_ns if job.compute_started_ns else 0),
        )
        queue = (("REQUEST_START", job.started_ns), ("QUEUE_START", job.started_ns))
        for name, at_ns in (*queue, *(computation if self._has_computation else ()), ("REQUEST_END", ended_ns)):
            if at_ns:
                self.capture(name, at_ns)

    def finish(self) -> None:
        """Hand over the trace: the request has ended. Idempotent."""
        done, self._done = self._done, None
        if done is not None:
            steps = () if self._job_span is None else find_steps(self._job_span, self._own.number, self._choose_number)
            done([self._own, *steps])


def _forget(_: Recording) -> None:
    """Keep nothing of a recording that is complete."""


_UNTRACED = nullcontext()


def following(trace: Trace | None) -> AbstractContextManager[None]:
    """Note the steps of the job that is submitted within the context; nothing for a request that is not traced."""
    return _UNTRACED if trace is None else trace.following()


def _describe_tensor(tensor: Tensor) -> Attributes:
    elements = tensor.array.ravel().tolist()
    if tensor.datatype == "BYTES":
        data = ",".join(f'"{element.decode(errors="replace")}"' for element in elements)
    else:
        data = ",".join(map(str, elements))
    return {"name": tensor.name, "data": data, "shape": ",".join(map(str, tensor.shape)), "dtype": tensor.datatype}


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
        self, file: str = "", defaults: TraceSetting | None = None, collector: TracesAsSpans | None = None
    ) -> None:
        """`file` is the path that traces are written to; without one tracing cannot be switched on. With a `collector`
        they go there instead: Triton's mode `opentelemetry`."""
        self._collector = collector
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
            "trace_level": [level for level in LEVELS if level in setting.levels] or ["OFF"],
            "trace_rate": str(setting.rate),
            "trace_count": str(sampling.count_left),
        }
        if self._collector is not None:
            return common | {"trace_mode": "opentelemetry"} | self._collector.settings
        own = {"log_frequency": str(setting.log_frequency), "trace_file": self._file.path, "trace_mode": "triton"}
        return common | own

    def update(self, values: Mapping[str, TraceValue | None], model: str | None = None) -> None:
        """Change the settings that `values` name; None takes a change back. Unknown names are ignored.

        Raises SluiceError, and then nothing has changed.
        """
        new = {name: parse_setting(name, values[name]) for name in TRACE_SETTINGS if name in values}
        changes = {TRACE_FIELDS[name]: value for name, value in new.items() if value is not UNCHANGED}
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
            done = partial(self._collector.put, parent)
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

    def _check(self, sampling: "_Sampling") -> None:
        if self._collector is None:
            sampling.check(self._file)

    def _sampling(self, model: str | None) -> "_Sampling":
        return self._models.get(model, self._all) if model else self._all

    def _change_all(self, changes: Mapping[str, Any]) -> None:
        own = _apply_changes(self._all, changes)
        sampling = _Sampling(replace(self._defaults, **own), own, self._file)
        self._check(sampling)
        self._all.flush()
        self._all = sampling
        for name in list(self._models):
            self._change_model(name, {})

    def _change_model(self, model: str, changes: Mapping[str, Any]) -> None:
        present = self._models.get(model)
        own = _apply_changes(present, changes)
        above = replace(self._all.setting, count=self._all.count_left)
        sampling = _Sampling(replace(above, **own), own, self._file)
        self._check(sampling)
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
    return {name: value for name, value in own.items() if value is not CLEARED}


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

    def check(self, file: TraceFile) -> None:
        """Raise INVALID for a setting that cannot be applied."""
        if not self.setting.levels:
            return
        reason = "sample rate must be non-zero" if self.setting.rate == 0 else ""
        if not reason and not file.path:
            reason = "trace file name is not given"
        if reason:
            raise invalid("trace_level", f"Attempting to set invalid trace setting :{reason}")

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
