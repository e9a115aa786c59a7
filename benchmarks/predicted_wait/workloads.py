"""Requests and their arrivals: bursts, ramps, mixed lengths, shared prefixes, tenants, impatient clients."""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

VOCABULARY = 1024
"""Most tokens of a generation, and so the vocabulary of the simulated model; real ones have more."""

MAX_NUM_SEQS = 32

STEADY = ("team", "small")
"""Tenants whose requests come evenly, whatever the others do."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a workload, and the seconds from the start at which it is sent."""

    prompt: tuple[int, ...]
    max_tokens: int
    length: int
    """Tokens after which it ends by itself, as by a stop string; `max_tokens` may end it before."""
    at_s: float = 0.0
    tenant: str = ""
    priority: int = 0
    patience_s: float = math.inf
    """Seconds after which the client cancels it."""
    queue_timeout_s: float | None = None
    timeout_s: float | None = None
    is_exempt: bool = False
    """Whether it is accepted even if it is predicted to miss its deadline."""


Mix = Callable[[random.Random], Arrival]
Pattern = Callable[[random.Random, int, float], Iterator[float]]
"""Yields the times of arrival of that many requests, for an engine that serves so many a second."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A kind of load: what its requests are like, when they come, and what happens to the machine meanwhile."""

    name: str
    mix: Mix
    pattern: Pattern
    is_noisy: bool = False
    """Whether another program takes a part of the processor, at times."""
    num_blocks: int = 2048
    is_overtaken: bool = False
    """Whether later requests go before earlier ones."""

    def arrivals(self, rng: random.Random, count: int, rate: float) -> list[Arrival]:
        """Return `count` requests in order of arrival. `rate`: requests a second that the engine can serve."""
        arrivals = [replace(self.mix(rng), at_s=at_s) for at_s in self.pattern(rng, count, rate)]
        last_s = arrivals[-1].at_s
        spread = [replace(each, at_s=rng.uniform(0.0, last_s)) if each.tenant in STEADY else each for each in arrivals]
        return sorted(spread, key=lambda arrival: arrival.at_s)


# -- patterns


def bursts(rng: random.Random, count: int, rate: float) -> Iterator[float]:
    """Yield four crowds, each within a moment. The next one comes when the last one is nearly served."""
    for number in range(count):
        crowd = number * 4 // count
        yield crowd * 0.9 * count / 4 / rate + rng.uniform(0.0, 0.02)


def at_once(rng: random.Random, count: int, rate: float) -> Iterator[float]:
    """Yield one crowd, within a moment."""
    for _ in range(count):
        yield rng.uniform(0.0, 0.02)


def ramp(rng: random.Random, count: int, rate: float) -> Iterator[float]:
    """Yield a load that grows from half of what the engine can serve to twice as much, and shrinks back."""
    at_s = 0.0
    for number in range(count):
        load = 0.5 + 1.5 * (1.0 - abs(2.0 * number / count - 1.0))
        at_s += rng.expovariate(load * rate)
        yield at_s


def steady(rng: random.Random, count: int, rate: float) -> Iterator[float]:
    """Yield half as much again as the engine can serve."""
    at_s = 0.0
    for _ in range(count):
        at_s += rng.expovariate(1.5 * rate)
        yield at_s


# -- mixes


def _tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.choices(range(2, VOCABULARY), k=count))


def _lognormal(rng: random.Random, median: float, sigma: float, low: int, high: int) -> int:
    return min(max(round(rng.lognormvariate(math.log(median), sigma)), low), high)


def chat(rng: random.Random) -> Arrival:
    """Draw a request whose answer has a natural length, which max_tokens may cut."""
    return Arrival(_tokens(rng, rng.randint(16, 128)), 128, _lognormal(rng, 60, 0.7, 2, 1000))


def mixed(rng: random.Random) -> Arrival:
    """Draw a request for about as much as it needs, from a few tokens to hundreds, after a short or a long prompt."""
    max_tokens = rng.choice([16, 32, 64, 128, 256])
    prompt = _lognormal(rng, 90, 1.0, 2, 600)
    return Arrival(_tokens(rng, prompt), max_tokens, rng.randint(max_tokens // 2, max_tokens))


def document(rng: random.Random) -> Arrival:
    """Draw a question about a long text, with a short answer and the same max_tokens as a chat."""
    return Arrival(_tokens(rng, rng.randint(300, 800)), 128, _lognormal(rng, 20, 0.5, 2, 128))


def early_end(rng: random.Random) -> Arrival:
    """Draw a request whose answer ends long before max_tokens."""
    return Arrival(_tokens(rng, rng.randint(16, 64)), 384, 1 + int(rng.expovariate(1 / 60)))


_PREFIXES = [_tokens(random.Random(number), 320) for number in range(8)]


def shared_prefixes(rng: random.Random) -> Arrival:
    """Draw a short question after one of eight long system prompts."""
    return replace(chat(rng), prompt=rng.choice(_PREFIXES) + _tokens(rng, rng.randint(8, 40)))


def tenants(rng: random.Random) -> Arrival:
    """Draw from a tenant with most of the load and long answers, a smaller one and a small one."""
    tenant = rng.choices(["bulk", "team", "small"], [6, 3, 1])[0]
    arrival = chat(rng)
    return replace(arrival, tenant=tenant, length=arrival.length * (2 if tenant == "bulk" else 1))


def priorities(rng: random.Random) -> Arrival:
    """Draw a request; a third go before the others."""
    return replace(chat(rng), priority=rng.choices([0, 1], [1, 2])[0])


def impatient(rng: random.Random) -> Arrival:
    """Draw a request; a third of the clients leave, most of them while they wait."""
    return replace(chat(rng), patience_s=rng.expovariate(2.0) if rng.random() < 0.33 else math.inf)


WORKLOADS = (
    Workload("bursts", chat, bursts),
    Workload("ramp", chat, ramp),
    Workload("mixed lengths, bursts", mixed, bursts),
    Workload("mixed lengths, ramp", mixed, ramp),
    Workload("few blocks", mixed, ramp, num_blocks=96),
    Workload("early ends, bursts", early_end, bursts),
    Workload("early ends, ramp", early_end, ramp),
    Workload("shared prefixes", shared_prefixes, bursts),
    Workload("tenants, bursts", tenants, bursts, is_overtaken=True),
    Workload("tenants, steady", tenants, steady, is_overtaken=True),
    Workload("priorities", priorities, steady, is_overtaken=True),
    Workload("clients that leave", impatient, ramp),
    Workload("noisy machine", chat, ramp, is_noisy=True),
    Workload("noisy machine, mixed lengths", mixed, bursts, is_noisy=True),
)
