"""Gaps that a prompt of 2,000 tokens makes in sixteen decoding streams, by the size of a prefill chunk."""

import json
import random
import shutil
from collections import defaultdict
from pathlib import Path

from benchmarks.figures import Figure
from benchmarks.models import model_s
from benchmarks.scheduling.trace import Replay, TimedRequest, percentile, replay
from sluice.engine.config import EngineConfig
from sluice.engine.loop.load import load_runner
from sluice.engine.types import GenerateRequest, SamplingParams

NUM_STREAMS, LONG_PROMPT, CONTEXT = 16, 2000, 4096
PROMPT_TOKENS, MAX_TOKENS = 32, 64
"""Few enough tokens that one long gap of a stream is more than a hundredth of its gaps."""
NUM_SETTLING = 4
"""First gaps of a stream that do not count, since the streams' own prompts are prefilled in them."""
CHUNKS = {"chunks of 128": 128, "chunks of 512": 512, "unchunked": 2112}
"""`max_num_batched_tokens` by name. The last takes the prompt and the streams in one step."""
WITHOUT = "no long prompt"


def measure(num_repeats: int, folder: Path, tokenizer: Path) -> list[Figure]:
    """Measure model S with a longer context: in each repeat without the long prompt, then with each chunk size."""
    checkpoint = _long_model(folder, tokenizer)
    samples: dict[tuple[str, str], list[float]] = defaultdict(list)
    for _ in range(num_repeats):
        quiet = _run(checkpoint, CHUNKS["chunks of 512"], None)
        _record(samples, WITHOUT, quiet)
        for name, chunk in CHUNKS.items():
            _record(samples, name, _run(checkpoint, chunk, quiet.seconds / 3))
    return [Figure(name, subject, "ms", tuple(values)) for (name, subject), values in samples.items()]


def _record(samples: dict[tuple[str, str], list[float]], subject: str, run: Replay) -> None:
    gaps = [gap for outcome in run.outcomes[:NUM_STREAMS] for gap in outcome.gaps_s[NUM_SETTLING:]]
    samples[f"ITL p99 of {NUM_STREAMS} streams", subject].append(percentile(gaps, 99) * 1e3)
    samples[f"longest gap of {NUM_STREAMS} streams", subject].append(max(gaps) * 1e3)
    if subject != WITHOUT:
        samples[f"TTFT of the {LONG_PROMPT} tokens", subject].append(run.outcomes[-1].ttft_s * 1e3)


def _run(checkpoint: Path, chunk: int, long_at_s: float | None) -> Replay:
    config = EngineConfig(
        model_path=str(checkpoint), num_blocks=192, max_num_seqs=NUM_STREAMS + 1, max_num_batched_tokens=chunk
    )
    trace = [TimedRequest(0.0, _request(number, PROMPT_TOKENS, MAX_TOKENS)) for number in range(NUM_STREAMS)]
    if long_at_s is not None:
        trace.append(TimedRequest(long_at_s, _request(NUM_STREAMS, LONG_PROMPT, 4)))
    runner = load_runner(config)
    try:
        return replay(runner, config, trace)
    finally:
        runner.close()


def _request(number: int, num_tokens: int, max_tokens: int) -> GenerateRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    prompt = random.Random(number).choices(range(100, 4000), k=num_tokens)
    return GenerateRequest(request_id=str(number), prompt_token_ids=prompt, sampling=params)


def _long_model(folder: Path, tokenizer: Path) -> Path:
    """Return S with positions for the long prompt. Its weights do not depend on the number of positions."""
    checkpoint = folder / f"S-{CONTEXT}"
    if not checkpoint.is_dir():
        shutil.copytree(model_s(folder, tokenizer), checkpoint)
        config = json.loads((checkpoint / "config.json").read_bytes())
        (checkpoint / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    return checkpoint
