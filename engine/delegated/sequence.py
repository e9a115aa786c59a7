"""One generation's state on our side of a delegated runtime. Only the executor changes it."""

import math
from typing import Any

from engine.blocks import blocks_for
from engine.delegated.interface import RequestHandle
from engine.types import GenerateRequest


class DelegatedSequence:
    """A request on its way: in our queue, then in flight in the runtime, then finished."""

    __slots__ = (
        "_block_size",
        "aborted_at",
        "deadline",
        "handle",
        "is_answered",
        "is_in_flight",
        "is_prompt_counted",
        "max_tokens",
        "num_charged",
        "num_output",
        "num_prompt",
        "num_tokens",
        "predicted_wait_s",
        "prepared",
        "priority",
        "request",
        "start_deadline",
        "stream_id",
        "submitted_at",
        "tenant",
        "worst_case_blocks",
    )

    def __init__(
        self,
        stream_id: int,
        request: GenerateRequest,
        prepared: Any,
        *,
        worst_case_blocks: int,
        block_size: int,
        now: float,
        predicted_wait_s: float,
    ) -> None:
        """`prepared` is what `DelegatedRuntime.prepare` returned; `now` the engine's clock, in seconds."""
        self.stream_id = stream_id
        self.request = request
        self.prepared = prepared
        self.worst_case_blocks = worst_case_blocks
        self.tenant = request.tenant
        self.priority = request.priority
        self.submitted_at = now
        self.deadline = math.inf if request.timeout_s is None else now + request.timeout_s
        self.start_deadline = math.inf if request.queue_timeout_s is None else now + request.queue_timeout_s
        self.predicted_wait_s = predicted_wait_s
        self.num_prompt = len(request.prompt_token_ids)
        self.num_output = len(request.resume_token_ids)
        self.num_charged = self.num_output
        """Output tokens charged to the tenant. Those that an engine before this one generated are not charged."""
        self.num_tokens = self.num_prompt + self.num_output
        """Tokens to compute before the first new one."""
        self.max_tokens = request.sampling.max_tokens
        self._block_size = block_size
        self.is_in_flight = False
        """Whether it was handed to the runtime."""
        self.handle: RequestHandle | None = None
        """The request in the runtime, while responses may come."""
        self.is_prompt_counted = False
        """Whether the counters include its prompt."""
        self.is_answered = False
        """Whether its client has had its last event; later responses are dropped."""
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
    def num_held_blocks(self) -> int:
        """An estimate of the blocks that it holds once its prompt is computed."""
        return blocks_for(self.num_prompt + self.num_output, self._block_size)
