"""The time that sampling adds to a step over greedy decoding's argmax, for 64 sequences at once."""

import time

import numpy as np

from benchmarks.figures import Figure, Target
from sluice.engine.arrays import FloatArray
from sluice.engine.sampling.cores import Cores
from sluice.engine.sampling.host_logits import HostLogits
from sluice.engine.sampling.sampler import sample
from sluice.engine.sampling.state import SamplingState
from sluice.engine.types import SamplingParams

NUM_ROWS = 64
PROMPT_TOKENS = 512
NUM_STEPS = 5
VOCABULARIES = (4096, 32_000, 150_000)
TARGET_MS = {
    (4096, "peaked", "top_p 0.9"): Target(0.6),
    (150_000, "peaked", "top_p 0.9"): Target(4.0),
    (150_000, "flat", "top_p 0.9"): Target(15.0),
}
SAMPLINGS = {
    "temperature 0.8": {"temperature": 0.8},
    "top_p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "top_k 50": {"temperature": 0.8, "top_k": 50},
    "min_p 0.1": {"temperature": 0.8, "min_p": 0.1},
    "typical_p 0.95": {"temperature": 0.8, "typical_p": 0.95},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.1},
    "logprobs 20": {"temperature": 0.0, "logprobs": 20},
}
GREEDY = {"temperature": 0.0}


def peaked(vocab_size: int) -> FloatArray:
    """Return logits [NUM_ROWS, vocab_size] as models give them: a few likely tokens, and the rest far below."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0.0, 1.5, (NUM_ROWS, vocab_size)).astype(np.float32)
    for row in logits:
        row[rng.choice(vocab_size, 20, replace=False)] += np.linspace(14.0, 6.0, 20)
    return logits


def flat(vocab_size: int) -> FloatArray:
    """Return the worst case, an untrained model's logits: half of the vocabulary is in the nucleus."""
    return np.random.default_rng(0).normal(0.0, 1.0, (NUM_ROWS, vocab_size)).astype(np.float32)


def measure(num_repeats: int, num_steps: int = NUM_STEPS) -> list[Figure]:
    """Measure greedy decoding, then the time that each way of sampling adds to it."""
    cores = Cores()
    figures = [
        figure
        for vocab_size in VOCABULARIES
        for shape, make in (("peaked", peaked), ("flat", flat))
        for figure in _of_logits(make(vocab_size), shape, cores, num_repeats, num_steps)
    ]
    cores.close()
    return figures


def _of_logits(logits: FloatArray, shape: str, cores: Cores, num_repeats: int, num_steps: int) -> list[Figure]:
    vocab_size = logits.shape[1]
    where = f"{NUM_ROWS} x {vocab_size:,}, {shape}"
    greedy = tuple(_step_ms(logits, GREEDY, cores, num_steps) for _ in range(num_repeats))
    least = min(greedy)
    figures = [Figure(f"sampling step, {where}", "greedy", "ms", greedy)]
    for name, fields in SAMPLINGS.items():
        added = tuple(_step_ms(logits, fields, cores, num_steps) - least for _ in range(num_repeats))
        target = TARGET_MS.get((vocab_size, shape, name))
        figures.append(Figure(f"added to greedy, {where}", name, "ms", added, target))
    return figures


def _step_ms(logits: FloatArray, fields: dict[str, float], cores: Cores, num_steps: int) -> float:
    """Return the median milliseconds of `sample` over steps. Each has its own logits, since edits write to them."""
    states = [_state(seed, fields, logits.shape[1]) for seed in range(NUM_ROWS)]
    seconds = []
    for _ in range(num_steps):
        fresh = logits.copy()
        started = time.perf_counter()
        token_ids = sample(HostLogits(fresh, cores), states).token_ids.tolist()
        seconds.append(time.perf_counter() - started)
        for state, token_id in zip(states, token_ids, strict=True):
            state.observe(token_id)
    return float(np.median(seconds)) * 1e3


def _state(seed: int, fields: dict[str, float], vocab_size: int) -> SamplingState:
    params = SamplingParams(seed=seed, max_tokens=PROMPT_TOKENS, **fields)  # type: ignore[arg-type]
    return SamplingState(params, list(range(PROMPT_TOKENS)), frozenset(), vocab_size)
