"""What `dynamic_batching` says of a queue, for an engine that batches in flight."""

from dataclasses import dataclass

from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelQueuePolicy


@dataclass(frozen=True, slots=True)
class QueueRules:
    """How requests wait for the engine where they do not say themselves. `num_levels` 0: any priority is one."""

    num_levels: int = 0
    default_level: int = 0
    timeout_us: int = 0

    def priority(self, asked: int) -> int:
        """The priority of a request that asked for `asked`; what is none of the levels is the default one."""
        return asked if not self.num_levels or 1 <= asked <= self.num_levels else self.default_level


def queue_rules(config: ModelConfig) -> QueueRules:
    batching = config.dynamic_batching
    timeout_us = batching.default_queue_policy.default_timeout_microseconds
    return QueueRules(batching.priority_levels, batching.default_priority_level, timeout_us)


def unused_rules(config: ModelConfig) -> list[str]:
    """Notes on what an engine that batches in flight has no use for."""
    batching, notes = config.dynamic_batching, []
    if batching.preferred_batch_size or batching.max_queue_delay_microseconds:
        notes.append("dynamic_batching: a request joins the running batch at its next step")
    if batching.preserve_ordering:
        notes.append("dynamic_batching.preserve_ordering: an answer is given when it is complete")
    if batching.priority_queue_policy:
        notes.append("dynamic_batching.priority_queue_policy: the default policy is every level's")
    policy = batching.default_queue_policy
    if policy.default_timeout_microseconds and policy.timeout_action == ModelQueuePolicy.DELAY:
        notes.append("dynamic_batching.default_queue_policy.timeout_action: what waited too long is refused")
    if sum(group.count for group in config.instance_group) > 1:
        notes.append("instance_group: one engine serves all requests, side by side")
    return notes
