"""The pool for instances, by what they need to run."""

from collections.abc import Callable, Sequence

from serving.batching.instances import InstancePool, OnDone
from serving.batching.limited import LimitedPool
from serving.batching.rate_limiter import RateLimiter
from serving.instance import Instance


def open_pool(
    instances: Sequence[Instance], on_done: OnDone, limiter: RateLimiter | None, wake: Callable[[], None]
) -> InstancePool:
    """`wake` is called when one that had to wait for resources may try again.

    Without resources an instance never waits for any, and the plain pool is the faster one.
    """
    if limiter is None or not any(each.placement is not None and each.placement.resources for each in instances):
        return InstancePool(instances, on_done)
    return LimitedPool(instances, on_done, limiter, wake)
