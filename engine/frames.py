"""Messages between an engine and its clients: commands down, reports up. Within one process they are passed as objects;
between processes they travel as msgpack, one message in each ZeroMQ frame."""

from typing import Literal

import msgspec

from sluice.engine.statistics import EngineStats
from sluice.engine.types import BlockSource, EngineInfo, FinishReason, GenerateRequest, RequestFailed, TokenEvent
from sluice.errors import ErrorCode, SluiceError


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit", gc=False):
    """Queue a request. `stream_id` must be unused in this engine."""

    stream_id: int
    request: GenerateRequest
    was_accepted: bool = False
    """Whether an engine that is lost had accepted the request. This one then takes it even if its queue is full."""
    most_wait_s: float | None = None
    """Refuse the request at once with the predicted wait, if that is longer: the client can send it elsewhere."""
    source: BlockSource | None = None
    """The engine that has computed blocks of the prompt. What does not come from there is computed here."""


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Cancel a request, in whatever state it is."""

    stream_id: int


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag="shutdown"):
    """End the engine now; running sequences end as cancelled."""


class Drain(msgspec.Struct, frozen=True, array_like=True, tag="drain"):
    """Take no new requests from now on: they end in UNAVAILABLE. Those that the engine has go on. The statistics say
    that it drains."""


class AskProbe(msgspec.Struct, frozen=True, array_like=True, tag="ask_probe"):
    """Ask for the turn to submit a request that may be the one that has crashed an engine. Turns go round over all
    clients, one at a time: each until its request has brought a token or ended, so that another crash points at it."""

    stream_id: int


class LoadAdapter(msgspec.Struct, frozen=True, array_like=True, tag="load_adapter"):
    """Load the LoRA adapter in the folder `path`, in place of an adapter of the same name. A frame with its
    `AdapterOutcome` answers. Requests in flight with the adapter that it replaces end with that one."""

    name: str
    path: str


class UnloadAdapter(msgspec.Struct, frozen=True, array_like=True, tag="unload_adapter"):
    """Remove a LoRA adapter, answered by an `AdapterOutcome`. Requests in flight with it end as usual."""

    name: str


SleepMode = Literal["abort", "wait", "keep"]


class Sleep(msgspec.Struct, frozen=True, array_like=True, tag="sleep"):
    """Generate nothing until a `WakeUp`, and give memory back: level 0 none, 1 that of weights (kept in the host's
    memory) and KV cache, 2 that of both without a copy. Requests that run end in an error (`abort`), end first
    (`wait`), or go on after the sleep (`keep`); others wait in the queue. Answered by a `SleepOutcome`."""

    level: int = 1
    mode: SleepMode = "abort"


class WakeUp(msgspec.Struct, frozen=True, array_like=True, tag="wake_up"):
    """Take memory again, that of `tags` or all of it; with all of it the engine goes on. Answered by a
    `SleepOutcome`."""

    tags: list[str] | None = None


class FetchBlocks(msgspec.Struct, frozen=True, array_like=True, tag="fetch_blocks"):
    """Ask for the content of blocks, as another engine does. It need not attach. `BlockPiece`s answer, in the order of
    `hashes`, which are those of a chain, 16 bytes each, one after the other."""

    number: int
    """The asker's own, which the answers have."""
    identity: str
    """The asker's `EngineInfo.block_identity`."""
    hashes: bytes


class BlockPiece(msgspec.Struct, frozen=True, array_like=True):
    """Some of the blocks that were asked for. A second part of the message has their content, one block after the
    other."""

    number: int
    num_blocks: int
    is_last: bool
    """Whether no more come: all were sent, or the next one is not there any more."""
    refusal: str = ""
    """Why none are sent; "" where they are."""


class AskView(msgspec.Struct, frozen=True, array_like=True, tag="ask_view"):
    """Ask for a view of the engine, answered at once by an `EngineView`. The engine records its work from the first
    such question until `keep_s` seconds after the last one. The answer has what it recorded after the first `num_steps`
    and `num_waits`, which the client knows."""

    num_steps: int = 0
    num_waits: int = 0
    keep_s: float = 5.0


class Profile(msgspec.Struct, frozen=True, array_like=True, tag="profile"):
    """Record the steps of the next `seconds`, of which the frames tell."""

    seconds: float


CLIENT_SILENT_S = 5.0
ChangeCommand = LoadAdapter | UnloadAdapter | Sleep | WakeUp
Command = Submit | Cancel | AskProbe | AskView | Drain | Shutdown | Profile | FetchBlocks | ChangeCommand


class Attach(msgspec.Struct, frozen=True, array_like=True, tag="attach"):
    """Greets an engine as a client beside its launcher, which answers with `Ready`, and tells it every second that the
    client lives. The requests of one that is silent for `CLIENT_SILENT_S` are cancelled. From the first that
    `wants_prefixes` to one that does not, the client gets `PrefixChanges`; the launcher sends it for them alone."""

    wants_prefixes: bool = False


class AdapterOutcome(msgspec.Struct, frozen=True, array_like=True):
    """The answer to a command about the LoRA adapter `name`: the code and message of its error, or the names that
    requests may use from now on."""

    name: str
    code: ErrorCode | None = None
    message: str = ""
    adapters: tuple[str, ...] = ()
    digests: dict[str, str] = {}
    """As `EngineInfo.adapter_digests`."""

    def check(self) -> None:
        """Raise the error, if there is one."""
        if self.code is not None:
            raise SluiceError(self.code, self.message, param="lora_name")


