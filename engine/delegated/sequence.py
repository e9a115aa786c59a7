"""A request in the engine of a runtime that batches by itself: its values from the queue to its end."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from sluice.engine.blocks import BlockHash, blocks_for
from sluice.engine.config import EngineConfig
from sluice.engine.delegated.admission import BlockSharing
from sluice.engine.delegated.cached_prefixes import Owner
from sluice.engine.delegated.interface import (
    DelegatedRuntime,
    RequestHandle,
    ResponseDelta,
)
from sluice.engine.frames import Submit
from sluice.engine.scheduling.admission import check_reported_queue
from sluice.engine.sequence import QueuedSequence
from sluice.engine.statistics import EngineStats
from sluice.engine.types import EngineInfo, EventDetail, GenerateRequest
from sluice.engine.validation import check_adapter, check_lengths, check_request, num_tokens_after
from sluice.errors import ErrorCode, SluiceError, invalid, named
from sluice.log_relay import about

log = logging.getLogger(__name__)


class Rendered(NamedTuple):
    """A request whose prompt has the tokens of its images."""

    request: GenerateRequest
    prepare: Callable[[GenerateRequest], Any]
    submitted_at: float
    goes_on: bool = True
    """As in `ExpandedPrompt`."""


class DelegatedSequence(QueuedSequence):
    """A request: in our queue, then in flight in the runtime, then finished. Only executor and table change it."""

    __slots__ = (
        "aborted_at",
        "block_size",
        "handle",
        "has_images",
        "is_answered",
        "is_in_flight",
        "is_prompt_counted",
        "owner",
        "prepared",
        "prompt_hashes",
        "replay",
    )

    def __init__(
        self,
        stream_id: int,
        request: GenerateRequest,
        now: float,
        worst_case_blocks: int,
        prepared: Any,
        block_size: int,
        *,
        has_images: bool = False,
        prompt_hashes: Sequence[BlockHash] = (),
        owner: Owner | None = None,
        replay: "ReplayedOutput | None" = None,
    ) -> None:
        can_stop = bool(request.sampling.stop_token_ids) or not request.sampling.ignore_eos
        super().__init__(stream_id, request, now, worst_case_blocks, can_stop=can_stop)
        self.prepared = prepared
        """The result of `DelegatedRuntime.prepare`; None once it is handed over."""
        self.block_size = block_size
        self.is_in_flight = False
        """Whether it was handed to the runtime."""
        self.handle: RequestHandle | None = None
        """The request in the runtime, while responses may come."""
        self.is_prompt_counted = False
        """Whether the counters include its prompt."""
        self.is_answered = False
        """Whether its client has had its last event; later responses are dropped."""
        self.aborted_at: float | None = None
        self.has_images = has_images
        """Whether its prompt has images, so that the client does not know how long it is."""
        self.prompt_hashes = prompt_hashes
        """Hashes of the whole blocks of its prompt that it may share with others in the runtime."""
        self.owner = owner
        """The requests that can reuse the blocks of its prompt; None where its tokens do not say what is in them."""
        self.replay = replay
        """Set where output that was sent already is generated again."""

    @property
    def num_tokens_left(self) -> int:
        """Tokens still to run before the next one is sampled: 1 while it decodes."""
        return 1 if self.has_begun else self.num_tokens

    @property
    def has_begun(self) -> bool:
        """Whether its prompt is computed."""
        return self.num_output > len(self.request.resume_token_ids)

    @property
    def num_allocated_blocks(self) -> int:
        """An estimate of the blocks that it holds once its prompt is computed."""
        return blocks_for(self.num_prompt + self.num_output, self.block_size)


class ReplayedOutput:
    """Drops output that was sent already from what is generated again."""

    def __init__(self, sent: Sequence[int]) -> None:
        self._left = list(sent)

    def trim(self, delta: ResponseDelta) -> ResponseDelta:
        """Return the part of `delta` that was not sent. Raises SluiceError INTERNAL where the output differs."""
        num_sent = min(len(self._left), len(delta.token_ids))
        if delta.token_ids[:num_sent] != self._left[:num_sent]:
            message = "the answer could not be continued after a restart: generated again, it takes another turn"
            raise SluiceError(ErrorCode.INTERNAL, message)
        del self._left[:num_sent]
        detail = delta.detail
        if num_sent and detail is not None:
            logprobs = (detail.logprobs or [])[num_sent:] or None
            detail = msgspec.structs.replace(detail, logprobs=logprobs)
        is_empty = detail is None or detail == EventDetail()
        return ResponseDelta(delta.token_ids[num_sent:], delta.finish_reason, None if is_empty else detail)


def make_sequence(
    command: Submit, rendered: Rendered | None, runtime: DelegatedRuntime, info: EngineInfo, now: float
) -> DelegatedSequence:
    """Return the sequence of a request that was submitted `now`, or of one whose images were `rendered` meanwhile.
    Raises SluiceError for a request that cannot be served."""
    if rendered is None:
        check_request(command.request, info)
        rendered = Rendered(command.request, runtime.prepare, now)
    else:
        check_lengths(rendered.request, info)
        check_adapter(rendered.request.adapter, info)  # it may be gone by now
    request, prepare, submitted_at, goes_on = rendered
    num_blocks = runtime.worst_case_blocks(request)
    if num_blocks > info.num_blocks:  # it would wait for ever, and all behind it
        raise invalid(
            "max_tokens",
            f"the request needs up to {num_blocks} blocks of {info.block_size} tokens, but the whole KV cache has "
            f"{info.num_blocks}; lower {named('max_tokens')}",
        )
    is_replayed = bool(request.resume_token_ids) and (not goes_on or runtime.needs_replay(request))
    replay = ReplayedOutput(request.resume_token_ids) if is_replayed else None
    given = request if replay is None else msgspec.structs.replace(request, resume_token_ids=[])
    prepared, handover = prepare(given), b"" if command.source is None else command.source.handover
    if handover:
        prepared = runtime.take_over(prepared, handover)
    has_own_blocks = bool(command.request.images or handover)
    return DelegatedSequence(
        command.stream_id,
        request,
        submitted_at,
        num_blocks,
        prepared,
        info.block_size,
        has_images=bool(command.request.images),
        prompt_hashes=[] if has_own_blocks else _prompt_hashes(given, runtime, info),
        owner=None if command.request.images or given.computes_whole_prompt else _owner(given, runtime),
        replay=replay,
    )


def _owner(request: GenerateRequest, runtime: DelegatedRuntime) -> Owner:
    return Owner(request.cache_salt, request.adapter, runtime.adapter_digests.get(request.adapter, ""))


def _prompt_hashes(request: GenerateRequest, runtime: DelegatedRuntime, info: EngineInfo) -> list[BlockHash]:
    """Return the hashes of the blocks that the request may share: 10 ms for a prompt of 128,000 tokens. The last token
    is always computed, because sampling needs its logits; the pixels of images are in no hash of ours."""
    chain = None if runtime.sharing is BlockSharing.NONE else runtime.prompt_chain(request)
    if chain is None:
        return []
    token_ids = [*request.prompt_token_ids, *request.resume_token_ids]
    return chain.hashes(token_ids, (len(token_ids) - 1) // info.block_size)


class Renderings:
    """The requests whose images are being turned into tokens, before they can be queued. Used on the executor's
    loop."""

    def __init__(
        self,
        runtime: DelegatedRuntime,
        config: EngineConfig,
        clock: Callable[[], float],
        on_rendered: Callable[[Submit, Rendered | SluiceError], None],
    ) -> None:
        self._runtime = runtime
        self._config = config
        self._clock = clock
        self._on_rendered = on_rendered
        self.tasks: dict[int, asyncio.Task[None]] = {}
        """By stream id."""

    def start(self, command: Submit, info: EngineInfo, stats: EngineStats) -> None:
        """Raises SluiceError for a request that cannot be served, and where the queue is full already."""
        check_request(command.request, info)
        if not command.was_accepted:
            check_reported_queue(stats, info.max_num_seqs, self._config)
        self.tasks[command.stream_id] = asyncio.create_task(self._run(command, info, self._clock()))

    def cancel(self, stream_id: int) -> bool:
        """Forget a request. Returns whether there was one."""
        task = self.tasks.pop(stream_id, None)
        if task is not None:
            task.cancel()
        return task is not None

    async def _run(self, command: Submit, info: EngineInfo, submitted_at: float) -> None:
        outcome: Rendered | SluiceError
        try:
            expanded = await self._runtime.expand(command.request)
            request = _with_prompt(command.request, expanded.token_ids, info)
            outcome = Rendered(request, expanded.prepare, submitted_at, expanded.goes_on)
        except SluiceError as error:
            outcome = error
        except Exception:
            id_ = command.request.request_id
            log.exception("the images of request %s cannot be prepared", id_, extra=about(id_))
            outcome = SluiceError(ErrorCode.INTERNAL, "the engine failed to prepare these images; its log says why")
        del self.tasks[command.stream_id]
        self._on_rendered(command, outcome)


def _with_prompt(request: GenerateRequest, token_ids: list[int], info: EngineInfo) -> GenerateRequest:
    sampling = request.sampling
    if request.fits_context:
        max_tokens = min(sampling.max_tokens, num_tokens_after(len(token_ids), info))
        sampling = msgspec.structs.replace(sampling, max_tokens=max_tokens)
    return msgspec.structs.replace(request, prompt_token_ids=token_ids, sampling=sampling, images=[])
