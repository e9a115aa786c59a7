"""Sequences as the waiting queue sees them, and queues of them."""

import math
from dataclasses import dataclass

from sluice.engine.scheduling.queue import WaitingQueue
from sluice.engine.types import GenerateRequest, SamplingParams

REQUEST = GenerateRequest(request_id="r", prompt_token_ids=[1], sampling=SamplingParams())
WEIGHTS = {"heavy": 2.0, "light": 0.5}


@dataclass(eq=False)
class View:
    """A sequence as the queue sees it."""

    stream_id: int
    tenant: str = "a"
    num_tokens: int = 10
    priority: int = 0
    max_tokens: int = 8
    worst_case_blocks: int = 1
    start_deadline: float = math.inf
    deadline: float = math.inf
    num_output: int = 0
    num_prompt: int = 10
    can_stop: bool = True
    predicted_wait_s: float = 0.0
    predicted_deviation_s: float = 0.0
    request: GenerateRequest = REQUEST


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
