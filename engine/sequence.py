"""The mutable state of one generation, which its executor alone changes: as the queue, the forecast of waits and
admission see it, whichever runtime computes it (`QueuedSequence`), and as our executor has it (`Sequence`)."""

import math
from dataclasses import dataclass

import numpy as np

from sluice.engine.arrays import IntArray
from sluice.engine.blocks import BlockHash, HashChain, PromptOrigin, blocks_for, worst_case_blocks
from sluice.engine.sampling.state import Constraint, SamplingState, is_simple
from sluice.engine.types import EngineInfo, Eviction, FinishReason, GenerateRequest, SequenceTiming, TokenLogprob


@dataclass(slots=True, eq=False)
class RequestSize:
    """The numbers that tell how much a sequence computes, and how long its output may become."""

    tenant: str
    num_prompt: int
    num_output: int
    num_tokens: int
    """Length of the context: the tokens to compute before the first new one."""
    max_tokens: int
    worst_case_blocks: int
    can_stop: bool
    """Whether a token may end it before `max_tokens`."""

    def copy(self) -> "RequestSize":
        """Return the size as it is now."""
        length = self.num_prompt, self.num_output, self.num_tokens
        return RequestSize(self.tenant, *length, self.max_tokens, self.worst_case_blocks, self.can_stop)


class QueuedSequence(RequestSize):
    """The mutable state of one generation, as far as every runtime has it."""

    __slots__ = (
        "deadline",
        "num_charged",
        "predicted_deviation_s",
        "predicted_wait_s",
        "priority",
        "queue_s",
        "request",
        "start_deadline",
        "stream_id",
        "submitted_at",
    )

    def __init__(
        self, stream_id: int, request: GenerateRequest, now: float, worst_case_blocks: int, *, can_stop: bool
    ) -> None:
        """`now` is the engine's clock in seconds at the submit."""
        num_prompt, num_output = len(request.prompt_token_ids), len(request.resume_token_ids)
        num_tokens, max_tokens = num_prompt + num_output, request.sampling.max_tokens
        super().__init__(request.tenant, num_prompt, num_output, num_tokens, max_tokens, worst_case_blocks, can_stop)
        self.stream_id = stream_id
        self.request = request
        self.priority = request.priority
        self.submitted_at = now
        self.deadline = math.inf if request.timeout_s is None else now + request.timeout_s
        self.start_deadline = math.inf if request.queue_timeout_s is None else now + request.queue_timeout_s
        """The time by which it must be admitted."""
        self.predicted_wait_s = self.predicted_deviation_s = 0.0
        """The prediction at its submit."""
        self.queue_s = 0.0
        """The wait for its first admission."""
        self.num_charged = num_output
        """Output tokens charged to the tenant so far. Output of an earlier engine is not charged."""

    @property
    def num_tokens_left(self) -> int:
        """Tokens of its context to compute before the next one is sampled: 1 during decode."""
        raise NotImplementedError


NO_ROW = -1
_MAX_MARKS = 64
"""Most chunks, and most pauses, that wait for the next event. Later ones are left out."""


class TimingMarks:
    """When a sequence's chunks were computed and when it was paused, for its next timing. Times are the engine's."""

    __slots__ = ("_paused_at", "chunks", "pauses")

    def __init__(self) -> None:
        self.chunks: list[tuple[float, float, int]] = []
        self.pauses: list[tuple[float, float]] = []
        self._paused_at = 0.0

    def add_chunk(self, started: float, ended: float, num_tokens: int) -> None:
        """Note that `num_tokens` of the context were computed."""
        if len(self.chunks) < _MAX_MARKS:
            self.chunks.append((started, ended, num_tokens))

    def pause(self, now: float) -> None:
        """Note a preemption."""
        self._paused_at = now

    def resume(self, now: float) -> None:
        """Note the admission after it."""
        if len(self.pauses) < _MAX_MARKS:
            self.pauses.append((self._paused_at, now))

    def take(self, submitted_at: float, queue_s: float, now: float) -> SequenceTiming:
        """Return what was noted since the last timing, in seconds since the submit."""
        chunks = [(start - submitted_at, end - submitted_at, count) for start, end, count in self.chunks]
        pauses = [(start - submitted_at, end - submitted_at) for start, end in self.pauses]
        self.chunks, self.pauses = [], []
        return SequenceTiming(now - submitted_at, queue_s, chunks, pauses)


