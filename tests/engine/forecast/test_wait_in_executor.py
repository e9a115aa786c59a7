"""The accuracy of predictions in the real executor, under each policy, with steps of known duration."""

import random
import statistics
from collections import deque

import numpy as np
import pytest

from engine.config import EngineConfig, SchedulerPolicy
from engine.frames import Command, StepFrame, Submit
from engine.loop.executor import InflightExecutor
from engine.runners.base import FloatArray, RunnerInfo, StepBatch
from engine.types import GenerateRequest, SamplingParams

NUM_WARM_UP, NUM_JUDGED, RATE = 80, 120, 100.0
VOCABULARY, STOP_EVERY = 512, 64


class TimedRunner:
    """All tokens are equally likely; a step takes 4 ms and 0.1 ms a token by its own clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.info = RunnerInfo(
            runtime="timed",
            model_type="timed",
            dtype="f32",
            vocab_size=VOCABULARY,
            eos_token_ids=(),
            max_model_len=512,
            block_size=32,
            num_blocks=32,
        )

    def run(self, batch: StepBatch) -> FloatArray:
        self.now += 0.004 + 0.0001 * len(batch.token_ids)
        return np.zeros((len(batch.sampled_rows), VOCABULARY), np.float32)

    def close(self) -> None:
        """Do nothing."""


class Arrivals:
    """A source of commands that submits requests at scheduled times."""

    def __init__(self, runner: TimedRunner) -> None:
        self._runner = runner
        self._due: deque[tuple[float, Command]] = deque()

    def schedule(self, numbers: range, rate: float, rng: random.Random) -> None:
        """Schedule requests at `rate` a second from now on."""
        at_s = self._runner.now
        for number in numbers:
            at_s += rng.expovariate(rate)
            self._due.append((at_s, Submit(number, _request(rng, number))))

    def receive(self, timeout_s: float) -> list[Command]:
        if timeout_s > 0 and self._due:
            self._runner.now = max(self._runner.now, self._due[0][0])
        commands: list[Command] = []
        while self._due and self._due[0][0] <= self._runner.now:
            commands.append(self._due.popleft()[1])
        return commands


def _request(rng: random.Random, number: int) -> GenerateRequest:
    """Make a request that ends by a stop token after 64 tokens on average."""
    stops = tuple(range(number % STOP_EVERY, VOCABULARY, STOP_EVERY))
    params = SamplingParams(max_tokens=192, temperature=1.0, seed=number, stop_token_ids=stops)
    prompt = rng.choices(range(VOCABULARY), k=rng.randint(16, 64))
    return GenerateRequest(request_id=str(number), prompt_token_ids=prompt, sampling=params)


@pytest.mark.parametrize("policy", SchedulerPolicy)
def test_half_the_predictions_are_within_a_quarter(policy: SchedulerPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, num_ended, waits = TimedRunner(), 0, list[tuple[float, float]]()
    config = EngineConfig(model_path="", max_num_seqs=32, scheduler_policy=policy, enable_prefix_caching=False)

    def take(frame: StepFrame) -> None:
        nonlocal num_ended
        assert not frame.failures
        num_ended += sum(event.finish_reason is not None for event in frame.events)

    arrivals, rng = Arrivals(runner), random.Random(1)
    executor = InflightExecutor(runner, config, arrivals, take, clock=lambda: runner.now)
    arrivals.schedule(range(NUM_WARM_UP), RATE, rng)
    while num_ended < NUM_WARM_UP:
        executor.step()
    monkeypatch.setattr(executor._intake.forecast, "record_wait", lambda *wait: waits.append(wait))
    arrivals.schedule(range(NUM_WARM_UP, NUM_WARM_UP + NUM_JUDGED), RATE, rng)
    while num_ended < NUM_WARM_UP + NUM_JUDGED:
        executor.step()
    errors = [abs(predicted - actual) / actual for predicted, actual in waits if actual >= 0.05]
    assert len(errors) > 0.8 * NUM_JUDGED, "it was no overload"
    assert statistics.median(errors) < 0.25
