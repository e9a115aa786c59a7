"""Two replicas on the CPU whose prompts share long prefixes, under our router and in turn: the time to serve them all.

Model M, 16 prefixes of 1,000 tokens. The cache of a replica has room for ten of them, the fleet's for all.
"""

import random
import statistics
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec

from benchmarks.figures import BenchmarkError, Figure, ReportProgress, Target
from benchmarks.models import build_m
from benchmarks.server import Server, running_server
from sluice.engine.fleet.router import RoutingPolicy
from sluice.gateway.checkpoint import find_checkpoint

NUM_PREFIXES, PREFIX_TOKENS, OWN_TOKENS, OUTPUT_TOKENS = 16, 1000, 24, 16
NUM_BLOCKS = 340
NUM_REQUESTS, NUM_AT_ONCE = 64, 8
TIMEOUT_S = 300.0
POLICIES = (RoutingPolicy.PREFIX, RoutingPolicy.ROUND_ROBIN)
TARGET = Target(1.5, is_ceiling=False)


def measure(num_repeats: int, folder: Path, report: ReportProgress) -> list[Figure]:
    """Measure both policies in turns, each time with servers whose caches have had each prefix once."""
    checkpoint = build_m(folder.resolve() / "models", find_checkpoint(None))
    samples: dict[tuple[str, str], list[float]] = defaultdict(list)
    for repeat in range(num_repeats):
        for policy in POLICIES:
            options = ("--replicas=2", f"--router={policy}", f"--num-blocks={NUM_BLOCKS}", "--max-model-len=1100")
            with running_server(checkpoint, folder / f"routing-live-{policy}.log", *options) as server:
                rate, ttft_s = _serve(server, repeat)
            samples[policy, "prompt and output tokens"].append(rate)
            samples[policy, "TTFT p50"].append(1e3 * ttft_s)
            report(f"{policy}, {repeat + 1} of {num_repeats}: {rate:,.0f} tokens/s")
    units = {"prompt and output tokens": "tokens/s", "TTFT p50": "ms"}
    figures = [Figure(name, policy, units[name], tuple(values)) for (policy, name), values in samples.items()]
    ours, theirs = (samples[policy, "prompt and output tokens"] for policy in POLICIES)
    gains = tuple(a / b for a, b in zip(ours, theirs, strict=True))
    return [*figures, Figure("tokens, prefix / round-robin", "two replicas", "x", gains, TARGET)]


def _serve(server: Server, seed: int) -> tuple[float, float]:
    """Return tokens a second, and the median TTFT in seconds."""
    rng = random.Random(seed)
    prefixes = [rng.choices(range(100, 30_000), k=PREFIX_TOKENS) for _ in range(NUM_PREFIXES)]
    chosen = [number % NUM_PREFIXES for number in range(NUM_REQUESTS)]
    rng.shuffle(chosen)
    prompts = [prefixes[number] + rng.choices(range(100, 30_000), k=OWN_TOKENS) for number in chosen]
    with (
        httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as client,
        ThreadPoolExecutor(NUM_AT_ONCE) as pool,
    ):
        list(pool.map(lambda prefix: _ask(client, prefix), prefixes))
        started = time.perf_counter()
        ttfts_s = list(pool.map(lambda prompt: _ask(client, prompt), prompts))
        seconds = time.perf_counter() - started
    num_tokens = NUM_REQUESTS * (PREFIX_TOKENS + OWN_TOKENS + OUTPUT_TOKENS)
    return num_tokens / seconds, statistics.median(ttfts_s)


def _ask(client: httpx.Client, prompt: list[int]) -> float:
    """Read one stream to its end. Returns the seconds to its first token."""
    body = {"model": "M", "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "stream": True}
    started, first_s = time.perf_counter(), 0.0
    with client.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = msgspec.json.decode(line.removeprefix("data: "))
                if "error" in event:
                    raise BenchmarkError(f"a stream ended in an error: {event['error']['message']}")
                first_s = first_s or time.perf_counter() - started
    if not first_s:
        raise BenchmarkError("a stream had no tokens")
    return first_s
