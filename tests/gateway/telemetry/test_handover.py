"""The numbers of prompts that are handed over as a scraper reads them."""

from sluice.engine.fleet.choosing import ReplicaChooser
from sluice.engine.fleet.handover import HandoverOutcome, PromptHandover, SplitReason
from sluice.engine.fleet.router import DEFAULT_ROUTING
from sluice.engine.statistics import HandoverStats
from sluice.gateway.telemetry.handover import collect_handovers, collect_splits

# Different numbers, so that none can stand for another.
STATS = HandoverStats(1, 2, 3.5, 4, 5, 6.5, 7, 8, 9)
EXPECTED = {
    ("sluice_kv_handover_blocks_total", "sent"): 1,
    ("sluice_kv_handover_bytes_total", "sent"): 2,
    ("sluice_kv_handover_seconds_total", "sent"): 3.5,
    ("sluice_kv_handover_blocks_total", "received"): 4,
    ("sluice_kv_handover_bytes_total", "received"): 5,
    ("sluice_kv_handover_seconds_total", "received"): 6.5,
    ("sluice_kv_handover_missing_blocks_total", ""): 7,
    ("sluice_kv_handover_failures_total", ""): 8,
    ("sluice_kv_handover_late_prompts_total", ""): 9,
}


def test_each_number_goes_by_its_own_name() -> None:
    samples = [sample for family in collect_handovers({"m": STATS}) for sample in family.samples]
    assert {(each.name, each.labels.get("direction", "")): each.value for each in samples} == EXPECTED


class _PrefillHandover(PromptHandover):
    has_prefill_replicas = True


def test_decisions_and_outcomes_of_fleets_with_prefill_replicas_are_counted() -> None:
    fleet, plain = (
        _PrefillHandover(ReplicaChooser([], DEFAULT_ROUTING)),
        PromptHandover(ReplicaChooser([], DEFAULT_ROUTING)),
    )
    fleet.decisions[SplitReason.SHORT] += 3
    fleet.outcomes[HandoverOutcome.LATE] += 2
    samples = [sample for family in collect_splits({"m": fleet, "plain": plain}) for sample in family.samples]
    assert {each.labels["model"] for each in samples} == {"m"}
    counted = {tuple(each.labels.values())[1]: each.value for each in samples if each.value}
    assert counted == {"short": 3.0, "late": 2.0}
    assert len(samples) == len(SplitReason) + len(HandoverOutcome)
