"""Chooses the replica for a request, from values alone: no I/O, clock, logging or mutation.

What a replica costs is counted in seconds. The policy `prefix` takes the replica that brings the request to its end
soonest, where what others lose counts too: a prompt that is computed already is worth what computing it would take this
request and those that the replica has. So a popular prefix spreads once waiting for its holder takes longer, soon
between idle replicas and late between busy ones.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from math import inf
from typing import NamedTuple
from zlib import crc32

import msgspec

from sluice.engine.fleet.prefix_index import PrefixIndex
from sluice.errors import ErrorCode, SluiceError

NO_ADAPTERS: frozenset[str] = frozenset()
GOLDEN = 0.6180339887498949
"""The fraction of the golden ratio: its multiples spread evenly over 0 to 1, however many there are."""


class RoutingPolicy(StrEnum):
    """The ways to choose a replica."""

    PREFIX = "prefix"
    LEAST_LOADED = "least-loaded"
    ROUND_ROBIN = "round-robin"


class ReplicaView(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A replica as a router sees it: its last statistics, and what was sent to it since."""

    name: str
    number: int
    """Its number in the prefix index."""
    num_free_blocks: int = 0
    num_reserved_blocks: int = 0
    num_blocks: int = 0
    block_size: int = 32
    """Tokens of a block."""
    num_running: int = 0
    num_waiting: int = 0
    num_tokens_waiting: int = 0
    """Prompt tokens of its waiting requests."""
    predicted_wait_s: float = 0.0
    """Its own prediction of how long a request that comes now waits for its admission."""
    prefill_tokens_per_s: float = 0.0
    """Prompt tokens that it computes in a second; 0 where that is not known yet."""
    decode_seconds_per_step: float = 0.0
    """Seconds of a step in which it decodes what runs now."""
    adapters: frozenset[str] = NO_ADAPTERS
    """LoRA adapters that it has loaded."""
    version: str = ""
    """Replicas of one version share its weight."""
    weight: float = 1.0
    """Requests that its version gets, in relation to those of other versions; 0 for none."""
    is_draining: bool = False
    is_silent: bool = False
    """Whether its heartbeat is overdue."""
    num_sent: int = 0
    """Requests that this gateway has sent and that the statistics do not show yet."""
    sent_tokens: int = 0
    """Their prompt tokens, without those that were cached."""
    prefilling_tokens: int = 0
    """Prompt tokens of all requests that this gateway has there and that have no first token yet, without those that
    were cached. Statistics show only what waits, not what is being computed."""


class RoutedRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request as a router sees it."""

    ticket: int
    """A number that counts up with each request; it turns equal replicas round."""
    num_prompt_tokens: int
    max_tokens: int = 0
    block_hashes: Sequence[bytes] = ()
    """Hashes of the prompt's full blocks (`HashChain`)."""
    adapter: str = ""
    session: str = ""
    """The name that the requests of one session share; they stay with one version. Empty for none."""
    session_replica: str = ""
    """Name of the replica that had the session's last request."""
    exclude: frozenset[str] = frozenset()
    """Names of replicas that have refused the request."""


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a router weighs."""

    policy: RoutingPolicy = RoutingPolicy.PREFIX
    seed: int = 0
    """Turns the replicas that are equally good: gateways with different seeds begin with different ones."""
    adapter_load_s: float | None = None
    """Seconds to load an adapter that a replica lacks; None where replicas do not load one by themselves, so that such
    a replica is not chosen."""
    session_bonus_s: float = 0.05
    """Seconds that the replica of the session's last request may be slower and still get the next one."""
    session_ttl_s: float = 3600.0
    """Seconds after its last request for which a session's replica is remembered, by those who call the router."""
    counted_output_tokens: int = 32
    """Tokens of an answer that count, or its `max_tokens` where that is less. With more of them prefixes would be
    computed on many replicas for the sake of slightly faster steps: see `make bench ARGS=routing`."""
    others_weight: float = 0.25
    """A second of prefill counts this much more for each request that a replica has already, because they are all
    slower meanwhile. With 0 prefixes are computed once more wherever that saves the one request a little time, and at
    a high load replicas do little else: see `make bench ARGS=routing`."""
    usual_prefill_tokens_per_s: float = 2000.0
    """Prefill rate of a replica of which none is known."""


