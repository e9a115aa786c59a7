"""Sequences as the waiting queue sees them, and queues of them."""

import math

from sluice.engine.scheduling.queue import WaitingQueue
from sluice.engine.sequence import QueuedSequence
from sluice.engine.types import GenerateRequest, SamplingParams

REQUEST = GenerateRequest(request_id="r", prompt_token_ids=[1], sampling=SamplingParams())
WEIGHTS = {"heavy": 2.0, "light": 0.5}


class View(QueuedSequence):
    """A sequence as the queue sees it."""

    def __init__(
        self,
        stream_id: int,
        tenant: str = "a",
        num_tokens: int = 10,
        priority: int = 0,
        *,
        worst_case_blocks: int = 1,
        start_deadline: float = math.inf,
        deadline: float = math.inf,
        request: GenerateRequest = REQUEST,
    ) -> None:
        super().__init__(stream_id, request, 0.0, worst_case_blocks, can_stop=True)
        self.tenant, self.priority = tenant, priority
        self.num_prompt = self.num_tokens = num_tokens
        self.max_tokens = 8
        self.start_deadline, self.deadline = start_deadline, deadline


def queue_of(*views: View) -> WaitingQueue[View]:
    queue: WaitingQueue[View] = WaitingQueue(WEIGHTS)
    for view in views:
        queue.add(view)
    return queue


def order(queue: WaitingQueue[View]) -> list[int]:
    return [view.stream_id for view in queue.in_order()]


def admit_next(queue: WaitingQueue[View]) -> View:
    view = next(queue.in_order())
    queue.admit(view)
    return view
