"""One engine of a fleet: its client, and what the fleet has counted of it."""

from sluice.engine.client.base import EngineClient
from sluice.engine.client.counters import NO_STATS, add_counters, without_gauges
from sluice.engine.fleet.router import ReplicaView
from sluice.engine.types import EngineInfo
from sluice.errors import invalid

_AGREED = ("model_type", "vocab_size", "block_size", "max_model_len", "eos_token_ids", "embedding_size")
"""Fields of EngineInfo that must be the same in all replicas, so that a stream may go on in any of them."""


class Replica:
    """A member of a fleet. Belongs to the fleet's event loop."""

    def __init__(self, name: str, engine: EngineClient, *, version: str = "", weight: float = 1.0) -> None:
        """Replicas of one `version` share its `weight`: the requests that it gets in relation to those of other
        versions."""
        self.name = name
        self.engine = engine
        self.version = version
        self.weight = weight
        self.number = 0
        """Its number in the fleet's prefix index, given by the fleet."""
        self.is_draining = False
        """Whether it gets no further requests, because it leaves the fleet."""
        self.num_routed = 0
        """Requests that were sent here first."""
        self.num_prefilled = 0
        """Prompts that were sent here to be computed for another replica."""
        self.num_adopted = 0
        """Streams that go on here since another replica was lost or drained."""
        self._stats = engine.stats
        """The statistics that what follows is not part of yet."""
        self._num_sent = self._sent_tokens = 0
        self._view: ReplicaView | None = None

    @property
    def is_leaving(self) -> bool:
        """Whether it gets no further requests: it leaves the fleet, or its engine is about to end."""
        return self.is_draining or self.engine.stats.is_draining

    @property
    def is_prefill(self) -> bool:
        """Whether it is there to compute prompts for others."""
        return self.engine.info.is_prefill

    def has_adapter(self, name: str) -> bool:
        """Whether it serves requests with this LoRA adapter; "" is the model without any."""
        return not name or name in self.engine.info.adapters

    def view(self) -> ReplicaView:
        """Return what the router sees of it now."""
        stats = self.engine.stats
        if stats is not self._stats:
            self._stats, self._num_sent, self._sent_tokens, self._view = stats, 0, 0, None
        if self._view is None:
            self._view = self._make_view()
        return self._view

    def note_sent(self, num_tokens: int) -> None:
        """Count a request that was sent now, with so many prompt tokens to compute."""
        self.view()
        self._num_sent += 1
        self._sent_tokens += num_tokens
        self._view = None

    def _make_view(self) -> ReplicaView:
        stats, info = self._stats, self.engine.info
        return ReplicaView(
            name=self.name,
            number=self.number,
            num_free_blocks=stats.num_blocks_free,
            num_reserved_blocks=stats.num_blocks_reserved,
            num_blocks=info.num_blocks,
            block_size=info.block_size,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_tokens_waiting=stats.num_tokens_waiting,
            predicted_wait_s=stats.predicted_wait_s,
            prefill_tokens_per_s=stats.prefill_tokens_per_s,
            decode_seconds_per_step=stats.decode_step_s,
            version=self.version,
            weight=self.weight or 1.0,  # one without weight is asked only where there is no other
            num_sent=self._num_sent,
            sent_tokens=self._sent_tokens,
            prefilling_tokens=self.engine.prefilling_tokens,
        )


class PastReplicas:
    """Sums over the replicas that have left a fleet, because counters must not decrease."""

    def __init__(self) -> None:
        self.stats = NO_STATS
        self.num_restarts = self.num_resumed = self.num_poisoned = 0
        self.recovery_seconds_total = 0.0

    def add(self, replica: Replica) -> None:
        """Add the counters of a replica that leaves."""
        engine = replica.engine
        self.stats = add_counters(self.stats, without_gauges(engine.stats))
        self.num_restarts += engine.num_restarts
        self.num_resumed += engine.num_resumed
        self.num_poisoned += engine.num_poisoned
        self.recovery_seconds_total += engine.recovery_seconds_total


def check_agreement(first: Replica, other: Replica) -> None:
    """Raise INVALID where two replicas do not serve the same model in the same way, naming what differs."""
    ours, theirs = first.engine.info, other.engine.info
    for name in _AGREED:
        _check_field(name, first.name, ours, other.name, theirs)


def _check_field(field: str, first: str, ours: EngineInfo, other: str, theirs: EngineInfo) -> None:
    expected, got = getattr(ours, field), getattr(theirs, field)
    if expected != got:
        message = (
            f"replicas of one model must have the same {field}: replica {first} has {expected}, replica {other} {got}"
        )
        raise invalid(field, message)