DEFAULT_ROUTING = RouterSettings()
MIN_SPLIT_TOKENS = 512
"""Default of the fewest tokens of a prompt, without those that are cached, that a prefill replica computes: what one
step takes by default. Fewer delay the streams beside them by one step, and the way over another replica takes about as
long."""


class ReplicaChoice(NamedTuple):
    """The chosen replica, and why."""

    replica: ReplicaView
    num_cached_tokens: int
    """Prompt tokens that it is expected to have."""
    cost_s: float
    """Sum of the parts; 0 under round-robin."""
    parts: Mapping[str, float]
    """Seconds by name: `prefill`, `wait`, `decode`, and `adapter` and `session` where they matter."""


def choose(
    request: RoutedRequest, replicas: Sequence[ReplicaView], index: PrefixIndex, settings: RouterSettings
) -> ReplicaChoice:
    """Choose the replica for a request. Equal values give an equal choice.

    Raises SluiceError UNAVAILABLE where no replica can take it, NOT_FOUND where none has its adapter.
    """
    able = [replica for replica in replicas if _is_able(request, replica, settings)]
    if not able:
        raise _nobody(request, replicas)
    first = able[0]
    if any(replica.version != first.version for replica in able):
        able = _of_one_version(able, request, settings.seed)
    turn = (request.ticket + settings.seed) % len(able)
    if settings.policy == RoutingPolicy.ROUND_ROBIN:
        return ReplicaChoice(able[turn], 0, 0.0, {})
    if settings.policy == RoutingPolicy.LEAST_LOADED:
        best = min(able[turn:] + able[:turn], key=_load)
        parts = _parts(request, best, 0, settings)
        return ReplicaChoice(best, 0, sum(parts.values()), parts)
    leading = index.leading_blocks(request.block_hashes) if request.block_hashes else ()
    best = able[_cheapest(request, able, leading, settings, turn)]
    num_blocks = leading[best.number] if best.number < len(leading) else 0
    num_cached = _cached_tokens(request, best, num_blocks)
    parts = _parts(request, best, num_cached, settings)
    return ReplicaChoice(best, num_cached, sum(parts.values()), parts)


def _is_able(request: RoutedRequest, replica: ReplicaView, settings: RouterSettings) -> bool:
    if replica.is_draining or replica.is_silent or replica.weight <= 0.0 or replica.name in request.exclude:
        return False
    return not request.adapter or settings.adapter_load_s is not None or request.adapter in replica.adapters


def _nobody(request: RoutedRequest, replicas: Sequence[ReplicaView]) -> SluiceError:
    """Return the error that says why none of `replicas` can take the request."""
    excluded = [replica for replica in replicas if replica.name in request.exclude]
    others = [replica for replica in replicas if replica.name not in request.exclude]
    reasons = {
        "refused it": len(excluded),
        "are draining": sum(replica.is_draining for replica in others),
        "are silent": sum(replica.is_silent and not replica.is_draining for replica in others),
        "have the weight 0": sum(replica.weight <= 0.0 for replica in others),
    }
    fit = [replica for replica in others if not (replica.is_draining or replica.is_silent or replica.weight <= 0.0)]
    if fit:
        message = f"no replica has loaded the adapter {request.adapter!r}; {len(fit)} could take the request with it"
        return SluiceError(ErrorCode.NOT_FOUND, message, param="adapter")
    why = ", ".join(f"{count} {reason}" for reason, count in reasons.items() if count) or "there are none"
    return SluiceError(ErrorCode.UNAVAILABLE, f"none of {len(replicas)} replicas can take the request: {why}")


