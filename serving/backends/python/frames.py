"""What gateway and worker say to each other, as msgpack (`framing.py` puts it on the socket).

Small tensors lie in the frames, large ones in shared memory (`segments.py`). Both sides import this module, so it
imports next to nothing.
"""

import os
import socket
from array import array
from collections import deque
from collections.abc import Iterator
from struct import Struct

import msgspec

INLINE_BYTES = 64 * 1024
"""Tensors up to this size travel in the frame; copying those costs less than keeping count of a segment."""
MAX_FDS = 64
"""Of one frame; the kernel takes up to 253."""
_LENGTH = Struct("<I")
_FDS_SPACE = socket.CMSG_SPACE(MAX_FDS * array("i").itemsize)
_READ_BYTES = 256 * 1024
_KEEP_BYTES = 16 * _READ_BYTES
_encoder = msgspec.msgpack.Encoder()


class SegmentRef(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A tensor's bytes at the start of a shared segment, numbered by the side that sends it."""

    segment: int
    size: int


class WireTensor(msgspec.Struct, array_like=True, gc=False):
    """`raw` is the protocol's wire form, or where it lies."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    raw: bytes | SegmentRef


class WireRequest(msgspec.Struct, array_like=True, gc=False):
    """`outputs` empty asks for all."""

    number: int
    inputs: list[WireTensor]
    id: str = ""
    correlation_id: int | str = 0
    flags: int = 0
    timeout_us: int = 0
    outputs: tuple[str, ...] = ()
    parameters: dict[str, bool | int | float | str] | None = None


class WireResponse(msgspec.Struct, array_like=True, gc=False):
    """One response. `error` is a number of Triton's error codes and a message.

    One `is_rescheduled` is none: the model has not finished with the request, and wants it again.
    """

    number: int
    is_final: bool
    outputs: list[WireTensor] = []
    error: tuple[int, str] | None = None
    parameters: dict[str, bool | int | float | str] | None = None
    is_rescheduled: bool = False


class Execution(msgspec.Struct, array_like=True, gc=False):
    """`execute` has returned for the oldest batch that it had not. Times are perf_counter_ns, one clock for all."""

    taken_ns: int
    started_ns: int
    ended_ns: int


class NewSegments(msgspec.Struct, array_like=True, tag="new_segments"):
    """New segments of the sender; their file descriptors come with this frame, in order."""

    numbers: list[int]
    sizes: list[int]


class ForwardedSegment(msgspec.Struct, array_like=True, tag="forwarded_segment"):
    """A segment of another worker, whose file comes with this frame, for one tensor: to be mapped privately."""

    number: int
    size: int


class DroppedSegments(msgspec.Struct, array_like=True, tag="dropped_segments"):
    """Segments that the sender will not use again."""

    numbers: list[int]


class FreedSegments(msgspec.Struct, array_like=True, tag="freed_segments"):
    """Segments of the other side that nobody here reads any more."""

    numbers: list[int]


class Initialize(msgspec.Struct, array_like=True, tag="initialize"):
    """Import `model_file` and initialize the model with Triton's `args`."""

    model_file: str
    args: dict[str, str]


class CompleteConfig(msgspec.Struct, array_like=True, tag="complete_config"):
    """Import `model_file` and let it complete this configuration."""

    model_file: str
    config_json: str
    model_name: str


class ExecuteBatch(msgspec.Struct, array_like=True, tag="batch"):
    requests: list[WireRequest]


class CancelRequests(msgspec.Struct, array_like=True, tag="cancel_requests"):
    numbers: list[int]


class CallResponse(msgspec.Struct, array_like=True, tag="call_response"):
    """A response to the call of that number."""

    reply: "WireResponse"


class ServerResponse(msgspec.Struct, array_like=True, tag="server_response"):
    """The answer to the question of that number: a value, or a number of Triton's error codes and a message."""

    number: int
    value: float | bool | None = None
    error: tuple[int, str] | None = None


class Finalize(msgspec.Struct, array_like=True, tag="finalize"):
    """Finalize the model and end."""


class WorkerStarted(msgspec.Struct, array_like=True, tag="worker_started"):
    """The process is there; what takes longer is the model."""


class Initialized(msgspec.Struct, array_like=True, tag="initialized"):
    pass


class ConfigCompleted(msgspec.Struct, array_like=True, tag="config_completed"):
    config_json: str


class CommandFailed(msgspec.Struct, array_like=True, tag="command_failed"):
    """The model could not be imported, initialized or completed."""

    message: str


class LogLine(msgspec.Struct, array_like=True, tag="log_line"):
    """A line of the model's logger; `level` as in `logging`."""

    level: int
    place: str
    message: str


class Report(msgspec.Struct, array_like=True, tag="report"):
    """Replies, in order, and then executions."""

    replies: list[WireResponse]
    executions: list[Execution]


class CallModel(msgspec.Struct, array_like=True, tag="call_model"):
    """The model asks another one; `request.number` is the call's. Without `is_decoupled` it takes one response only."""

    model_name: str
    version: int
    is_decoupled: bool
    request: WireRequest


class CancelCall(msgspec.Struct, array_like=True, tag="cancel_call"):
    """The model wants no more of it. A call under way then gets its final response at once."""

    number: int


class LoadModel(msgspec.Struct, array_like=True, tag="load_model"):
    """`config_json` "" and no `files`: as the repository has it. `files` by path inside the model's folder."""

    name: str
    config_json: str
    files: dict[str, bytes]


class UnloadModel(msgspec.Struct, array_like=True, tag="unload_model"):
    name: str
    unload_dependents: bool


class CheckModelReady(msgspec.Struct, array_like=True, tag="check_model_ready"):
    """Whether the model serves; version -1 is any."""

    name: str
    version: int


class CreateMetricFamily(msgspec.Struct, array_like=True, tag="create_metric_family"):
    """A family of metrics, from now on `family`."""

    family: int
    name: str
    description: str
    kind: str


class CreateMetric(msgspec.Struct, array_like=True, tag="create_metric"):
    """A metric of the family, from now on `metric`."""

    metric: int
    family: int
    labels: dict[str, str]
    buckets: list[float] | None


class UseMetric(msgspec.Struct, array_like=True, tag="use_metric"):
    """`operation` is increment, set, observe or value, which takes no `value`."""

    metric: int
    operation: str
    value: float = 0.0


ServerRequest = LoadModel | UnloadModel | CheckModelReady | CreateMetricFamily | CreateMetric | UseMetric


class CallServer(msgspec.Struct, array_like=True, tag="call_server"):
    """What the model asks of the server; it waits for the answer of that number."""

    number: int
    question: ServerRequest


class ReleaseMetrics(msgspec.Struct, array_like=True, tag="release_metrics"):
    """Families and metrics that the model holds no more."""

    numbers: list[int]


ServiceRequest = CallModel | CancelCall | CallServer | ReleaseMetrics
"""From the worker's model, which the server answers."""
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
    | FreedSegments
)
"""From the gateway."""
Message = (
    WorkerStarted
    | Initialized
    | ConfigCompleted
    | CommandFailed
    | LogLine
    | Report
    | CallModel
    | CancelCall
    | CallServer
    | ReleaseMetrics
    | NewSegments
    | DroppedSegments
    | FreedSegments
)
"""From the worker."""


