"""Statistics of engines that follow each other, and of those that serve together."""

import msgspec

from sluice.engine.client.counters import NO_STATS, add_counters, sum_stats, without_gauges
from sluice.engine.statistics import HandoverStats, KvTierStats

TIERS = KvTierStats(host_blocks=3, host_capacity=8, host_hits_total=5, restored_tokens_total=160)
WITH_TIERS = msgspec.structs.replace(NO_STATS, num_running=2, steps_total=7, kv_tiers=TIERS)


def test_a_lost_engine_keeps_its_counters_alone() -> None:
    left = without_gauges(WITH_TIERS)
    assert (left.num_running, left.steps_total) == (0, 7)
    assert left.kv_tiers == KvTierStats(host_hits_total=5, restored_tokens_total=160)


def test_the_next_engine_counts_on() -> None:
    now = add_counters(without_gauges(WITH_TIERS), WITH_TIERS)
    assert (now.num_running, now.steps_total) == (2, 14)
    assert now.kv_tiers == msgspec.structs.replace(TIERS, host_hits_total=10, restored_tokens_total=320)
    assert add_counters(WITH_TIERS, NO_STATS).kv_tiers is None


def test_engines_that_serve_together_are_summed() -> None:
    off = msgspec.structs.replace(WITH_TIERS, kv_tiers=msgspec.structs.replace(TIERS, is_disk_off=True))
    found = sum_stats([WITH_TIERS, NO_STATS, off], 0.25)
    assert (found.num_running, found.steps_total, found.predicted_wait_s) == (4, 14, 0.25)
    assert found.kv_tiers is not None
    assert (found.kv_tiers.host_blocks, found.kv_tiers.host_hits_total, found.kv_tiers.is_disk_off) == (6, 10, True)
    assert sum_stats([NO_STATS], 0.0).kv_tiers is None


def test_what_engines_have_handed_over_is_summed_and_never_lost() -> None:
    one = msgspec.structs.replace(NO_STATS, handover=HandoverStats(sent_blocks_total=3, late_total=1))
    other = msgspec.structs.replace(
        NO_STATS, handover=HandoverStats(received_blocks_total=3, receive_seconds_total=0.5)
    )
    together = HandoverStats(sent_blocks_total=3, received_blocks_total=3, receive_seconds_total=0.5, late_total=1)
    assert sum_stats([one, NO_STATS, other], 0.0).handover == together
    assert add_counters(without_gauges(one), NO_STATS).handover == one.handover
    assert add_counters(without_gauges(one), other).handover == together


def test_counters_go_on_where_the_engine_before_stopped_and_gauges_do_not() -> None:
    before = msgspec.structs.replace(
        NO_STATS, num_running=4, steps_total=10, wait_seconds_total=1.5, predicted_wait_s=2.0
    )
    lost = without_gauges(before)
    assert lost == msgspec.structs.replace(before, num_running=0, predicted_wait_s=0.0)
    now = msgspec.structs.replace(
        NO_STATS, num_running=2, steps_total=3, generation_tokens_total=7, wait_seconds_total=0.5
    )
    expected = {"num_running": 2, "steps_total": 13, "generation_tokens_total": 7, "wait_seconds_total": 2.0}
    assert add_counters(lost, now) == msgspec.structs.replace(NO_STATS, **expected)
