"""One generation's state on our side of TensorRT-LLM. Only the executor changes it."""

import math
from typing import Any

from engine.blocks import blocks_for
from engine.delegated.tensorrt_llm.loop.events import OutputReader
from engine.types import EngineInfo, GenerateRequest


class LlmSequence:
    """A request on its way: in our queue, then in TensorRT-LLM, then gone."""

    __slots__ = (
        "_block_size",
        "aborted_at",
        "call",
        "deadline",
        "is_inside",
        "is_prompt_counted",
        "is_told",
        "max_tokens",
        "num_charged",
        "num_output",
        "num_prompt",
        "num_tokens",
        "output",
        "predicted_wait_s",
        "priority",
        "reader",
        "request",
        "start_deadline",
        "stream_id",
        "submitted_at",
        "tenant",
        "worst_case_blocks",
    )

    def __init__(
        self, stream_id: int, request: GenerateRequest, info: EngineInfo, call: Any, now: float, predicted_wait_s: float
    ) -> None:
        """`call` is what `Llm.prepare` made of the request; `now` the engine's clock, in seconds."""
        params = request.sampling
        self.stream_id = stream_id
        self.request = request
        self.call = call
        self.tenant = request.tenant
        self.priority = request.priority
        self.submitted_at = now
        self.deadline = math.inf if request.timeout_s is None else now + request.timeout_s
        self.start_deadline = math.inf if request.queue_timeout_s is None else now + request.queue_timeout_s
        self.predicted_wait_s = predicted_wait_s
        self.num_prompt = len(request.prompt_token_ids)
        self.num_output = len(request.resume_token_ids)
        self.num_charged = self.num_output
        """Output tokens that its tenant's account knows of; what an engine before this one brought is not charged."""
        self.num_tokens = self.num_prompt + self.num_output
        """To compute before its first new one."""
        self.max_tokens = params.max_tokens
        self._block_size = info.block_size
        self.worst_case_blocks = blocks_to_completion(
            self.num_prompt, params.max_tokens, params.beam_width, info.block_size
        )
        self.reader = OutputReader(request, info)
        self.is_inside = False
        """Whether it was handed to TensorRT-LLM."""
        self.output: Any = None
        """TensorRT-LLM's RequestOutput, while something may come of it."""
        self.is_prompt_counted = False
        """Whether the counters have its prompt."""
        self.is_told = False
        """Whether its client has had its last event; what TensorRT-LLM still brings is for nobody."""
        self.aborted_at: float | None = None

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
        """About what it holds once its prompt is computed."""
        return blocks_for(self.num_prompt + self.num_output, self._block_size)


def blocks_to_completion(num_prompt: int, max_tokens: int, beam_width: int, block_size: int) -> int:
    """What TensorRT-LLM reserves for a request that has not begun, under GUARANTEED_NO_EVICT.

    Whole blocks of the prompt are shared by the beams. There is no credit for cached prefixes, and the last token
    counts, though it is never fed back: the rule is its `getRemainingBlocksToCompletion`.
    """
    shared = num_prompt // block_size
    return shared + (blocks_for(num_prompt + max_tokens, block_size) - shared) * beam_width
