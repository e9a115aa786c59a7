"""Batching decisions, all pure: the policy that config.pbtxt sets, and which requests become the next batch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelQueuePolicy

from sluice.serving.request import InferRequest
from sluice.serving.spec import ModelSpec

_NS_PER_US = 1000


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """Bounds of the queue of one priority. `max_size` 0 is no bound, `timeout_ns` 0 no timeout.

    A request that times out is rejected, or with `delays_expired` served after all others of its priority.
    """

    max_size: int = 0
    timeout_ns: int = 0
    delays_expired: bool = False
    allows_override: bool = False
    """Whether a request may set a timeout of its own. It can only shorten the wait."""

    def deadline_ns(self, request: InferRequest, now_ns: int) -> int:
        """Return when the request times out; 0 is never."""
        timeout_ns = self.timeout_ns
        if self.allows_override and request.timeout_us:
            own_ns = request.timeout_us * _NS_PER_US
            timeout_ns = min(timeout_ns, own_ns) if timeout_ns else own_ns
        return now_ns + timeout_ns if timeout_ns else 0


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """The rules by which requests become batches. Without `is_dynamic` each request is a batch of its own."""

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
    """Policies of the priorities that have their own."""

    def priority_of(self, request: InferRequest) -> int:
        """Return the request's priority, 1 the highest. One that the model does not have becomes the default."""
        if 1 <= request.priority <= self.num_priorities:
            return request.priority
        return self.default_priority

    def queue_of(self, priority: int) -> QueuePolicy:
        return self.queues.get(priority, self.default_queue)


def read_batch_policy(config: ModelConfig) -> BatchPolicy:
    """Return the policy of a complete configuration. As in Triton, the preferred size defaults to the largest batch.

    For a model without a batch dimension, `dynamic_batching` only configures the queue.
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


def read_oldest_policy(config: ModelConfig) -> BatchPolicy:
    """Return the policy by which the `oldest` strategy batches sequences: each row of a batch is one sequence."""
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


@dataclass(slots=True, eq=False)
class WaitingRequest:
    """A request in the queue, as the plan needs it. Requests with equal keys may share a batch."""

    rows: int
    key: object
    enqueued_ns: int


class BatchPlan(NamedTuple):
    """Take the first `size` requests of the queue. Where that is 0, plan again at `look_again_ns`."""

    size: int
    look_again_ns: int = 0


class _Front(NamedTuple):
    """The requests at the front of the queue that could be one batch: `size` requests of `rows` rows."""

    size: int
    rows: int
    oldest_ns: int
    is_closed: bool
    """Whether the batch cannot grow: it is full, or the next request cannot join."""
    preferred: int
    """Number of its requests that make a batch of a preferred size; 0 for none."""


def plan_batch(waiting: Iterable[WaitingRequest], policy: BatchPolicy, now_ns: int) -> BatchPlan:
    """Decide what a free instance runs, by Triton's rules.

    The largest preferred batch at the front runs at once. Otherwise the front waits for more requests until its oldest
    one has waited for the delay, unless it cannot grow. After the delay, everything that fits runs. No request is
    split, and none overtakes another.
    """
    front = _find_front(waiting, policy)
    if front.size == 0:
        return BatchPlan(0)
    due_ns = front.oldest_ns + policy.delay_ns
    is_late = policy.delay_ns > 0 and now_ns >= due_ns
    if front.preferred and not is_late:
        return BatchPlan(front.preferred)
    if is_late or policy.delay_ns == 0 or front.is_closed or front.rows >= policy.max_preferred_rows:
        return BatchPlan(front.size)
    return BatchPlan(0, due_ns)


def _find_front(waiting: Iterable[WaitingRequest], policy: BatchPolicy) -> _Front:
    size = rows = oldest_ns = preferred = 0
    key: object = None
    for each in waiting:
        if size == 0:
            key, oldest_ns = each.key, each.enqueued_ns
        else:
            grown = rows + each.rows
            if preferred == 0 and grown > policy.max_preferred_rows:
                preferred = size
            if grown > policy.max_rows or each.key != key:
                return _Front(size, rows, oldest_ns, True, preferred)
        size += 1
        rows += each.rows
        oldest_ns = min(oldest_ns, each.enqueued_ns)
        if rows in policy.preferred_rows:
            preferred = size
    return _Front(size, rows, oldest_ns, rows >= policy.max_rows, preferred)


class BatchKeys:
    """Tells which requests may share a batch, by what can differ: variable sizes and absent optional inputs."""

    def __init__(self, spec: ModelSpec) -> None:
        has_optional = any(each.is_optional for each in spec.inputs.values())
        compared = {each.name: -1 in each.dims and not each.allows_ragged for each in spec.inputs.values()}
        self._compared = [(name, has_shape) for name, has_shape in compared.items() if has_shape or has_optional]

    def of(self, request: InferRequest) -> object:
        """Return a key that is equal for requests that may share a batch."""
        if not self._compared:
            return None
        inputs = request.inputs
        return tuple(
            None if name not in inputs else inputs[name].shape[1:] if has_shape else ()
            for name, has_shape in self._compared
        )


class SequenceKeys(BatchKeys):
    """Tells which requests of sequences may share a batch: their states of variable size are compared like inputs."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self._states = [state.input_name for state in spec.states if -1 in state.dims] if spec.max_batch_size else []

    def of(self, request: InferRequest) -> object:
        key = super().of(request)
        if not self._states:
            return key
        return key, tuple(request.inputs[name].shape for name in self._states)
