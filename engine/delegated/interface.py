"""The interface of a runtime that batches by itself, behind the same frames as our own executor.

`DelegatedExecutor` puts queue, admission, deadlines, cancellation and statistics in front of it; the runtime brings the
rest. Adding one takes a folder beside `tensorrt_llm/` with three files:

- `runtime.py`: its `RuntimeSpec`, light to import, registered in `engine/runtimes.py`;
- a class that implements `DelegatedRuntime`, and one that implements `RequestHandle`;
- `process.py`: `main`, which gives `sluice.engine.delegated.process.run` the function that loads the runtime.

All methods are called on the event loop of the engine's process, except `shutdown`.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple, Protocol

from sluice.engine.blocks import HashChain
from sluice.engine.delegated.admission import BlockSharing
from sluice.engine.delegated.cached_prefixes import CachedPrefixes
from sluice.engine.frames import SleepMode
from sluice.engine.statistics import HandoverStats, IterationStats
from sluice.engine.types import EngineInfo, EventDetail, FinishReason, GenerateRequest
from sluice.errors import ErrorCode, SluiceError


class EngineLost(Exception):
    """The runtime cannot go on; the supervisor of this process starts another."""


class ResponseDelta(NamedTuple):
    """The part of a response that is new. `finish_reason` is CANCELLED only where the runtime says so."""

    token_ids: list[int]
    finish_reason: FinishReason | None = None
    detail: EventDetail | None = None

    @property
    def is_empty(self) -> bool:
        return not self.token_ids and self.finish_reason is None and self.detail is None


class RequestHandle(Protocol):
    """One request in the runtime. Iteration yields its responses in the runtime's own form."""

    def __aiter__(self) -> AsyncIterator[Any]: ...

    @property
    def is_finished(self) -> bool:
        """Whether the last response has come."""
        ...

    def read(self, response: Any) -> ResponseDelta:
        """Return what is new in `response`. Raises SluiceError where the client gets an error instead."""
        ...

    def abort(self) -> None:
        """Ask for the end, perhaps by a task. The iteration ends when the request's blocks are free."""
        ...


class RuntimeFailure(NamedTuple):
    """The meaning of an exception that the runtime raised."""

    error: SluiceError
    """The answer to the client."""
    is_fatal: bool = False
    """Whether the exception itself says that nothing will come any more. Others may be fatal too: health says so."""
    is_response: bool = False
    """Whether it came as the request's response: its text says what happened, and its traceback nothing."""


class Iteration(NamedTuple):
    """One step of the runtime, as its statistics show it."""

    stats: IterationStats
    seconds: float
    num_drafted: int = 0
    num_accepted: int = 0
    """Draft tokens that speculation proposed, and those of them that the model agreed with."""


TakeIteration = Callable[[Iteration], None]
"""Takes the runtime's statistics."""


class ExpandedPrompt(NamedTuple):
    """A prompt with its images in the place of their placeholders."""

    token_ids: list[int]
    prepare: Callable[[GenerateRequest], Any]
    """Does what `DelegatedRuntime.prepare` does, for a request with this prompt."""
    goes_on: bool = True
    """Whether an answer can go on after `resume_token_ids`; else it is generated anew."""


