"""The hand-over of prompts between engines as Prometheus families."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, Metric

from sluice.engine.fleet.handover import HandoverOutcome, PromptHandover, SplitReason
from sluice.engine.statistics import HandoverStats

_Read = Callable[[HandoverStats], float]
_FAMILIES: tuple[tuple[str, str, str, Mapping[str, _Read]], ...] = (
    (
        "blocks",
        "KV blocks that engines have sent to others, and those that they got.",
        "direction",
        {"sent": lambda s: s.sent_blocks_total, "received": lambda s: s.received_blocks_total},
    ),
    (
        "bytes",
        "Bytes of those blocks.",
        "direction",
        {"sent": lambda s: s.sent_bytes_total, "received": lambda s: s.received_bytes_total},
    ),
    (
        "seconds",
        "Time that steps waited for copies of what was sent, and time from asking for blocks to the last of them.",
        "direction",
        {"sent": lambda s: s.send_seconds_total, "received": lambda s: s.receive_seconds_total},
    ),
    ("missing_blocks", "KV blocks that the other engine no longer had.", "", {"": lambda s: s.missing_blocks_total}),
    (
        "failures",
        "Times that an engine was asked for blocks and refused, or did not answer in time.",
        "",
        {"": lambda s: s.failed_total},
    ),
    (
        "late_prompts",
        "Prompts that were computed after all, because their blocks had not come in time.",
        "",
        {"": lambda s: s.late_total},
    ),
)


def collect_handovers(stats: Mapping[str, HandoverStats]) -> Iterator[Metric]:
    """Yield the families of engines that have sent or got blocks, `stats` by model."""
    for name, text, label, reads in _FAMILIES:
        family = CounterMetricFamily(
            f"sluice_kv_handover_{name}", text, labels=("model", label) if label else ("model",)
        )
        for model, state in stats.items():
            for value, read in reads.items():
                family.add_metric((model, value) if label else (model,), read(state))
        yield family


def collect_splits(handovers: Mapping[str, PromptHandover]) -> Iterator[Metric]:
    """Yield what was decided about prompts of fleets with prefill replicas, by model, and how that ended."""
    decided = CounterMetricFamily(
        "sluice_prompt_splits",
        "Prompts by whether a prefill replica was to compute them (split), or why not.",
        labels=("model", "reason"),
    )
    ended = CounterMetricFamily(
        "sluice_prompt_handovers",
        "Prompts that prefill replicas were to compute, by how that ended.",
        labels=("model", "outcome"),
    )
    for model, handover in handovers.items():
        if handover.has_prefill_replicas:
            for reason in SplitReason:
                decided.add_metric((model, reason.value), handover.decisions[reason])
            for outcome in HandoverOutcome:
                ended.add_metric((model, outcome.value), handover.outcomes[outcome])
    yield decided
    yield ended
