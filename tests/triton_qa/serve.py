"""Serve as `sluice serve` does, with the switches of Triton's schedulers that its tests hold requests back by.

With TRITONSERVER_DELAY_SCHEDULER=N in the environment a scheduler runs nothing until it has N requests, and with
TRITONSERVER_BACKLOG_DELAY_SCHEDULER=M until M more wait for a slot.
"""

import os
import sys
from collections.abc import Callable
from weakref import WeakSet

from sluice.cli.__main__ import main
from sluice.serving.batching.batcher import Batcher
from sluice.serving.batching.sequences.batcher import SequenceBatcher
from sluice.serving.batching.sequences.slots import DirectBatcher
from sluice.serving.job import InferJob

_released: WeakSet[Batcher | DirectBatcher] = WeakSet()


def hold_back(num_queued: int, num_in_backlog: int) -> None:
    """Let schedulers begin when they have that many requests."""
    start, run_batches, run_slots = SequenceBatcher.start, Batcher._dispatch, DirectBatcher._dispatch

    def start_sequence(self: SequenceBatcher, job: InferJob) -> None:
        start(self, job)
        held = sum(1 for member in self._members.values() if member.sequence.slot is None)
        if len(self._members) - held >= num_queued and held >= num_in_backlog:
            for each in self.batchers:
                if isinstance(each, DirectBatcher) and each not in _released:
                    _released.add(each)
                    each._wakeup.soon()

    def dispatch_batches(self: Batcher) -> None:
        if not self._policy.is_dynamic or self.num_pending >= num_queued:
            _released.add(self)
        if self in _released:
            run_batches(self)

    def dispatch_slots(self: DirectBatcher) -> None:
        if self in _released:
            run_slots(self)

    _replace(SequenceBatcher, "start", start_sequence)
    _replace(Batcher, "_dispatch", dispatch_batches)
    _replace(DirectBatcher, "_dispatch", dispatch_slots)


def _replace(scheduler: type, method: str, function: Callable[..., None]) -> None:
    setattr(scheduler, method, function)


if __name__ == "__main__":
    queued, backlog = (
        int(os.environ.get(f"TRITONSERVER_{name}DELAY_SCHEDULER", 0))  # noqa: TID251 - Triton's scripts set them
        for name in ("", "BACKLOG_")
    )
    if queued:
        hold_back(queued, backlog)
    sys.exit(main())
