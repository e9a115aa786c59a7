"""A server in simulated time: the real queue and forecast, steps that take a + b * tokens with noise."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from engine.forecast.wait import WaitForecast
from engine.scheduling.policies import find_policy
from engine.scheduling.queue import WaitingQueue
from engine.types import EngineInfo

BLOCK_SIZE = 32


def engine_info(max_num_seqs: int = 16, num_blocks: int = 4096, *, policy: str = "guaranteed_no_evict") -> EngineInfo:
    return EngineInfo(
        runtime="simulated",
        model_type="simulated",
        dtype="f32",
        vocab_size=1,
        eos_token_ids=(),
        max_model_len=4096,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=512,
        load_seconds=0.0,
        scheduler_policy=policy,
    )


@dataclass(slots=True, eq=False)
class Simulated:
    """A sequence that will end after `ends_at` output tokens."""

    stream_id: int
    num_prompt: int
    max_tokens: int
    ends_at: int
    tenant: str = ""
    priority: int = 0
    start_deadline: float = math.inf
    deadline: float = math.inf
    num_output: int = 0
    num_computed: int = 0
    submitted_at: float = 0.0
    predicted_s: float = 0.0
    waited_s: float = -1.0

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + self.num_output

    @property
    def num_tokens_left(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def worst_case_blocks(self) -> int:
        return -(-(self.num_prompt + self.max_tokens - 1) // BLOCK_SIZE)


@dataclass(frozen=True)
class Costs:
    """Costs of a step, in seconds."""

    step: float = 0.004
    token: float = 0.0001
    noise: float = 0.1


Source = Callable[[random.Random, int], Simulated]


class Server:
    """Queues requests and runs steps; `admitted` are all sequences that have started, in order."""

    def __init__(self, info: EngineInfo, rng: random.Random, costs: Costs | None = None) -> None:
        self.info = info
        self.queue: WaitingQueue[Simulated] = WaitingQueue({})
        self.forecast = WaitForecast(info)
        self.running: list[Simulated] = []
        self.admitted: list[Simulated] = []
        self.now = 0.0
        self._rng = rng
        self._costs = costs or Costs()

    @property
    def num_free_blocks(self) -> int:
        return self.info.num_blocks - sum(sequence.worst_case_blocks for sequence in self.running)

    def submit(self, sequence: Simulated) -> None:
        ahead = self.queue.work_ahead(sequence.priority, sequence.tenant)
        sequence.submitted_at = self.now
        sequence.predicted_s = self.forecast.wait_s(
            self.running, ahead, sequence.worst_case_blocks, self.num_free_blocks
        )
        self.queue.add(sequence)

    def step(self) -> None:
        self._admit()
        num_tokens = self._run()
        noise = self._rng.uniform(1.0 - self._costs.noise, 1.0 + self._costs.noise)
        seconds = (self._costs.step + self._costs.token * num_tokens) * noise
        self.forecast.observe_step(num_tokens, seconds)
        self.now += seconds
        self._end()

    def _admit(self) -> None:
        if self.running and not find_policy(self.info.scheduler_policy).is_in_flight:
            return
        free = self.num_free_blocks
        admitted: list[Simulated] = []
        for sequence in self.queue.in_order():
            free -= sequence.worst_case_blocks
            if free < 0 or len(self.running) + len(admitted) >= self.info.max_num_seqs:
                break
            admitted.append(sequence)
        for sequence in admitted:
            self.queue.admit(sequence)
            sequence.waited_s = self.now - sequence.submitted_at
        self.running += admitted
        self.admitted += admitted

    def _run(self) -> int:
        """Run decode first, then prompts within the rest. Returns the number of tokens."""
        left = self.info.max_num_batched_tokens
        for sequence in sorted(self.running, key=lambda sequence: sequence.num_tokens_left > 1):
            num_tokens = min(sequence.num_tokens_left, left)
            sequence.num_computed += num_tokens
            left -= num_tokens
            if sequence.num_tokens_left == 0:
                sequence.num_output += 1
                self.queue.charge(sequence, 1)
        return self.info.max_num_batched_tokens - left

    def _end(self) -> None:
        for sequence in [sequence for sequence in self.running if sequence.num_output >= sequence.ends_at]:
            self.running.remove(sequence)
            self.queue.remove(sequence.stream_id)
            self.forecast.observe_end(sequence.max_tokens, sequence.num_output)


def overload(server: Server, source: Source, rng: random.Random, *, rate: float, max_waiting: int, count: int) -> None:
    """Let `rate` requests a second arrive until `count` have started. They are dropped if `max_waiting` wait."""
    number, next_arrival = 0, 0.0
    while len(server.admitted) < count:
        while next_arrival <= server.now:
            if len(server.queue) < max_waiting:
                server.submit(source(rng, number))
                number += 1
            next_arrival += rng.expovariate(rate)
        if not server.running and not server.queue:
            server.now = next_arrival
            continue
        server.step()
