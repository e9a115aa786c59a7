"""Traces of requests in Triton's JSON: when each came, waited, was computed and was answered."""

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter_ns

from serving.job import InferJob
from serving.model import Model
from serving.request import InferRequest
from serving.tensors.tensor import Tensor

log = logging.getLogger(__name__)

Record = dict[str, object]


class Trace:
    """One sampled request. Times are those of `perf_counter_ns`, which on Linux is the clock that Triton reads too."""

    def __init__(
        self, number: int, levels: frozenset[str], model: Model, request: InferRequest, done: Callable[["Trace"], None]
    ) -> None:
        """`done` is called once, when the trace is complete."""
        self._number = number
        self._levels = levels
        self._done: Callable[[Trace], None] | None = done
        head: Record = {"id": number, "model_name": model.name, "model_version": model.version}
        if request.id:
            head["request_id"] = request.id
        self.records: list[Record] = [head]
        self.capture_tensors("TENSOR_QUEUE_INPUT", list(request.inputs.values()))

    def capture(self, name: str, at_ns: int | None = None) -> None:
        """Note that `name` (HTTP_RECV_START …) happened, by default now."""
        if "TIMESTAMPS" in self._levels:
            at_ns = perf_counter_ns() if at_ns is None else at_ns
            self.records.append({"id": self._number, "timestamps": [{"name": name, "ns": at_ns}]})

    def capture_tensors(self, activity: str, tensors: Sequence[Tensor]) -> None:
        """Note the values of `tensors` (TENSOR_QUEUE_INPUT, TENSOR_BACKEND_OUTPUT)."""
        if "TENSORS" in self._levels:
            for tensor in tensors:
                self.records.append({"id": self._number, "activity": activity, "tensor": _described(tensor)})

    def capture_job(self, job: InferJob) -> None:
        """Note where the job's time went. Points that it did not pass are left out."""
        ended_ns = perf_counter_ns()
        points = (
            ("REQUEST_START", job.started_ns),
            ("QUEUE_START", job.started_ns),
            ("COMPUTE_START", job.compute_started_ns),
            ("COMPUTE_INPUT_END", job.infer_started_ns),
            ("COMPUTE_OUTPUT_START", job.infer_ended_ns),
            ("COMPUTE_END", ended_ns if job.compute_started_ns else 0),
            ("REQUEST_END", ended_ns),
        )
        for name, at_ns in points:
            if at_ns:
                self.capture(name, at_ns)

    def finish(self) -> None:
        """The request is over. Idempotent."""
        done, self._done = self._done, None
        if done is not None:
            done(self)


def _described(tensor: Tensor) -> Record:
    elements = tensor.array.ravel().tolist()
    if tensor.datatype == "BYTES":
        data = ",".join(f'"{element.decode(errors="replace")}"' for element in elements)
    else:
        data = ",".join(map(str, elements))
    return {
        "name": tensor.name,
        "data": data,
        "shape": ",".join(map(str, tensor.shape)),
        "dtype": tensor.datatype,
    }


class TraceFile:
    """Where traces go: into one array at `path`, and groups of them into `path.0`, `path.1` …"""

    def __init__(self, path: str) -> None:
        self.path = path
        self._next_index = 0
        self._has_begun = False

    def write_group(self, records: list[Record]) -> None:
        """A file of their own for `records`."""
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
