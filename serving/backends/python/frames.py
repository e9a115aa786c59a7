"""What gateway and worker say to each other, as msgpack (`framing.py` puts it on the socket).

Small tensors lie in the frames, large ones in shared memory (`segments.py`). Both sides import this module, so it
imports next to nothing.
"""

import msgspec

INLINE_BYTES = 64 * 1024
"""Tensors up to this size travel in the frame; copying those costs less than keeping count of a segment."""


class Stored(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A tensor's bytes at the start of a shared segment, numbered by the side that sends it."""

    segment: int
    size: int


class WireTensor(msgspec.Struct, array_like=True, gc=False):
    """`raw` is the protocol's wire form, or where it lies."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    raw: bytes | Stored


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


class Load(msgspec.Struct, array_like=True, tag="load"):
    """Import `model_file` and initialize the model with Triton's `args`."""

    model_file: str
    args: dict[str, str]


class Complete(msgspec.Struct, array_like=True, tag="complete"):
    """Import `model_file` and let it complete this configuration."""

    model_file: str
    config_json: str
    model_name: str


class Batch(msgspec.Struct, array_like=True, tag="batch"):
    requests: list[WireRequest]


class Cancel(msgspec.Struct, array_like=True, tag="cancel"):
    numbers: list[int]


class Called(msgspec.Struct, array_like=True, tag="called"):
    """A response to the call of that number."""

    reply: "Reply"


class Shutdown(msgspec.Struct, array_like=True, tag="shutdown"):
    """Finalize the model and end."""


class Answered(msgspec.Struct, array_like=True, tag="answered"):
    """The answer to the question of that number: a value, or a number of Triton's error codes and a message."""

    number: int
    value: float | bool | None = None
    error: tuple[int, str] | None = None


class Segments(msgspec.Struct, array_like=True, tag="segments"):
    """New segments of the sender; their file descriptors come with this frame, in order."""

    numbers: list[int]
    sizes: list[int]


class Lent(msgspec.Struct, array_like=True, tag="lent"):
    """A segment of another worker, whose file comes with this frame, for one tensor: to be mapped privately."""

    number: int
    size: int


class Dropped(msgspec.Struct, array_like=True, tag="dropped"):
    """Segments that the sender will not use again."""

    numbers: list[int]


class Freed(msgspec.Struct, array_like=True, tag="freed"):
    """Segments of the other side that nobody here reads any more."""

    numbers: list[int]


class Call(msgspec.Struct, array_like=True, tag="call"):
    """The model asks another one; `request.number` is the call's. Without `is_decoupled` it takes one response only."""

    model_name: str
    version: int
    is_decoupled: bool
    request: WireRequest


class EndCall(msgspec.Struct, array_like=True, tag="end_call"):
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


class AskReady(msgspec.Struct, array_like=True, tag="ask_ready"):
    """Whether the model serves; version -1 is any."""

    name: str
    version: int


class MakeFamily(msgspec.Struct, array_like=True, tag="make_family"):
    """A family of metrics, from now on `family`."""

    family: int
    name: str
    description: str
    kind: str


class MakeMetric(msgspec.Struct, array_like=True, tag="make_metric"):
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


Question = LoadModel | UnloadModel | AskReady | MakeFamily | MakeMetric | UseMetric


class Ask(msgspec.Struct, array_like=True, tag="ask"):
    """What the model asks of the server; it waits for the answer of that number."""

    number: int
    question: Question


class LetGo(msgspec.Struct, array_like=True, tag="let_go"):
    """Families and metrics that the model holds no more."""

    numbers: list[int]


class Started(msgspec.Struct, array_like=True, tag="started"):
    """The process is there; what takes longer is the model."""


class Loaded(msgspec.Struct, array_like=True, tag="loaded"):
    pass


class Completed(msgspec.Struct, array_like=True, tag="completed"):
    config_json: str


class Failed(msgspec.Struct, array_like=True, tag="failed"):
    """The model could not be imported, initialized or completed."""

    message: str


class Logged(msgspec.Struct, array_like=True, tag="logged"):
    """A line of the model's logger; `level` as in `logging`."""

    level: int
    place: str
    message: str


class Reply(msgspec.Struct, array_like=True, gc=False):
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


class Report(msgspec.Struct, array_like=True, tag="report"):
    """Replies, in order, and then executions."""

    replies: list[Reply]
    executions: list[Execution]


Command = Load | Complete | Batch | Cancel | Called | Answered | Shutdown | Segments | Lent | Dropped | Freed
"""From the gateway."""
Message = (
    Started | Loaded | Completed | Failed | Logged | Report | Call | EndCall | Ask | LetGo | Segments | Dropped | Freed
)
"""From the worker."""
