"""The strategies as configured: a lane for each instance that takes requests."""

from collections.abc import Callable, Sequence

from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.batching.batcher import Batcher
from serving.batching.controls import ControlInputs
from serving.batching.keys import BatchKeys
from serving.batching.policy import sequence_policy_of
from serving.batching.rate_limiter import RateLimiter
from serving.batching.sequences.direct import DirectLane, slot_policy_of
from serving.batching.sequences.lanes import Admit, GuardedInstance, Lane, OldestLane
from serving.instance import Instance
from serving.job import Job


def lanes_of(
    config: ModelConfig,
    instances: Sequence[Instance],
    keys: BatchKeys,
    controls: ControlInputs,
    admit: Admit,
    on_executed: Callable[[list[Job]], None],
    limiter: RateLimiter | None,
) -> list[Lane]:
    """One for each of `instances`. Where no strategy is chosen it is the direct one."""
    if not config.sequence_batching.HasField("oldest"):
        policy = slot_policy_of(config)
        return [DirectLane(each, policy, keys, controls, admit, on_executed, limiter) for each in instances]
    oldest = config.sequence_batching.oldest
    num_slots = oldest.max_candidate_sequences or max(config.max_batch_size, 1)
    batch_policy = sequence_policy_of(config)
    return [
        OldestLane(
            each,
            num_slots,
            Batcher(batch_policy, keys, [GuardedInstance(each, admit)], on_executed, limiter),
            preserves_order=oldest.preserve_ordering,
        )
        for each in instances
    ]
