from sluice.engine.client.counters import add_counters, sum_stats
from sluice.engine.histograms import BOUNDS, unpack
from sluice.engine.loop.recorder import Step, WorkRecorder
from sluice.engine.statistics import EngineStats


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
