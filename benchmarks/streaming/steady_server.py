"""`sluice serve` with an engine that computes nothing and takes its time: the first token of a request comes FIRST_S
after its submission, each later one STEP_S after the one before. What a client measures is known beforehand.

The gateway is the product's, as it is.
"""

import heapq
import sys
import time

from benchmarks.streaming.engine import TOKEN, info
from sluice.cli.__main__ import main as sluice
from sluice.engine.frames import Cancel, Ready, Shutdown, StepFrame, Submit
from sluice.engine.process.bootstrap import bootstrap
from sluice.engine.process.transport import Transport
from sluice.engine.runtimes import BUNDLED
from sluice.engine.statistics import EngineStats
from sluice.engine.types import EventDetail, FinishReason, TokenEvent

FIRST_S, STEP_S = 0.1, 0.02
MODULE = "benchmarks.streaming.steady_server"
_HEARTBEAT_S = 0.25


class SteadySource:
    """Emits tokens when they are due, however many requests there are."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._due: list[tuple[float, int]] = []
        self._left: dict[int, int] = {}
        self._new: set[int] = set()
        self._num_steps = self._num_tokens = self._num_prompt_tokens = 0

    def run(self) -> None:
        """Serve until a Shutdown command."""
        while True:
            wait_s = self._due[0][0] - time.perf_counter() if self._due else _HEARTBEAT_S
            if wait_s <= 0.0:
                self._step(time.perf_counter())
                continue
            commands = self._transport.receive(wait_s)
            if not commands and not self._due:
                self._emit([])  # a sign of life
            for command in commands:
                match command:
                    case Submit(stream_id, request):
                        self._left[stream_id] = request.sampling.max_tokens
                        self._new.add(stream_id)
                        self._num_prompt_tokens += len(request.prompt_token_ids)
                        heapq.heappush(self._due, (time.perf_counter() + FIRST_S, stream_id))
                    case Cancel(stream_id):
                        if self._left.pop(stream_id, None) is not None:
                            self._emit([TokenEvent(stream_id, [], FinishReason.CANCELLED)])
                    case Shutdown():
                        return

    def _step(self, now: float) -> None:
        events = []
        while self._due and self._due[0][0] <= now:
            due_s, stream_id = heapq.heappop(self._due)
            if stream_id not in self._left:  # cancelled
                continue
            self._left[stream_id] -= 1
            is_last = not self._left[stream_id]
            detail = EventDetail(0) if stream_id in self._new else None
            self._new.discard(stream_id)
            events.append(TokenEvent(stream_id, [TOKEN], FinishReason.LENGTH if is_last else None, detail))
            if is_last:
                del self._left[stream_id]
            else:
                heapq.heappush(self._due, (due_s + STEP_S, stream_id))
        self._num_steps += 1
        self._num_tokens += len(events)
        self._emit(events)

    def _emit(self, events: list[TokenEvent]) -> None:
        num_running = len(self._left)
        totals = (self._num_steps, 0.0, 0.0, self._num_prompt_tokens, self._num_tokens)
        stats = EngineStats(num_running, 0, num_running, 1 << 20, num_running, *totals)
        self._transport.emit(StepFrame(events, [], stats))


def engine(argv: list[str]) -> int:
    """Serve until a Shutdown command or the gateway's end. Returns the exit code."""
    with bootstrap(argv) as (config, transport):
        transport.send_all(Ready(info(config)))
        SteadySource(transport).run()
    return 0


def main() -> int:
    """Be the server, or the engine that it starts from the same file."""
    if sys.argv[1:2] != ["serve"]:
        return engine(sys.argv[1:])
    object.__setattr__(BUNDLED, "process", MODULE)
    return sluice()


if __name__ == "__main__":
    sys.exit(main())
