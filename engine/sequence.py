"""One generation's mutable state. Only the executor changes it."""

import math

import numpy as np

from engine.blocks import BlockHash, HashChain, blocks_for, worst_case_blocks
from engine.runners.base import IntArray
from engine.sampling.state import Constraint, SamplingState
from engine.types import EngineInfo, FinishReason, GenerateRequest, TokenLogprob

NO_SLOT = -1


class Sequence:
    """A request on its way through the engine: waiting, then prefill, then decode, then gone.

    Its context are prompt and output. A paused sequence has nothing computed any more; its whole context is
    prefilled again.
    """

    __slots__ = (
        "_block_size",
        "_chain",
        "deadline",
        "drafts",
        "fresh_logprobs",
        "fresh_token_ids",
        "has_sampling",
        "is_announced",
        "last_token_id",
        "max_tokens",
        "num_cached_tokens",
        "num_charged",
        "num_computed",
        "num_held_blocks",
        "num_indexed_blocks",
        "num_lost",
        "num_output",
        "num_prompt",
        "num_tokens",
        "predicted_wait_s",
        "priority",
        "prompt_logprobs",
        "request",
        "sampling",
        "slot",
        "start_deadline",
        "stop_token_ids",
        "stream_id",
        "submitted_at",
        "tenant",
        "token_ids",
        "was_paused",
        "worst_case_blocks",
    )

    def __init__(self, stream_id: int, request: GenerateRequest, info: EngineInfo, now: float) -> None:
        """`now` is the engine's clock, in seconds, at which the request came."""
        params = request.sampling
        self.stream_id = stream_id
        self.request = request
        self.tenant = request.tenant
        self.priority = request.priority
        self.submitted_at = now
        self.deadline = math.inf if request.timeout_s is None else now + request.timeout_s
        self.start_deadline = math.inf if request.queue_timeout_s is None else now + request.queue_timeout_s
        self.predicted_wait_s = 0.0
        self.token_ids = request.prompt_token_ids + request.resume_token_ids
        """The context, [num_tokens]; it only grows. A list, as appending to one is an order faster than to an array."""
        self._block_size = info.block_size
        self._chain = HashChain(request.cache_salt, info.block_size)
        self.num_prompt = len(request.prompt_token_ids)
        self.num_output = len(request.resume_token_ids)
        self.num_charged = self.num_output
        """Output tokens that its tenant's account knows of; what an engine before this one brought is not charged."""
        self.num_tokens = len(self.token_ids)
        """Of the context."""
        self.last_token_id = self.token_ids[-1]
        self.max_tokens = params.max_tokens
        self.worst_case_blocks = worst_case_blocks(self.num_prompt, params.max_tokens, info.block_size)
        ends = params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *info.eos_token_ids)
        self.stop_token_ids = frozenset(ends)
        self.slot = NO_SLOT
        self.num_held_blocks = 0
        self.num_indexed_blocks = 0
        """Full blocks at the beginning that were offered to the prefix index."""
        self.num_computed = 0
        """Tokens whose K and V are in the blocks."""
        self.num_lost = 0
        """Tokens that were computed when it was paused."""
        self.was_paused = False
        self.num_cached_tokens = 0
        """Prompt tokens that it found in the cache when it first started."""
        self.drafts: list[int] = []
        """What its next tokens may be; a step checks them all at once."""
        self.fresh_token_ids: list[int] = []
        self.fresh_logprobs: list[TokenLogprob] = []
        """What it got since the last event."""
        self.prompt_logprobs: list[TokenLogprob | None] = []
        self.is_announced = False
        """Whether its first event is out."""
        self.has_sampling = False
        self.sampling: SamplingState

    def open_sampling(self, vocab_size: int, constraint: Constraint | None) -> None:
        """Make what sampling remembers; `constraint` is what the output must keep to."""
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
        """Tokens of the context still to run before the next one is sampled: 1 while it decodes."""
        return self.num_tokens - self.num_computed

    def most_at_once(self, num_tokens_left: int) -> int:
        """How many of its last `num_tokens_left` context tokens may run in one step.

        Output of an engine that is gone is run one token a step, as it was then: in bf16 a prefill rounds keys and
        values differently, and the text would take another turn.
        """
        num_replayed = 0 if self.was_paused else len(self.request.resume_token_ids)
        return max(num_tokens_left - num_replayed, 1)

    @property
    def num_prompt_left(self) -> int:
        """Prompt tokens still to prefill; 0 once decoding."""
        return max(self.num_prompt - self.num_computed, 0)

    @property
    def num_drafts(self) -> int:
        return len(self.drafts)

    @property
    def num_next_blocks(self) -> int:
        """Blocks beyond those held that it needs to sample its next token, drafts included."""
        return blocks_for(self.num_tokens + len(self.drafts), self._block_size) - self.num_held_blocks

    @property
    def max_drafts(self) -> int:
        """Most draft tokens that make sense: the last output token is never fed back."""
        return self.max_tokens - self.num_output - 1

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether rows of the prompt are wanted, which only computing it brings. After a resume they are known."""
        return self.request.sampling.prompt_logprobs is not None and not self.request.resume_token_ids

    def block_hashes(self, num_blocks: int) -> list[BlockHash]:
        """Names of the first `num_blocks` blocks, which must be full."""
        return self._chain.of(self.token_ids, num_blocks)

    def next_tokens(self, num_tokens: int) -> IntArray:
        """The piece of the context to run next."""
        return np.array(self.token_ids[self.num_computed : self.num_computed + num_tokens], np.int32)

    def append(self, token_id: int, logprob: TokenLogprob | None = None) -> FinishReason | None:
        """Take the sampled token; returns why the sequence ends with it, if it does."""
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
