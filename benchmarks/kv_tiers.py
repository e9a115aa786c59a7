"""Conversations whose prefixes exceed the KV cache: first tokens and throughput with and without KV tiers."""

import random
import statistics
import tempfile
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec

from benchmarks.figures import Figure, ReportProgress, Target
from benchmarks.models import build_m
from sluice.engine.config import EngineConfig
from sluice.engine.frames import Command, StepFrame, Submit
from sluice.engine.loop.executor import InflightExecutor
from sluice.engine.loop.load import load_runner
from sluice.engine.runners.base import Runner
from sluice.engine.scheduling.planner import LARGEST_CHUNK
from sluice.engine.statistics import EngineStats
from sluice.engine.types import GenerateRequest, SamplingParams
from sluice.gateway.checkpoint import find_checkpoint

NUM_USERS, NUM_TURNS = 6, 3
DOCUMENT_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 640, 64, 32
NUM_CACHED = 1.5
"""Conversations that the KV cache has room for."""
WAIT_S = 600.0
SUBJECTS = ("no tiers", "memory", "disk")


@dataclass(frozen=True, slots=True)
class Visit:
    """The later turns of all conversations: their first tokens in seconds, and what the engine counted."""

    ttfts_s: tuple[float, ...]
    tokens_per_s: float
    """Prompt and output tokens of all turns over the whole time."""
    stats: EngineStats


def measure(num_repeats: int, out: Path, model: Path | None, report: ReportProgress) -> list[Figure]:
    """Measure model M, or the checkpoint `model`, with the three subjects in turns."""
    checkpoint = model or build_m(out.resolve() / "models", find_checkpoint(None))
    size = DOCUMENT_TOKENS + NUM_TURNS * (QUESTION_TOKENS + ANSWER_TOKENS)
    config = EngineConfig(
        model_path=str(checkpoint),
        num_blocks=int(NUM_CACHED * size / 32),
        max_model_len=size + 32,
        max_num_batched_tokens=LARGEST_CHUNK,
        chooses_chunk=True,
    )
    visits: dict[str, list[Visit]] = {subject: [] for subject in SUBJECTS}
    runner = load_runner(config)
    try:
        for repeat in range(num_repeats):
            for subject in SUBJECTS:
                report(f"repeat {repeat + 1} of {num_repeats}: {subject}")
                visits[subject].append(_measure_one(runner, config, subject))
    finally:
        runner.close()
    return [figure for subject in SUBJECTS for figure in _figures(subject, visits[subject], visits[SUBJECTS[0]])]


def _figures(subject: str, runs: list[Visit], plain: list[Visit]) -> Iterator[Figure]:
    yield Figure("TTFT of a later turn", subject, "ms", tuple(1000 * statistics.median(run.ttfts_s) for run in runs))
    yield Figure("tokens/s, prompts too", subject, "tok/s", tuple(run.tokens_per_s for run in runs))
    tiers = [run.stats.kv_tiers for run in runs]
    if all(tiers):
        pairs = zip(runs, plain, strict=True)
        gains = tuple(statistics.median(b.ttfts_s) / statistics.median(a.ttfts_s) for a, b in pairs)
        yield Figure("gain of TTFT", subject, "x", gains, Target(1.0, is_ceiling=False))
        yield Figure("tokens that came back", subject, "", tuple(each.restored_tokens_total for each in tiers if each))
        copies = tuple(1000 * t.restore_seconds_total / max(t.restored_tokens_total / 32, 1) for t in tiers if t)
        yield Figure("copy of a block back", subject, "ms", copies)


def _measure_one(runner: Runner, config: EngineConfig, subject: str) -> Visit:
    if subject == "no tiers":
        return _converse(runner, config)
    all_bytes = (NUM_USERS + 1) * config.num_blocks * runner.block_bytes  # type: ignore[operator]
    if subject == "memory":
        return _converse(runner, msgspec.structs.replace(config, kv_host_cache_bytes=all_bytes))
    with tempfile.TemporaryDirectory() as folder:
        tiers = {"kv_disk_cache": folder, "kv_disk_cache_bytes": all_bytes}
        return _converse(runner, msgspec.structs.replace(config, **tiers))


class _Commands:
    def __init__(self) -> None:
        self.pending: deque[Command] = deque()

    def receive(self, timeout_s: float) -> list[Command]:
        commands = list(self.pending)
        self.pending.clear()
        return commands


class _Client:
    """Sends one request at a time, as users do who read the answer before they ask on."""

    def __init__(self, runner: Runner, config: EngineConfig) -> None:
        self._commands = _Commands()
        self._tokens: list[int] = []
        self._first_at = 0.0
        self._is_done = False
        self._stream_ids = count()
        self.executor = InflightExecutor(runner, config, self._commands.receive, self._take)

    def _take(self, frame: StepFrame) -> None:
        assert not frame.failures, frame.failures
        for event in frame.events:
            self._first_at = self._first_at or perf_counter()
            self._tokens += event.token_ids
            self._is_done = event.finish_reason is not None

    def ask(self, prompt: list[int]) -> tuple[float, list[int]]:
        """Return the seconds to the first token, and the answer."""
        self._tokens, self._first_at, self._is_done = [], 0.0, False
        params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
        number = next(self._stream_ids)
        request = GenerateRequest(request_id=str(number), prompt_token_ids=prompt, sampling=params)
        started = perf_counter()
        self._commands.pending.append(Submit(number, request))
        while not self._is_done:
            self.executor.step()
            assert perf_counter() - started < WAIT_S, "the request never ends"
        return self._first_at - started, self._tokens


def _converse(runner: Runner, config: EngineConfig) -> Visit:
    """Send the users' requests in turn, so that each comes back after the cache has dropped its conversation."""
    numbers = random.Random(5)

    def words(num_tokens: int) -> list[int]:
        return numbers.choices(range(100, 4000), k=num_tokens)

    client = _Client(runner, config)
    histories = [words(DOCUMENT_TOKENS) for _ in range(NUM_USERS)]
    client.ask(words(QUESTION_TOKENS))  # the first step compiles kernels
    ttfts_s, num_tokens, started = [], 0, perf_counter()
    for turn in range(NUM_TURNS):
        for user, history in enumerate(histories):
            prompt = history + words(QUESTION_TOKENS)
            ttft_s, answer = client.ask(prompt)
            histories[user] = prompt + answer
            num_tokens += len(prompt) + len(answer)
            if turn:
                ttfts_s.append(ttft_s)
    seconds = perf_counter() - started
    stats: Any = client.executor.stats()
    if client.executor._returns is not None:
        client.executor._returns.close()
    return Visit(tuple(ttfts_s), num_tokens / seconds, stats)