def _of_one_version(able: list[ReplicaView], request: RoutedRequest, seed: int) -> list[ReplicaView]:
    """Return the replicas of the version whose turn it is. Versions take turns in proportion to their weights, a
    session stays with one while the weights stay."""
    weights: dict[str, float] = {}
    for replica in able:
        weights[replica.version] = max(weights.get(replica.version, 0.0), replica.weight)
    turn = (request.ticket + seed) * GOLDEN % 1.0
    if request.session:
        turn = crc32(request.session.encode()) / 2**32  # without the seed: the same at each gateway
    left = turn * sum(weights.values())
    chosen = ""
    for version in sorted(weights):
        chosen = version
        left -= weights[version]
        if left < 0.0:
            break
    return [replica for replica in able if replica.version == chosen]


def _load(replica: ReplicaView) -> tuple[int, float]:
    """Return how loaded a replica is: its sequences first, then its wait."""
    return _num_requests(replica), replica.predicted_wait_s


def _num_requests(replica: ReplicaView) -> int:
    return replica.num_running + replica.num_waiting + replica.num_sent


def _cheapest(
    request: RoutedRequest,
    able: list[ReplicaView],
    leading: Sequence[int],
    settings: RouterSettings,
    turn: int,
) -> int:
    """Return the position of the replica with the least cost, of equal ones the first from `turn` on. It sums what
    `_parts` names, in one loop, since this runs for each replica at each request."""
    num_prompt, num_known = request.num_prompt_tokens, len(leading)
    num_output = _output_tokens(request, settings)
    usual_s = 1.0 / settings.usual_prefill_tokens_per_s
    weight = settings.others_weight
    has_extras = bool(request.adapter or request.session_replica)
    best, least = turn, inf
    for position in range(turn - len(able), turn):  # a negative index counts from the end: once round from the turn on
        replica = able[position]
        rate = replica.prefill_tokens_per_s
        token_s = 1.0 / rate if rate > 0.0 else usual_s
        number = replica.number
        num_left = num_prompt
        if number < num_known and leading[number]:
            num_left -= _cached_tokens(request, replica, leading[number])
        wait_s = replica.predicted_wait_s + replica.sent_tokens * token_s
        busy_s = replica.prefilling_tokens * token_s
        others = replica.num_running + replica.num_waiting + replica.num_sent
        cost = num_left * token_s * (1.0 + weight * others) + (wait_s if wait_s > busy_s else busy_s)
        cost += replica.decode_seconds_per_step * num_output
        if has_extras:
            cost += sum(_extras(request, replica, settings).values())
        if cost < least:
            best, least = position, cost
    return best


def _cached_tokens(request: RoutedRequest, replica: ReplicaView, num_blocks: int) -> int:
    """Return the prompt tokens in the leading blocks. The last token is always computed, and its block with it."""
    size = replica.block_size
    return min(num_blocks, (request.num_prompt_tokens - 1) // size) * size


def _output_tokens(request: RoutedRequest, settings: RouterSettings) -> int:
    return min(request.max_tokens or settings.counted_output_tokens, settings.counted_output_tokens)


def _parts(request: RoutedRequest, replica: ReplicaView, num_cached: int, settings: RouterSettings) -> dict[str, float]:
    """Return the parts of the cost of a replica that has `num_cached` of the prompt's tokens, in seconds."""
    rate = replica.prefill_tokens_per_s
    token_s = 1.0 / (rate if rate > 0.0 else settings.usual_prefill_tokens_per_s)
    wait_s = replica.predicted_wait_s + replica.sent_tokens * token_s
    return {
        "prefill": (request.num_prompt_tokens - num_cached)
        * token_s
        * (1.0 + settings.others_weight * _num_requests(replica)),
        "wait": max(wait_s, replica.prefilling_tokens * token_s),
        "decode": replica.decode_seconds_per_step * _output_tokens(request, settings),
        **_extras(request, replica, settings),
    }


def _extras(request: RoutedRequest, replica: ReplicaView, settings: RouterSettings) -> dict[str, float]:
    """Return the parts that few requests have."""
    extras: dict[str, float] = {}
    if request.adapter and request.adapter not in replica.adapters:
        extras["adapter"] = settings.adapter_load_s or 0.0
    if request.session_replica and request.session_replica == replica.name:
        extras["session"] = -settings.session_bonus_s
    return extras