class Sequence(QueuedSequence):
    """A request on its way through the engine: waiting, prefill, decode, finished. Its context is the prompt and the
    output so far. A preempted sequence has lost what was computed; its whole context is prefilled again."""

    __slots__ = (
        "_block_size",
        "_chain",
        "adapter",
        "context_logits",
        "drafts",
        "evicted",
        "fresh_logits",
        "fresh_logprobs",
        "fresh_token_ids",
        "has_details",
        "has_emitted",
        "has_sampling",
        "is_returning",
        "last_token_id",
        "may_return",
        "needs_host",
        "num_accepted",
        "num_allocated_blocks",
        "num_cached_tokens",
        "num_computed",
        "num_discarded",
        "num_drafted",
        "num_indexed_blocks",
        "num_pending",
        "num_replayed",
        "origin",
        "prompt_logprobs",
        "return_deadline",
        "sampling",
        "stop_token_ids",
        "table_row",
        "timing",
        "token_ids",
        "was_preempted",
    )

    def __init__(
        self,
        stream_id: int,
        request: GenerateRequest,
        info: EngineInfo,
        now: float,
        adapter: int = 0,
        adapter_digest: str = "",
        *,
        max_replayed_tokens: float = math.inf,
    ) -> None:
        """`now` is the engine's clock in seconds at the submit, `adapter` the runner's number of the adapter,
        `adapter_digest` what keeps its KV blocks apart. Output of an earlier engine is computed one token a step, up to
        `max_replayed_tokens`."""
        params = request.sampling
        ends = params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *info.eos_token_ids)
        blocks = worst_case_blocks(len(request.prompt_token_ids), params.max_tokens, info.block_size)
        super().__init__(stream_id, request, now, blocks, can_stop=bool(ends))
        self.token_ids = request.prompt_token_ids + request.resume_token_ids
        """The context, [num_tokens]; it only grows. Appending to a list is ten times faster than to an array."""
        self._block_size = info.block_size
        self._chain = HashChain(request.cache_salt, info.block_size, adapter_digest)
        self.adapter = adapter
        self.num_replayed = self.num_output if self.num_output <= max_replayed_tokens else 0
        """Output of an earlier engine that is computed as it was there."""
        self.last_token_id = self.token_ids[-1]
        """The last token of its context. While a step under way gives it one, this names the row: see `expect`."""
        self.num_pending = 0
        """1 while a step under way gives it a token that is fed back; 0 too where that is the last of its output."""
        self.stop_token_ids = frozenset(ends)
        self.table_row = NO_ROW
        """Row of its block table in `BlockTables`; NO_ROW while it does not run."""
        self.num_allocated_blocks = 0
        self.num_indexed_blocks = 0
        """Full blocks at the beginning that were added to the prefix index."""
        self.num_computed = 0
        """Tokens whose K and V are in the blocks."""
        self.num_discarded = 0
        """Tokens that were computed when it was last preempted."""
        self.was_preempted = False
        self.num_cached_tokens = 0
        """Prompt tokens found in the prefix cache when it first started."""
        self.evicted: Eviction | None = None
        """The eviction of the block after those, where it is known."""
        self.is_returning = False
        """Whether it waits for blocks of its prefix that come back from a KV tier."""
        self.origin: PromptOrigin | None = None
        """The engine that has computed its prompt."""
        self.may_return = True
        """Whether its prefix may still be looked for in the tiers."""
        self.return_deadline = math.inf
        """When to compute what has not come back; infinite while nothing is awaited."""
        self.drafts: list[int] = []
        """Draft tokens for the next step, which checks them all at once."""
        self.fresh_token_ids: list[int] = []
        self.fresh_logprobs: list[TokenLogprob] = []
        """Log probabilities since the last event, as `fresh_token_ids` are the tokens since then."""
        self.prompt_logprobs: list[TokenLogprob | None] = []
        self.context_logits: list[bytes] = []
        self.fresh_logits: list[bytes] = []
        """Logits of the prompt's tokens, and of the tokens since the last event; only where the request asks."""
        self.timing = TimingMarks() if request.returns_timing else None
        self.num_drafted = self.num_accepted = 0
        self.has_details = request.returns_metrics or request.returns_generation_logits
        """Whether all its events carry more than tokens and what sampling reports of them."""
        self.needs_host = not is_simple(params) or request.returns_generation_logits or self.needs_prompt_logits
        """Whether the device alone cannot choose its tokens: the host edits its logits, or reads them."""
        self.has_emitted = False
        """Whether its first event was sent."""
        self.has_sampling = False
        self.sampling: SamplingState

    def start_sampling(self, vocab_size: int, constraint: Constraint | None) -> None:
        """Create the sampling state; `constraint` restricts the output."""
        request = self.request
        self.has_sampling = True
        self.sampling = SamplingState(
            request.sampling,
            request.prompt_token_ids,
            self.stop_token_ids,
            vocab_size,
            request.resume_token_ids,
            constraint,
        )

    @property
    def num_tokens_left(self) -> int:
        """Tokens of the context to compute before the next one is sampled: 1 during decode; 0 while a step under way
        gives the last one of its output."""
        return self.num_tokens - self.num_computed or self.num_pending

    def max_step_tokens(self, num_tokens_left: int) -> int:
        """Return how many of its last `num_tokens_left` context tokens may run in one step. Output that an earlier
        engine decoded is computed one token a step again, unless it is long: in bf16 a prefill rounds keys and values
        differently, and the text would continue differently."""
        num_replayed = 0 if self.was_preempted else self.num_replayed
        return max(num_tokens_left - num_replayed, 1)

    @property
    def num_drafts(self) -> int:
        return len(self.drafts)

    @property
    def num_next_blocks(self) -> int:
        """Blocks beyond the allocated ones that it needs to sample its next token, drafts included."""
        needed = blocks_for(self.num_tokens + self.num_pending + len(self.drafts), self._block_size)
        return max(needed - self.num_allocated_blocks, 0)  # a draft model may have allocated for drafts it did not make

    @property
    def max_drafts(self) -> int:
        """Most draft tokens that are of use: the last output token is never fed back."""
        return self.max_tokens - self.num_output - 1

    @property
    def needs_prompt_logits(self) -> bool:
        """Whether the whole prompt must be computed, for its logits. After a resume what they are for was sent."""
        request = self.request
        is_wanted = request.sampling.prompt_logprobs is not None or request.returns_context_logits
        return is_wanted and not request.resume_token_ids

    def block_hashes(self, num_blocks: int) -> list[BlockHash]:
        """Return the hashes of the first `num_blocks` blocks, which must be full."""
        return self._chain.hashes(self.token_ids, num_blocks)

    def next_tokens(self, num_tokens: int) -> IntArray:
        """Return the next `num_tokens` tokens of the context to compute."""
        return np.array(self.token_ids[self.num_computed : self.num_computed + num_tokens], np.int32)

    def expect(self, row: int) -> None:
        """Note that the step under way gives it the token of that row."""
        self.last_token_id = -1 - row
        self.num_pending = int(self.num_output + 1 < self.max_tokens)

    def append(self, token_id: int, logprob: TokenLogprob | None = None) -> FinishReason | None:
        """Append the sampled token. Returns the finish reason if the sequence ends with it."""
        self.token_ids.append(token_id)
        self.last_token_id = token_id
        self.num_tokens += 1
        self.num_output += 1
        self.fresh_token_ids.append(token_id)
        if logprob is not None:
            self.fresh_logprobs.append(logprob)
        if not self.sampling.is_plain:
            self.sampling.observe(token_id)
        if token_id in self.stop_token_ids:
            return FinishReason.STOP
        if self.num_output >= self.max_tokens:
            return FinishReason.LENGTH
        return None
