"""One generation's mutable state. Only the executor changes it."""

import numpy as np

from engine.blocks import worst_case_blocks
from engine.runners.base import IntArray
from engine.sampling.state import SamplingState
from engine.types import FinishReason, GenerateRequest

NO_SLOT = -1


class Sequence:
    """A request on its way through the engine: waiting, then prefill, then decode, then gone."""

    __slots__ = (
        "max_tokens",
        "num_computed",
        "num_output",
        "num_prompt",
        "prompt_token_ids",
        "request_id",
        "sampling",
        "slot",
        "stop_token_ids",
        "stream_id",
        "token_ids",
        "worst_case_blocks",
    )

    def __init__(
        self, stream_id: int, request: GenerateRequest, eos_token_ids: tuple[int, ...], vocab_size: int, block_size: int
    ) -> None:
        params = request.sampling
        self.stream_id = stream_id
        self.request_id = request.request_id
        self.prompt_token_ids: IntArray = np.array(request.prompt_token_ids, np.int32)
        self.num_prompt = len(request.prompt_token_ids)
        self.max_tokens = params.max_tokens
        self.worst_case_blocks = worst_case_blocks(self.num_prompt, params.max_tokens, block_size)
        ends = params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *eos_token_ids)
        self.stop_token_ids = frozenset(ends)
        self.sampling = SamplingState(params, request.prompt_token_ids, self.stop_token_ids, vocab_size)
        self.slot = NO_SLOT
        self.num_computed = 0
        """Tokens whose K and V are in the blocks."""
        self.num_output = 0
        self.token_ids: list[int] = []
        """Output so far."""

    @property
    def num_prompt_left(self) -> int:
        """Prompt tokens still to prefill; 0 once decoding."""
        return max(self.num_prompt - self.num_computed, 0)

    @property
    def max_tokens_left(self) -> int:
        """Tokens, of prompt and output, that this sequence may still run through the model."""
        return self.num_prompt_left + self.max_tokens - self.num_output

    def next_prompt(self, num_tokens: int) -> IntArray:
        """The piece of the prompt to prefill next."""
        return self.prompt_token_ids[self.num_computed : self.num_computed + num_tokens]

    def append(self, token_id: int) -> FinishReason | None:
        """Take the sampled token; returns why the sequence ends with it, if it does."""
        self.token_ids.append(token_id)
        self.num_output += 1
        self.sampling.observe(token_id)
        if token_id in self.stop_token_ids:
            return FinishReason.STOP
        if self.num_output >= self.max_tokens:
            return FinishReason.LENGTH
        return None
