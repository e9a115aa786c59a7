"""An engine process that emits tokens without computing: a stand-in for `sluice.engine.process` that speaks its frames.

Every running request gets one token a step. The seed of the latest request says how many tokens a second all get
together, and the environment which cores this process may use.
"""

import os
import sys
import time

from sluice.engine.config import EngineConfig
from sluice.engine.frames import Cancel, Ready, Shutdown, StepFrame, Submit
from sluice.engine.process.bootstrap import bootstrap
from sluice.engine.process.transport import Transport
from sluice.engine.runtimes import BUNDLED
from sluice.engine.statistics import EngineStats
from sluice.engine.types import EngineInfo, EventDetail, FinishReason, TokenEvent

CORES_VARIABLE = "BENCH_ENGINE_CORES"
TOKEN = 99
"""The token that it emits: `~` in the bundled model's vocabulary."""
HEARTBEAT_S = 0.25
LONGEST_NAP_S = 0.005
"""Seconds that commands may wait. Waits below a millisecond would be busy ones."""


class TokenSource:
    """The running requests, by stream id, with the number of tokens that each still gets."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._tokens_per_second = 1.0
        self._left: dict[int, int] = {}
        self._new: set[int] = set()
        self._cancelled: list[TokenEvent] = []
        self._num_steps = self._num_tokens = self._num_prompt_tokens = 0
        self._due = 0.0
        self._is_ended = False

    def run(self) -> None:
        """Serve until a Shutdown command."""
        while not self._is_ended:
            self._receive(0.0 if self._left else HEARTBEAT_S)
            wait_s = self._due - time.perf_counter()
            if self._left and wait_s > 0:
                time.sleep(min(wait_s, LONGEST_NAP_S))
            else:
                self._step()

    def _receive(self, timeout_s: float) -> None:
        for command in self._transport.receive(timeout_s):
            match command:
                case Submit(stream_id, request):
                    self._left[stream_id] = request.sampling.max_tokens
                    self._tokens_per_second = float(request.sampling.seed or 1)
                    self._new.add(stream_id)
                    self._num_prompt_tokens += len(request.prompt_token_ids)
                case Cancel(stream_id):
                    if self._left.pop(stream_id, None) is not None:
                        self._cancelled.append(TokenEvent(stream_id, [], FinishReason.CANCELLED))
                case Shutdown():
                    self._is_ended = True

    def _step(self) -> None:
        now = time.perf_counter()
        # A late step is not made up for, so that the offered rate is never above what was asked for.
        self._due = max(self._due + len(self._left) / self._tokens_per_second, now)
        events = [self._event(stream_id, left) for stream_id, left in self._left.items()]
        self._left = {stream_id: left - 1 for stream_id, left in self._left.items() if left > 1}
        self._num_steps += 1
        self._num_tokens += len(events)
        self._transport.emit(StepFrame([*events, *self._cancelled], [], self._stats()))
        self._new.clear()
        self._cancelled.clear()

    def _event(self, stream_id: int, left: int) -> TokenEvent:
        reason = FinishReason.LENGTH if left == 1 else None
        return TokenEvent(stream_id, [TOKEN], reason, EventDetail(0) if stream_id in self._new else None)

    def _stats(self) -> EngineStats:
        num_running = len(self._left)
        totals = (self._num_steps, 0.0, 0.0, self._num_prompt_tokens, self._num_tokens)
        return EngineStats(num_running, 0, num_running, 1 << 20, num_running, *totals)


def info(config: EngineConfig) -> EngineInfo:
    """Describe this engine with room for every stream of a benchmark."""
    return EngineInfo(
        runtime=BUNDLED.runtime,
        model_type="none",
        dtype="none",
        vocab_size=4096,
        eos_token_ids=(),
        max_model_len=131_072,
        block_size=32,
        num_blocks=1 << 20,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        load_seconds=0.0,
    )


def main(argv: list[str]) -> int:
    """Serve until a Shutdown command or the gateway's end. Returns the exit code."""
    cores = os.environ[CORES_VARIABLE]  # noqa: TID251 - set by the benchmark that starts the gateway
    os.sched_setaffinity(0, map(int, cores.split(",")))
    with bootstrap(argv) as (config, transport):
        transport.send_all(Ready(info(config)))
        TokenSource(transport).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
