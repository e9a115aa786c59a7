"""Microseconds of a choice among 64 replicas, for a prompt of 20,000 tokens whose blocks have their hashes."""

import random
import statistics
import time
from collections.abc import Callable

from benchmarks.figures import Figure, Target
from sluice.engine.fleet.prefix_index import PrefixIndex
from sluice.engine.fleet.router import ReplicaView, RoutedRequest, RouterSettings, choose

NUM_REPLICAS, NUM_BLOCKS, BLOCK_SIZE = 64, 625, 32
OTHER_BLOCKS = 2000
"""Blocks of other prompts on each replica."""
NUM_CHOICES = 500
HELD: dict[str, Callable[[int], int]] = {
    "nobody has the prompt": lambda replica: 0,
    "one replica has two thirds of it": lambda replica: 400 if replica == 5 else 0,
    "all replicas have all of it": lambda replica: NUM_BLOCKS,
    "each replica has another part of it": lambda replica: 9 * replica + 5,
}
TARGET = Target(50.0)
"""The last is the worst case of the search, and has none."""


def measure(num_repeats: int) -> list[Figure]:
    """Measure each of HELD."""
    return [
        Figure(
            f"choice, {NUM_REPLICAS} replicas, {NUM_BLOCKS} blocks",
            name,
            "us",
            tuple(_choice_us(name, repeat) for repeat in range(num_repeats)),
            None if name.startswith("each") else TARGET,
        )
        for name in HELD
    ]


def _choice_us(name: str, seed: int) -> float:
    rng = random.Random(seed)
    index, prompt = PrefixIndex(), [rng.randbytes(16) for _ in range(NUM_BLOCKS)]
    for replica in range(NUM_REPLICAS):
        held = prompt[: HELD[name](replica)]
        index.apply(replica, 0, rng.randbytes(16 * OTHER_BLOCKS) + b"".join(held), b"", True)
    views = [
        ReplicaView(
            name=str(number),
            number=number,
            block_size=BLOCK_SIZE,
            prefill_tokens_per_s=5000.0,
            predicted_wait_s=rng.random(),
            decode_seconds_per_step=0.02,
        )
        for number in range(NUM_REPLICAS)
    ]
    settings, taken = RouterSettings(), []
    for ticket in range(NUM_CHOICES):
        fresh = [bytes(bytearray(each)) for each in prompt]  # hashes that nobody has looked up yet
        request = RoutedRequest(ticket=ticket, num_prompt_tokens=NUM_BLOCKS * BLOCK_SIZE, block_hashes=fresh)
        started = time.perf_counter()
        choose(request, views, index, settings)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken) * 1e6
