"""A sequence as the queue, the forecast of waits and admission see it, whichever runtime computes it."""

import math
from dataclasses import dataclass

from sluice.engine.types import GenerateRequest


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
