"""The gain of speculation: on text that is copied from its context, and on text that no draft can predict."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from transformers import AutoTokenizer

from benchmarks.figures import BenchmarkError, Figure, Target
from benchmarks.scheduling.trace import Replay, TimedRequest, replay
from sluice.engine.config import EngineConfig, Speculation
from sluice.engine.loop.load import load_runner
from sluice.engine.runners.base import Runner
from sluice.engine.types import GenerateRequest, SamplingParams

NUM_REQUESTS, NUM_PASSAGES = 24, 6
STREAMS = (1, 8)
MAX_TOKENS = 96
TARGETS = {"copied": Target(1.3, is_ceiling=False), "unforeseeable": Target(0.97, is_ceiling=False)}
_VERBS = ("collects", "rewrites", "validates", "compresses", "schedules", "replays", "encrypts", "merges")
_THINGS = ("journal segments", "queue tickets", "window handles", "cache pages", "route tables", "audit records")
_ENDS = (
    "before the next checkpoint is written, and returns the number of bytes that were saved on disk",
    "when the connection is closed by its peer, so that no later call has to wait for the lock again",
    "in the order of their last modification, unless the caller passes a key function of its own",
    "as soon as the background worker has finished, and raises an error if the timeout is exceeded",
)


def measure(num_repeats: int, checkpoint: Path) -> list[Figure]:
    """Measure every workload without drafts and then with drafts, in each repeat."""
    workloads = {"copied": _copied(checkpoint), "unforeseeable": _unpredictable()}
    config = EngineConfig(model_path=str(checkpoint))
    runner = load_runner(config)
    try:
        return [
            figure
            for name, requests in workloads.items()
            for num_streams in STREAMS
            for figure in _compare(num_repeats, runner, config, name, requests, num_streams)
        ]
    finally:
        runner.close()


def _compare(
    num_repeats: int,
    runner: Runner,
    config: EngineConfig,
    name: str,
    requests: Sequence[GenerateRequest],
    num_streams: int,
) -> list[Figure]:
    config = msgspec.structs.replace(config, max_num_seqs=num_streams)
    pairs = [_pair(runner, config, requests) for _ in range(num_repeats)]
    subject = f"{name}, {num_streams} at a time"
    with_drafts = [drafted for _, drafted in pairs]
    return [
        Figure("tokens/s", f"{subject}, off", "tok/s", tuple(plain.tokens_per_s for plain, _ in pairs)),
        Figure("tokens/s", f"{subject}, ngram", "tok/s", tuple(run.tokens_per_s for run in with_drafts)),
        Figure("speculation", subject, "x", tuple(b.tokens_per_s / a.tokens_per_s for a, b in pairs), TARGETS[name]),
        Figure("drafts accepted", subject, "%", tuple(_accepted_percent(run) for run in with_drafts)),
        Figure("drafts a token", subject, "", tuple(_drafts_per_token(run) for run in with_drafts)),
    ]


def _pair(runner: Runner, config: EngineConfig, requests: Sequence[GenerateRequest]) -> tuple[Replay, Replay]:
    trace = [TimedRequest(0.0, request) for request in requests]
    plain, drafted = (
        replay(runner, msgspec.structs.replace(config, speculation=kind), trace)
        for kind in (Speculation.OFF, Speculation.NGRAM)
    )
    if [outcome.token_ids for outcome in plain.outcomes] != [outcome.token_ids for outcome in drafted.outcomes]:
        raise BenchmarkError("drafts changed what was generated")
    return plain, drafted


def _accepted_percent(run: Replay) -> float:
    return 100 * run.stats.accepted_tokens_total / max(run.stats.draft_tokens_total, 1)


def _drafts_per_token(run: Replay) -> float:
    return run.stats.draft_tokens_total / run.stats.generation_tokens_total


def _copied(checkpoint: Path) -> list[GenerateRequest]:
    """Make questions that a passage of their context answers word for word."""
    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
    numbers = random.Random(3)
    return [_request(number, _question(tokenizer, numbers), 0.0) for number in range(NUM_REQUESTS)]


def _question(tokenizer: Any, numbers: random.Random) -> list[int]:
    names = [f"{numbers.choice('bdfgk')}{numbers.choice('aeiou')}{numbers.randrange(100)}" for _ in range(NUM_PASSAGES)]
    passages = [
        f"{name}() {numbers.choice(_VERBS)} {numbers.choice(_THINGS)} and {numbers.choice(_THINGS)} "
        f"{numbers.choice(_ENDS)}."
        for name in names
    ]
    content = f"Context:\n{' '.join(passages)}\n\nQuestion: What does {numbers.choice(names)}() do?\nAnswer:"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    token_ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return token_ids


def _unpredictable() -> list[GenerateRequest]:
    """Make random prompts, to be continued at a high temperature."""
    numbers = random.Random(4)
    return [_request(number, numbers.choices(range(100, 4000), k=64), 1.5) for number in range(NUM_REQUESTS)]


def _request(number: int, prompt: list[int], temperature: float) -> GenerateRequest:
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature, seed=number, ignore_eos=temperature > 0)
    return GenerateRequest(request_id=str(number), prompt_token_ids=prompt, sampling=params)