class SleepOutcome(msgspec.Struct, frozen=True, array_like=True):
    """The answer to a command about sleep: the code and message of its error, and whether the engine sleeps now."""

    is_sleeping: bool
    code: ErrorCode | None = None
    message: str = ""

    def check(self) -> None:
        """Raise the error, if there is one."""
        if self.code is not None:
            raise SluiceError(self.code, self.message)


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The model is loaded. `engine_id` tells this engine from the ones before it at the same place. `endpoints` are
    those of TCP at which it takes clients, each with its real port."""

    info: EngineInfo
    engine_id: int = 0
    endpoints: tuple[str, ...] = ()


class ProbeTurn(msgspec.Struct, frozen=True, array_like=True, tag="probe_turn"):
    """The answer to `AskProbe`: the client may submit that request now."""

    stream_id: int


class LoadFailed(msgspec.Struct, frozen=True, array_like=True, tag="load_failed"):
    """The model could not be loaded; the engine ends."""

    code: ErrorCode
    message: str


class ProfiledStep(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A step that was recorded: when it began, by the engine's clock, the seconds of its parts in their order, and what
    its batch had. A delegated runtime tells of iterations alone, which have one part."""

    started: float
    parts: list[tuple[str, float]]
    num_decode: int = 0
    num_prefill_seqs: int = 0
    num_prefill_tokens: int = 0
    num_admitted: int = 0
    num_preempted: int = 0
    num_running: int = 0
    num_waiting: int = 0


class StepProfile(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Steps that were recorded since the last profile; `now` is the engine's clock as this is sent."""

    now: float
    steps: list[ProfiledStep]


class StepFrame(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """The outcome of one step for all sequences. A frame without events is a heartbeat."""

    events: list[TokenEvent]
    failures: list[RequestFailed]
    stats: EngineStats
    adapters: list[AdapterOutcome] = []
    sleep: list[SleepOutcome] = []
    profile: StepProfile | None = None


class PrefixChanges(msgspec.Struct, frozen=True, array_like=True, tag="prefixes"):
    """The blocks that entered and left the prefix index: their hashes of 16 bytes (`sluice.engine.blocks.HashChain`),
    one after the other. No hash is in both. What `is_first` begins anew: the client forgets all hashes, and gets those
    that are there in this message and the next ones. `number` counts the messages to this client, so that a gap is
    seen."""

    number: int
    stored: bytes
    removed: bytes
    is_first: bool = False


class StepRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A step that the engine has run."""

    at_s: float
    """The end of the step by the engine's clock, in seconds since 1970."""
    duration_ms: float
    num_prefill: int
    """Tokens of prompts that it computed."""
    num_decode: int
    """Sequences that it decoded."""
    num_seqs: int


class TenantTokens(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A tenant's tokens since the recording began: those of prompts that were computed, and those generated."""

    prompt: int = 0
    generated: int = 0


class BlockOwner(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A running sequence and its KV blocks: how many it has, and the most that it may need."""

    request_id: str
    num_blocks: int
    num_worst_case: int


class BlockMap(msgspec.Struct, frozen=True, array_like=True):
    """The states of the KV blocks, a byte for each cell of `blocks_per_cell` blocks
    (`sluice.engine.kv_cache.BlockState`). A cell of several blocks has the state that most of those have that are not
    free."""

    cells: bytes
    blocks_per_cell: int
    num_shared: int
    """Blocks that several sequences hold."""
    owners: bytes = b""
    """A byte for each cell, which tells of the first of its blocks that has its state: 0 for nobody, n for the n-th of
    `holders` (a shared block has one of those that hold it), `OTHER_HOLDER` for a sequence beyond the list, `RESERVED`
    for a free block that is among the next to be handed out, as many as running sequences have still reserved."""
    holders: list[BlockOwner] = []
    """The sequences with the most blocks."""


OTHER_HOLDER, RESERVED = 254, 255
"""Numbers in `BlockMap.owners` that stand for no single sequence."""


class EngineView(msgspec.Struct, frozen=True, array_like=True, tag="view"):
    """The answer to `AskView`. `num_steps` and `num_waits` count all that were recorded; the lists have the last of
    them, as far as they are kept."""

    num_steps: int
    steps: list[StepRecord]
    num_waits: int
    waits: list[float]
    """Seconds that requests have waited until they were admitted."""
    tenants: dict[str, TenantTokens]
    block_map: BlockMap | None = None
    """None for a runtime with blocks of its own."""


Report = Ready | LoadFailed | ProbeTurn | StepFrame | PrefixChanges | EngineView


def request_failed(stream_id: int, error: SluiceError) -> RequestFailed:
    """Make the event that ends a stream with `error`."""
    return RequestFailed(
        stream_id, error.code, error.template, error.param, error.retry_after_s, error.predicted_wait_s
    )


def hand_back_cancelled(frame: StepFrame) -> StepFrame:
    """Return a frame of an engine that ends and cancels what it has: as failures, so that clients go on elsewhere."""
    error = SluiceError(ErrorCode.UNAVAILABLE, "the engine has ended before the request was complete")
    cancelled = [each for each in frame.events if each.finish_reason is FinishReason.CANCELLED]
    failures = [*frame.failures, *(request_failed(each.stream_id, error) for each in cancelled)]
    events = [each for each in frame.events if each.finish_reason is not FinishReason.CANCELLED]
    return msgspec.structs.replace(frame, events=events, failures=failures)
