"""The prompts of both workloads: the same lengths for every engine and repeat, other tokens each time.

Other tokens, since an engine that keeps prefixes would otherwise find the last repeat's and compute nothing.
"""

import random
from collections.abc import Iterator

from benchmarks.offline.protocol import Request

NUM_REQUESTS = 64
PROMPT_TOKENS, OUTPUT_TOKENS = (32, 256), (64, 192)
SINGLE_TOKENS = (128, 128)
FILLING_TOKENS = 512
LENGTHS_SEED, FILLING_SEED = 0, 1 << 32


def batch(vocab_size: int, seed: int, output_share: float = 1.0) -> list[Request]:
    """64 requests, prompts uniform 32..256 and outputs uniform 64..192 tokens long, the outputs cut to a share."""
    lengths, tokens = random.Random(LENGTHS_SEED), random.Random(seed)
    sizes = [(lengths.randint(*PROMPT_TOKENS), lengths.randint(*OUTPUT_TOKENS)) for _ in range(NUM_REQUESTS)]
    return [(_prompt(tokens, size, vocab_size), max(1, int(length * output_share))) for size, length in sizes]


def single(vocab_size: int, seed: int) -> Request:
    """128 prompt tokens, 128 new."""
    num_prompt, num_output = SINGLE_TOKENS
    return _prompt(random.Random(seed), num_prompt, vocab_size), num_output


def filling(vocab_size: int, num_tokens: int) -> Iterator[list[Request]]:
    """Batches that together write `num_tokens` tokens into a KV cache.

    The system hands out memory when it is first written, which is slow, so engines that do not write all
    of their cache at launch would pay for it within the figures.
    """
    tokens = random.Random(FILLING_SEED)
    for first in range(0, num_tokens, NUM_REQUESTS * FILLING_TOKENS):
        num_requests = min(NUM_REQUESTS, -(-(num_tokens - first) // FILLING_TOKENS))
        yield [(_prompt(tokens, FILLING_TOKENS, vocab_size), 1) for _ in range(num_requests)]


def _prompt(tokens: random.Random, size: int, vocab_size: int) -> list[int]:
    return [tokens.randrange(vocab_size) for _ in range(size)]
