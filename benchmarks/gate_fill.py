"""How full the batch of a delegated runtime is behind our gate, where prompts share a prefix: iterations beside those
without a gate, over the capacity rule of TensorRT-LLM with physical blocks. Nothing is timed, so each run is the same.
"""

from benchmarks.figures import Figure, Target
from sluice.engine.delegated.admission import BlockSharing
from tests.stand_ins.gated_runs import GatedRun, shared_prefix_workload

PREFIXES = (0, 1024, 4096, 8192)
"""Tokens that all prompts begin with."""
_RULES = {"TensorRT-LLM 1.2": (False, BlockSharing.RUNNING), "TensorRT-LLM 1.3": (True, BlockSharing.AWAITED)}


def measure(num_requests: int = 192, prefixes: tuple[int, ...] = PREFIXES) -> list[Figure]:
    """Measure two figures for each version and prefix: with shared blocks counted once, and with all of them summed."""
    return [figure for version in _RULES for prefix in prefixes for figure in _figures(version, prefix, num_requests)]


def _figures(version: str, prefix: int, num_requests: int) -> list[Figure]:
    has_credit, sharing = _RULES[version]
    workload = shared_prefix_workload(prefix, num_requests, has_credit=has_credit)
    alone = GatedRun(workload, None).run()
    once = GatedRun(workload, sharing).run() / alone
    summed = GatedRun(workload, BlockSharing.NONE, takes_early=True).run() / alone
    name = f"iterations with the gate, prefix of {prefix}"
    return [
        Figure(name, version, "times", (once,), Target(1.01)),
        Figure(f"{name}, blocks summed", version, "times", (summed,)),
    ]
