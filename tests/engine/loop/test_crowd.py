"""Many concurrent requests, through executor, planner, block tables and sampling, get the tokens of transformers."""

import json
from typing import Any

import numpy as np
import pytest

from sluice.engine.config import EngineConfig
from sluice.engine.frames import Command, StepFrame, Submit
from sluice.engine.loop.executor import InflightExecutor
from sluice.engine.loop.load import load_runner
from sluice.engine.types import GenerateRequest, SamplingParams
from tests.paths import DATA


class Arrivals:
    """Requests that arrive at random steps; the executor never waits."""

    def __init__(self, requests: list[GenerateRequest], seed: int) -> None:
        steps = np.random.default_rng(seed).integers(0, 80, len(requests))
        self._by_step: dict[int, list[Command]] = {}
        for stream_id, (step, request) in enumerate(zip(steps.tolist(), requests, strict=True)):
            self._by_step.setdefault(step, []).append(Submit(stream_id, request))
        self._step = 0

    def receive(self, timeout_s: float) -> list[Command]:
        self._step += 1
        # Each step asks twice: before planning, and while the batch runs.
        return self._by_step.pop(self._step // 2, [])

    @property
    def is_over(self) -> bool:
        return not self._by_step


def as_request(case: dict[str, Any]) -> GenerateRequest:
    params = SamplingParams(
        max_tokens=case["max_tokens"], temperature=0.0, repetition_penalty=case["repetition_penalty"]
    )
    return GenerateRequest(request_id="", prompt_token_ids=case["prompt_token_ids"], sampling=params)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
@pytest.mark.parametrize("name", ["llama_tiny", "qwen3_tiny"])
def test_a_crowd_of_32_gets_the_tokens_of_transformers(name: str, seed: int) -> None:
    cases = json.loads((DATA / "goldens" / f"{name}.json").read_text())["cases"]
    assert len(cases) == 32
    # 60 blocks hold about a third of the crowd at a time; 48 tokens a step cut most prompts into chunks.
    config = EngineConfig(
        model_path=str(DATA / "checkpoints" / name),
        dtype="f32",
        num_blocks=60,
        max_num_seqs=24,
        max_num_batched_tokens=48,
    )
    arrivals = Arrivals([as_request(case) for case in cases], seed)
    tokens: dict[int, list[int]] = {stream_id: [] for stream_id in range(len(cases))}

    def hear(frame: StepFrame) -> None:
        assert not frame.failures
        for event in frame.events:
            tokens[event.stream_id] += event.token_ids

    runner = load_runner(config)
    try:
        executor = InflightExecutor(runner, config, arrivals.receive, hear)
        while not arrivals.is_over or executor.stats().num_running or executor.stats().num_waiting:
            executor.step()
            executor.check_invariants()
    finally:
        runner.close()
    assert tokens == {stream_id: case["token_ids"] for stream_id, case in enumerate(cases)}
    assert executor.stats().num_blocks_free == 60
