"""A synthetic trace: prompts that begin with one of several long prefixes, as those of applications do."""

import random
from typing import NamedTuple

from sluice.engine.simulation.traces import TracedRequest


class SharedPrefixes(NamedTuple):
    """The shape of the trace. Lengths are tokens, drawn uniformly where they are a range."""

    num_requests: int = 2000
    rate: float = 20.0
    """Requests in a second, at random times."""
    num_prefixes: int = 64
    prefix_tokens: int = 4096
    own_tokens: tuple[int, int] = (50, 200)
    """The rest of a prompt."""
    output_tokens: tuple[int, int] = (50, 150)
    skew: float = 0.0
    """How unequal prefixes are: the k-th is as popular as 1 / k ** skew."""
    seed: int = 0


def shared_prefix_trace(shape: SharedPrefixes) -> list[TracedRequest]:
    """Make a trace. The same shape gives the same trace."""
    rng = random.Random(shape.seed)
    weights = [1.0 / (place + 1) ** shape.skew for place in range(shape.num_prefixes)]
    at_s, requests = 0.0, []
    for prefix in rng.choices(range(shape.num_prefixes), weights, k=shape.num_requests):
        num_prompt = shape.prefix_tokens + rng.randint(*shape.own_tokens)
        parts = ((f"prefix {prefix}", shape.prefix_tokens),)
        requests.append(TracedRequest(at_s, num_prompt, rng.randint(*shape.output_tokens), parts))
        at_s += rng.expovariate(shape.rate)
    return requests
