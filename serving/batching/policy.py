"""What config.pbtxt says about batching, in the units that the scheduler counts in."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelQueuePolicy

from serving.request import InferRequest

_NS_PER_US = 1000


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """How long requests of one priority wait. `max_size` 0 is no bound, `timeout_ns` 0 no timeout.

    A request whose time is up is refused, or with `delays_expired` served after all others of its priority.
    """

    max_size: int = 0
    timeout_ns: int = 0
    delays_expired: bool = False
    allows_override: bool = False
    """Whether a request may set a timeout of its own, which only ever shortens the wait."""

    def deadline_ns(self, request: InferRequest, now_ns: int) -> int:
        """When the request's time is up; 0 is never."""
        timeout_ns = self.timeout_ns
        if self.allows_override and request.timeout_us:
            own_ns = request.timeout_us * _NS_PER_US
            timeout_ns = min(timeout_ns, own_ns) if timeout_ns else own_ns
        return now_ns + timeout_ns if timeout_ns else 0


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """Which requests become a batch. Without `is_dynamic` each is one of its own."""

    is_dynamic: bool = False
    max_rows: int = 1
    preferred_rows: frozenset[int] = frozenset({1})
    max_preferred_rows: int = 1
    delay_ns: int = 0
    preserves_order: bool = False
    num_priorities: int = 0
    default_priority: int = 0
    default_queue: QueuePolicy = QueuePolicy()
    queues: Mapping[int, QueuePolicy] = field(default_factory=dict)
    """Of single priorities."""

    def priority_of(self, request: InferRequest) -> int:
        """The priority that counts, 1 the highest; what the model does not know becomes its default."""
        if 1 <= request.priority <= self.num_priorities:
            return request.priority
        return self.default_priority

    def queue_of(self, priority: int) -> QueuePolicy:
        return self.queues.get(priority, self.default_queue)


def batch_policy_of(config: ModelConfig) -> BatchPolicy:
    """The policy of a complete configuration. Preferred sizes left out are the largest batch, as in Triton.

    Of a model that has no batch dimension, `dynamic_batching` says how its queue is served.
    """
    if not config.HasField("dynamic_batching"):
        return BatchPolicy()
    given = config.dynamic_batching
    max_rows = max(config.max_batch_size, 1)
    preferred = frozenset(given.preferred_batch_size) or frozenset({max_rows})
    return BatchPolicy(
        is_dynamic=config.max_batch_size > 0,
        max_rows=max_rows,
        preferred_rows=preferred,
        max_preferred_rows=max(preferred),
        delay_ns=given.max_queue_delay_microseconds * _NS_PER_US,
        preserves_order=given.preserve_ordering,
        num_priorities=given.priority_levels,
        default_priority=given.default_priority_level if given.priority_levels else 0,
        default_queue=_queue_policy(given.default_queue_policy),
        queues={level: _queue_policy(each) for level, each in given.priority_queue_policy.items()},
    )


def sequence_policy_of(config: ModelConfig) -> BatchPolicy:
    """How the strategy `oldest` makes a batch of requests of different sequences. Rows of a batch are sequences."""
    if config.max_batch_size < 1:
        return BatchPolicy()
    given = config.sequence_batching.oldest
    preferred = frozenset(given.preferred_batch_size) or frozenset({config.max_batch_size})
    return BatchPolicy(
        is_dynamic=True,
        max_rows=config.max_batch_size,
        preferred_rows=preferred,
        max_preferred_rows=max(preferred),
        delay_ns=given.max_queue_delay_microseconds * _NS_PER_US,
    )


def _queue_policy(given: ModelQueuePolicy) -> QueuePolicy:
    return QueuePolicy(
        max_size=given.max_queue_size,
        timeout_ns=given.default_timeout_microseconds * _NS_PER_US,
        delays_expired=given.timeout_action == ModelQueuePolicy.DELAY,
        allows_override=given.allow_timeout_override,
    )