def encode_frame(frame: Command | Message) -> bytes:
    """The bytes that stand for it on the socket."""
    body = _encoder.encode(frame)
    return _LENGTH.pack(len(body)) + body


def fd_ancillary(fds: list[int]) -> list[tuple[int, int, "array[int]"]]:
    """How `sendmsg` takes file descriptors."""
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []


class FrameReader:
    """Frames out of a stream socket, and the file descriptors that come with them."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._buffer = bytearray(2 * _READ_BYTES)
        self._start = 0
        self._end = 0
        self.fds: deque[int] = deque()
        """Received and not taken yet, in order; the taker closes them."""

    def read(self, flags: int = 0) -> bool:
        """Read once. False at the end of it. Raises BlockingIOError where nothing is there and it may not wait."""
        self._make_room()
        with memoryview(self._buffer) as view, view[self._end :] as room:
            size, received, _, _ = self._socket.recvmsg_into([room], _FDS_SPACE, flags | socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in received:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self.fds.extend(array("i", data[: len(data) - len(data) % array("i").itemsize]))
        self._end += size
        return size > 0

    def frames(self) -> Iterator[memoryview]:
        """The whole frames read so far. Each is valid until the next is asked for."""
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
        """Bytes that the frame begun still lacks."""
        if self._end - self._start < _LENGTH.size:
            return 0
        (length,) = _LENGTH.unpack_from(self._buffer, self._start)
        return int(length) + _LENGTH.size - (self._end - self._start)

    def close(self) -> None:
        """Give up what came and nobody took, and the buffer: who refers to this may be garbage for long."""
        while self.fds:
            os.close(self.fds.popleft())
        self._buffer = bytearray()
        self._start = self._end = 0
