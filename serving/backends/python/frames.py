"""Messages between the server and a worker, and their encoding as frames on a stream socket.

A frame is a message as msgpack behind its length; file descriptors may come with it. Small tensors are in the frames,
large ones in shared memory (`shared_memory.py`). Both sides import this module, so it imports next to nothing.
"""

import os
import socket
from array import array
from collections import deque
from collections.abc import Iterator
from struct import Struct

import msgspec

INLINE_BYTES = 64 * 1024
"""Largest tensor that travels in the frame: copying it costs less than managing a segment."""
MAX_FDS = 64
"""Most file descriptors of one frame; the kernel takes up to 253."""
_LENGTH = Struct("<I")
_FDS_SPACE = socket.CMSG_SPACE(MAX_FDS * array("i").itemsize)
_READ_BYTES = 256 * 1024
_KEEP_BYTES = 16 * _READ_BYTES
_encoder = msgspec.msgpack.Encoder()


class SegmentRef(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Bytes of a tensor at the start of a shared segment. The side that sends them numbers the segment."""

    segment: int
    size: int


class WireTensor(msgspec.Struct, array_like=True, gc=False):
    """A tensor. `raw` is the protocol's wire form, or refers to it in shared memory."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    raw: bytes | SegmentRef


class WireRequest(msgspec.Struct, array_like=True, gc=False):
    """A request. Empty `outputs` ask for all. `traceparent` is the header for other servers that the model asks
    for this request, "" for none."""

    number: int
    inputs: list[WireTensor]
    id: str = ""
    correlation_id: int | str = 0
    flags: int = 0
    timeout_us: int = 0
    outputs: tuple[str, ...] = ()
    parameters: dict[str, bool | int | float | str] | None = None
    traceparent: str = ""


class WireResponse(msgspec.Struct, array_like=True, gc=False):
    """A response. `error` is a number of Triton's error codes and a message.

    With `is_rescheduled` there is no response: the model has not finished with the request, and wants it again.
    """

    number: int
    is_final: bool
    outputs: list[WireTensor] = []
    error: tuple[int, str] | None = None
    parameters: dict[str, bool | int | float | str] | None = None
    is_rescheduled: bool = False


class Execution(msgspec.Struct, array_like=True, gc=False):
    """End of the oldest unreported batch's `execute`. Times are perf_counter_ns, which all processes share."""

    received_ns: int
    started_ns: int
    ended_ns: int


class NewSegments(msgspec.Struct, array_like=True, tag="new_segments"):
    """Announces new segments of the sender. Their file descriptors come with this frame, in order."""

    numbers: list[int]
    sizes: list[int]


class ForwardedSegment(msgspec.Struct, array_like=True, tag="forwarded_segment"):
    """Announces a segment of another worker, for one tensor, to be mapped privately. Its file comes with this frame."""

    number: int
    size: int


class DroppedSegments(msgspec.Struct, array_like=True, tag="dropped_segments"):
    """Announces that the sender will not use these segments again."""

    numbers: list[int]


class TrimSegments(msgspec.Struct, array_like=True, tag="trim_segments"):
    """Tells the worker to drop its free segments: there was no large tensor for some time."""


class FreedSegments(msgspec.Struct, array_like=True, tag="freed_segments"):
    """Returns segments that the receiver of their tensors no longer reads."""

    numbers: list[int]


class Initialize(msgspec.Struct, array_like=True, tag="initialize"):
    """Import `model_file` and initialize the model with Triton's `args`."""

    model_file: str
    args: dict[str, str]
    version_folder: str = ""
    """Where modules are found too; the model's version, if that is not the folder of `model_file`."""


class CompleteConfig(msgspec.Struct, array_like=True, tag="complete_config"):
    """Import `model_file` and let the model complete this configuration."""

    model_file: str
    config_json: str
    model_name: str
    version_folder: str = ""


class ExecuteBatch(msgspec.Struct, array_like=True, tag="batch"):
    requests: list[WireRequest]


class CancelRequests(msgspec.Struct, array_like=True, tag="cancel_requests"):
    numbers: list[int]


class CallResponse(msgspec.Struct, array_like=True, tag="call_response"):
    """Response to a `CallModel` of the same number."""

    response: WireResponse


class ServerResponse(msgspec.Struct, array_like=True, tag="server_response"):
    """Response to a `ServerCall` of the same number: a value, or a number of Triton's error codes and a message."""

    number: int
    value: float | bool | None = None
    error: tuple[int, str] | None = None


class Finalize(msgspec.Struct, array_like=True, tag="finalize"):
    """Finalize the model and end the process."""


class WorkerStarted(msgspec.Struct, array_like=True, tag="worker_started"):
    """The process runs, and now loads the model."""


class Initialized(msgspec.Struct, array_like=True, tag="initialized"):
    pass


class ConfigCompleted(msgspec.Struct, array_like=True, tag="config_completed"):
    config_json: str


class CommandFailed(msgspec.Struct, array_like=True, tag="command_failed"):
    """The model could not be imported, initialized or completed."""

    message: str


class WorkerLogLine(msgspec.Struct, array_like=True, tag="log_line"):
    """Line of the model's logger; `level` is that of `logging`."""

    level: int
    location: str
    message: str


class WorkerReport(msgspec.Struct, array_like=True, tag="report"):
    """Responses, in order, followed by ended executions."""

    responses: list[WireResponse]
    executions: list[Execution]


class CallModel(msgspec.Struct, array_like=True, tag="call_model"):
    """Calls another model. `request.number` is the call's. Without `is_decoupled` it takes one response only.
    `works_for` is the number of the server's request that it is made for; 0: the model does not say."""

    model_name: str
    version: int
    is_decoupled: bool
    request: WireRequest
    works_for: int = 0


class CancelCall(msgspec.Struct, array_like=True, tag="cancel_call"):
    """Cancels a call. One that has not ended gets its final response at once."""

    number: int


class LoadModel(msgspec.Struct, array_like=True, tag="load_model"):
    """Loads a model, by default as the repository has it. `files` are by path in the model's folder."""

    name: str
    config_json: str
    files: dict[str, bytes]


class UnloadModel(msgspec.Struct, array_like=True, tag="unload_model"):
    name: str
    unload_dependents: bool


class CheckModelReady(msgspec.Struct, array_like=True, tag="check_model_ready"):
    """Asks whether a model serves; version -1 stands for any."""

    name: str
    version: int


class CreateMetricFamily(msgspec.Struct, array_like=True, tag="create_metric_family"):
    """Creates a metric family with the number `family`."""

    family: int
    name: str
    description: str
    kind: str


class CreateMetric(msgspec.Struct, array_like=True, tag="create_metric"):
    """Creates a metric of a family with the number `metric`."""

    metric: int
    family: int
    labels: dict[str, str]
    buckets: list[float] | None


class UseMetric(msgspec.Struct, array_like=True, tag="use_metric"):
    """Applies `operation` to a metric: increment, set, observe, or value, which returns the value."""

    metric: int
    operation: str
    value: float = 0.0


ServerRequest = LoadModel | UnloadModel | CheckModelReady | CreateMetricFamily | CreateMetric | UseMetric


class ServerCall(msgspec.Struct, array_like=True, tag="call_server"):
    """Calls the server. The model waits for the response of that number."""

    number: int
    request: ServerRequest


class ReleaseMetrics(msgspec.Struct, array_like=True, tag="release_metrics"):
    """Releases metric families and metrics that the model no longer refers to."""

    numbers: list[int]


ServiceRequest = CallModel | CancelCall | ServerCall | ReleaseMetrics
"""Messages with which a worker's model uses the server's services."""
Command = (
    Initialize
    | CompleteConfig
    | ExecuteBatch
    | CancelRequests
    | CallResponse
    | ServerResponse
    | Finalize
    | NewSegments
    | ForwardedSegment
    | DroppedSegments
    | TrimSegments
    | FreedSegments
)
"""Messages from the server."""
Message = (
    WorkerStarted
    | Initialized
    | ConfigCompleted
    | CommandFailed
    | WorkerLogLine
    | WorkerReport
    | CallModel
    | CancelCall
    | ServerCall
    | ReleaseMetrics
    | NewSegments
    | DroppedSegments
    | FreedSegments
)
"""Messages from a worker."""


def encode_frame(frame: Command | Message) -> bytes:
    body = _encoder.encode(frame)
    return _LENGTH.pack(len(body)) + body


def fd_ancillary(fds: list[int]) -> list[tuple[int, int, "array[int]"]]:
    """Return file descriptors as ancillary data for `sendmsg`."""
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []


class WorkerFrameReader:
    """Reads frames, and the file descriptors that come with them, from a stream socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._buffer = bytearray(2 * _READ_BYTES)
        self._start = 0
        self._end = 0
        self.fds: deque[int] = deque()
        """Descriptors that were received and not taken yet, in order. Whoever takes one closes it."""

    def read(self, flags: int = 0) -> bool:
        """Read once. Return False at the end of the stream. Raises BlockingIOError where it would wait and must not."""
        self._make_room()
        with memoryview(self._buffer) as view, view[self._end :] as room:
            size, received, _, _ = self._socket.recvmsg_into([room], _FDS_SPACE, flags | socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in received:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self.fds.extend(array("i", data[: len(data) - len(data) % array("i").itemsize]))
        self._end += size
        return size > 0

    def frames(self) -> Iterator[memoryview]:
        """Yield the complete frames that have been read. Each is valid until the next one is requested."""
        while self._end - self._start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, self._start)
            start, end = self._start + _LENGTH.size, self._start + _LENGTH.size + length
            if end > self._end:
                return
            self._start = end
            with memoryview(self._buffer) as view, view[start:end] as frame:
                yield frame

    def _make_room(self) -> None:
        if self._start == self._end:
            self._start = self._end = 0
            if len(self._buffer) > _KEEP_BYTES:
                self._buffer = bytearray(2 * _READ_BYTES)
        if len(self._buffer) - self._end >= _READ_BYTES:
            return
        unread = self._buffer[self._start : self._end]
        self._buffer = unread + bytearray(max(self._missing(), 2 * _READ_BYTES))
        self._start, self._end = 0, len(unread)

    def _missing(self) -> int:
        """Return the number of bytes that the incomplete frame lacks."""
        if self._end - self._start < _LENGTH.size:
            return 0
        (length,) = _LENGTH.unpack_from(self._buffer, self._start)
        return int(length) + _LENGTH.size - (self._end - self._start)

    def close(self) -> None:
        """Close descriptors that nobody took, and free the buffer: this object may stay uncollected for long."""
        while self.fds:
            os.close(self.fds.popleft())
        self._buffer = bytearray()
        self._start = self._end = 0