class DelegatedRuntime(ABC):
    """A loaded runtime. What only some runtimes do has a default here."""

    title: str
    """Its name in messages: "TensorRT-LLM"."""
    prefixes: CachedPrefixes | None = None
    """The index of its cache, which the runtime's events change while it is observed; None where it tells of none.
    Known after `start`."""

    @property
    @abstractmethod
    def takes_early(self) -> bool:
        """Whether it may get a few requests before there is room for them, and starts them in order once there is. One
        that goes by the prompt alone, and evicts where answers outgrow the cache, may not."""

    @property
    @abstractmethod
    def sharing(self) -> BlockSharing:
        """Which blocks of the prompts in flight it holds once. Known after `start`."""

    @abstractmethod
    async def start(self) -> tuple[EngineInfo, IterationStats | None]:
        """Generate a token (`sluice.engine.delegated.watchdog.warm_up`), and return what the engine is. `load_seconds`
        is left to the caller. `EngineInfo.num_blocks` are those that requests can use. The statistics are those of the
        first iteration, None where there are none. Raises SluiceError where no token comes."""

    @abstractmethod
    def prepare(self, request: GenerateRequest) -> Any:
        """Return the request in the form that `submit` takes, before it waits in the queue. Generation goes on after
        `resume_token_ids`, which are output that counts towards `max_tokens`. Raises SluiceError for what the runtime
        cannot do."""

    @abstractmethod
    def needs_replay(self, request: GenerateRequest) -> bool:
        """Return whether an answer that goes on after a crash is generated anew from its prompt, since the runtime
        cannot go on in the middle of it: `prepare` then gets no `resume_token_ids`. That what was sent comes again is
        checked."""

    @abstractmethod
    def submit(self, prepared: Any) -> RequestHandle:
        """Hand the request over. What this raises `classify` explains."""

    @abstractmethod
    def worst_case_blocks(self, request: GenerateRequest) -> int:
        """Return the most KV blocks that the runtime reserves, or that the request could ever hold. Requests are only
        handed over while the sum fits, shared blocks counted as `sharing` says, so that the runtime need not evict."""

    @abstractmethod
    def prompt_chain(self, request: GenerateRequest) -> HashChain | None:
        """Return what names the blocks of the request's prompt: requests with the same hash share a block. None where
        it shares none, such as one whose whole prompt must be computed. Not asked where `sharing` is NONE."""

    @abstractmethod
    def classify(self, error: Exception, *, at_submit: bool) -> RuntimeFailure:
        """Explain an exception of `submit` (`at_submit`) or of a handle's iteration. A runtime that checks requests
        only then finds the faults of their arguments among the latter."""

    @abstractmethod
    async def is_healthy(self) -> bool:
        """Return whether the runtime says that it can go on; true where there is no way to know."""

    @abstractmethod
    async def observe(self, take: TakeIteration, is_busy: asyncio.Event) -> None:
        """Give `take` the statistics until cancelled. `is_busy` is set while the runtime has requests. A runtime
        without statistics waits: then steps are estimated from the tokens that come."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the runtime and its processes. Blocks; called on a thread of its own."""

    # -- images in prompts, as many as `EngineInfo.image_placeholders`

    async def expand(self, request: GenerateRequest) -> ExpandedPrompt:
        """Return the request's prompt with the tokens of its images. Raises SluiceError for images that cannot be
        used."""
        raise NotImplementedError

    # -- LoRA adapters that come and go at run time. The executor changes one at a time

    @property
    def adapter_digests(self) -> dict[str, str]:
        """As `EngineInfo.adapter_digests`; empty where it has none."""
        return {}

    async def load_adapter(self, name: str, path: str) -> None:
        """Load the adapter in the folder `path`, in place of one of that name, whose requests in flight end with it and
        whose KV blocks no other request gets. Raises SluiceError for one that cannot be used; nothing has changed
        then."""
        raise self._keeps_adapters()

    async def unload_adapter(self, name: str) -> None:
        """Remove an adapter. Requests in flight with it end as usual."""
        raise self._keeps_adapters()

    def _keeps_adapters(self) -> SluiceError:
        message = f"{self.title} has its LoRA adapters from its start on; give them with --lora-modules"
        return SluiceError(ErrorCode.UNIMPLEMENTED, message, param="lora_name")

    # -- sleep: giving memory back and taking it again

    def check_sleep(self, level: int, mode: SleepMode) -> None:
        """Raise SluiceError where it cannot fall asleep so, before any request suffers from it."""
        raise SluiceError(ErrorCode.UNIMPLEMENTED, f"{self.title} cannot sleep")

    async def sleep(self, level: int, mode: SleepMode) -> None:
        """Fall asleep; see `Sleep`. It gets no request until it is awake."""
        raise NotImplementedError

    async def wake_up(self, tags: list[str] | None) -> bool:
        """Take memory again; see `WakeUp`. Returns whether it is awake."""
        raise SluiceError(ErrorCode.UNIMPLEMENTED, f"{self.title} cannot sleep")

    # -- requests that engines hand over to each other (`EngineInfo.handover_fields`)

    def take_over(self, prepared: Any, handover: bytes) -> Any:
        """Return the result of `prepare` for a request whose prompt and first token another engine has computed: its
        response begins with that token. Where what was handed over is of no use, the request begins anew."""
        return prepared

    def handover_stats(self) -> HandoverStats | None:
        """Return what this engine has taken over; None for nothing."""
        return None


def internal_error() -> SluiceError:
    """Return the answer to a request that failed by no fault of its own; the log says why it failed."""
    return SluiceError(ErrorCode.INTERNAL, "the engine failed while it worked on this request")
