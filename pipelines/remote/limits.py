"""How long a request to the API may take."""

import asyncio
from dataclasses import dataclass

from pipelines.llm.asked import seconds_of
from pipelines.llm.services import RequestLimits
from pipelines.remote.options import DEFAULT_TIMEOUT_S, RemoteOptions
from serving.request import InferRequest


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Times of the event loop: until when a place must be free, and until when the answer must be there."""

    start: float
    end: float


def deadlines_of(
    request: InferRequest, options: RemoteOptions, limits: RequestLimits, waited_s: float = 0.0
) -> Deadlines:
    """What the request says comes before the model's configuration, and that before the server's limits.

    `waited_s` is how long ago the request came. Raises SluiceError INVALID for what is no duration.
    """
    came = asyncio.get_running_loop().time() - waited_s
    asked_s = seconds_of("timeout", request.timeout_us)
    end = came + (asked_s or options.timeout_s or limits.timeout_s or DEFAULT_TIMEOUT_S)
    waits = request.queue_timeout_us or request.parameters.get("queue_timeout", 0)
    waits_s = seconds_of("queue_timeout", waits) or limits.queue_timeout_s
    return Deadlines(end if waits_s is None else min(end, came + waits_s), end)
