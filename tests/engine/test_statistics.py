import msgspec

from sluice.engine.loop.recorder import Step, WorkRecorder
from sluice.engine.statistics import (
    BOUNDS,
    NO_STATS,
    EngineStats,
    HandoverStats,
    KvTierStats,
    add_counters,
    sum_stats,
    unpack,
    without_gauges,
)


def stats(histograms: bytes) -> EngineStats:
    return EngineStats(0, 0, 0, 0, 0, 0, 0.0, 0.0, 0, 0, histograms=histograms)


def counted(*steps: tuple[float, int, int]) -> bytes:
    recorder = WorkRecorder()
    for seconds, num_seqs, num_tokens in steps:
        recorder.record_step(Step(num_seqs, num_seqs, 0, num_tokens, seconds, seconds))
    return recorder.histograms()


def test_values_count_by_inclusive_bound() -> None:
    found = unpack(counted((0.001, 4, 9), (0.0011, 5, 5), (99.0, 2000, 1)))
    assert found["step_seconds"].counts == [1, 1, *[0] * (len(BOUNDS["step_seconds"]) - 2), 1]
    assert found["step_seconds"].total == 0.001 + 0.0011 + 99.0
    assert found["step_sequences"].counts[2:4] == [1, 1]
    assert found["step_sequences"].counts[-1] == 1
    assert found["step_sequences"].total == 2009


def test_waits_and_prefills_do_not_mix() -> None:
    recorder = WorkRecorder()
    recorder.record_wait(0.004)
    recorder.record_prefill(0.2)
    totals = {name: (sum(each.counts), each.total) for name, each in unpack(recorder.histograms()).items()}
    none = dict.fromkeys(BOUNDS, (0, 0.0))
    assert totals == none | {"queue_seconds": (1, 0.004), "prefill_seconds": (1, 0.2)}


def test_engines_that_follow_each_other_or_serve_together_add_up() -> None:
    one, other = stats(counted((0.5, 1, 1))), stats(counted((0.25, 1, 1), (0.25, 1, 1)))
    for summed in (add_counters(one, other), sum_stats([one, stats(b""), other], 0.0)):
        seconds = unpack(summed.histograms)["step_seconds"]
        assert (sum(seconds.counts), seconds.total) == (3, 1.0)


def test_counts_of_another_version_are_none() -> None:
    assert all(sum(each.counts) == 0 for each in unpack(b"\0" * 8).values())


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
