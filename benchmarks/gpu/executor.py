"""The executor alone, in this process: a batch of a 0.6B, and an 8B whose KV cache holds half of its requests."""

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.gpu.models import config_for, random_runner
from benchmarks.gpu.parts import Notes, Setting
from benchmarks.gpu.shapes import Ceilings, Shape, large, share_of_limit, small
from sluice.engine.config import EngineConfig
from sluice.engine.frames import Command, StepFrame, Submit
from sluice.engine.loop.executor import InflightExecutor
from sluice.engine.runners.base import Runner
from sluice.engine.types import GenerateRequest, SamplingParams

BLOCK_SIZE = 32
Lengths = tuple[int, int]
"""Tokens of a prompt and of its answer."""


@dataclass
class Batch:
    """Requests that are all there at the start, and what has become of them: the executor's source of commands."""

    lengths: Sequence[Lengths]
    tokens: Counter[int] = field(default_factory=Counter)
    num_ended: int = 0
    failures: list[str] = field(default_factory=list)
    is_taken: bool = False

    def receive(self, timeout_s: float) -> list[Command]:
        if self.is_taken:
            return []
        self.is_taken = True
        rng = np.random.default_rng(0)
        return [Submit(number, _request(rng, number, *each)) for number, each in enumerate(self.lengths)]

    def emit(self, frame: StepFrame) -> None:
        for event in frame.events:
            self.tokens[event.stream_id] += len(event.token_ids)
            self.num_ended += event.finish_reason is not None
        self.failures += [failure.message for failure in frame.failures]

    @property
    def is_over(self) -> bool:
        return self.num_ended + len(self.failures) == len(self.lengths)


def _request(rng: np.random.Generator, number: int, num_prompt: int, num_output: int) -> GenerateRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
    prompt = rng.integers(6, 4000, num_prompt).tolist()
    return GenerateRequest(request_id=str(number), prompt_token_ids=prompt, sampling=sampling)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A batch that is over."""

    seconds: float
    num_tokens: int
    num_short: int
    """Requests that failed or have not all their tokens."""
    preemptions: int

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


def run_batch(runner: Runner, config: EngineConfig, lengths: Sequence[Lengths]) -> Outcome:
    """Run requests to their end, after a few for what a first step does."""
    warmup = Batch([(40, 4)] * 3)
    batch = Batch(lengths)
    for each in (warmup, batch):
        executor = InflightExecutor(runner, config, each.receive, each.emit)
        began = time.perf_counter()
        while not each.is_over:
            executor.step()
        seconds = time.perf_counter() - began
    num_short = sum(batch.tokens[number] != num_output for number, (_, num_output) in enumerate(lengths))
    return Outcome(seconds, batch.tokens.total(), num_short, executor.stats().preemptions_total)


def measure(setting: Setting, notes: Notes) -> None:
    _measure_many(setting, notes)
    _measure_pressure(setting, notes)


def nano_vllm_lengths(count: int = 256, least: int = 100, most: int = 1024) -> list[Lengths]:
    """Return the lengths of the requests of nano-vllm's benchmark, which draws their tokens with the same generator."""
    generator = random.Random(0)
    prompts = [len([generator.randint(0, 10_000) for _ in range(generator.randint(least, most))]) for _ in range(count)]
    return [(prompt, generator.randint(least, most)) for prompt in prompts]


def _measure_many(setting: Setting, notes: Notes) -> None:
    lengths = nano_vllm_lengths(4, 5, 20) if setting.is_tiny else nano_vllm_lengths()
    shape = small(setting)
    outcome = _run(setting, shape, lengths, sum(-(-sum(each) // BLOCK_SIZE) for each in lengths))
    _note(
        notes,
        "0.6B offline",
        outcome,
        **share_of_limit(setting, outcome.seconds, lambda ceilings: _least_s(ceilings, shape, lengths)),
    )


def _measure_pressure(setting: Setting, notes: Notes) -> None:
    """Run 256 requests of 1,024 tokens on a cache for 128 of them. Nothing may be preempted."""
    count, prompt, output = (6, 50, 14) if setting.is_tiny else (256, 896, 128)
    num_blocks = count // 2 * -(-(prompt + output) // BLOCK_SIZE)
    outcome = _run(setting, large(setting), [(prompt, output)] * count, num_blocks)
    _note(notes, "8B under pressure", outcome)


def _run(setting: Setting, shape: Shape, lengths: Sequence[Lengths], num_blocks: int) -> Outcome:
    limits = {"num_blocks": num_blocks, "max_num_seqs": len(lengths), "max_num_batched_tokens": 2048}
    config = config_for(setting, "", **limits, enable_prefix_caching=False)
    with random_runner(setting, shape, limits) as runner:
        return run_batch(runner, config, lengths)


def _note(notes: Notes, name: str, outcome: Outcome, **values: float) -> None:
    notes.note(
        name,
        seconds=outcome.seconds,
        tokens=outcome.num_tokens,
        tokens_per_s=outcome.tokens_per_s,
        preemptions=outcome.preemptions,
        failed=outcome.num_short,
        **values,
    )


def _least_s(ceilings: Ceilings, shape: Shape, lengths: Sequence[Lengths]) -> float:
    """Return the least seconds of a batch: all prompts, then steps of all that have not ended yet."""
    seconds = sum(ceilings.prefill_s(shape, prompt) for prompt, _ in lengths)
    for step in range(max(output for _, output in lengths)):
        contexts = [prompt + step for prompt, output in lengths if output > step]
        seconds += ceilings.decode_s(shape, len(contexts), sum(contexts) // len(contexts))
    return seconds
