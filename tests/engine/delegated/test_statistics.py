"""The executor's counters, with a runtime's statistics and without."""

from sluice.engine.delegated.interface import Iteration
from sluice.engine.delegated.statistics import SILENCE_S, StatisticsRecorder, StepEstimator
from sluice.engine.forecast.wait import WaitForecast
from sluice.engine.statistics import IterationStats
from tests.engine.delegated.fake_runtime import INFO, make_request, make_sequence

STATS = IterationStats(7, 12.5, num_context=1, num_generation=2, num_paused=1, context_tokens=40, used_blocks=3)


def test_steps_are_told_by_second_tokens() -> None:
    steps = StepEstimator()
    assert [steps.observe(stream, 0, now) for stream, now in ((1, 0.0), (2, 0.01), (1, 0.5), (2, 0.51))] == [None] * 4
    assert steps.observe(2, 0, 1.0) == (2, 0, 0.5)
    steps.reset()
    assert steps.observe(2, 7, 9.0) is None
    assert steps.observe(2, 0, 9.5) is None
    assert steps.observe(2, 0, 9.75) == (1, 0, 0.25)


def test_tokens_tell_the_time_where_statistics_do_not() -> None:
    recorder = StatisticsRecorder(INFO, WaitForecast(INFO), None, 0.0)
    one = make_sequence(1, make_request(1, 2, 3, max_tokens=5))
    for number, now in enumerate((0.0, 0.1, 0.2, 0.3)):
        recorder.record_output(one, 1, now)
        one.num_output = number + 1
    recorder.record_prompt(one, 1)
    assert (recorder.counters.prompt_tokens, recorder.counters.cached_tokens) == (2, 1)
    assert (recorder.counters.generation_tokens, recorder.counters.steps) == (4, 2)
    assert recorder.blocks_used([one]) == 2
    assert recorder.blocks_used([]) == 0


def test_statistics_tell_the_time_until_they_stop() -> None:
    recorder = StatisticsRecorder(INFO, WaitForecast(INFO), STATS, 0.0)
    one = make_sequence(1, make_request(1, 2, 3, max_tokens=5))
    for now in (0.0, 0.1, 0.2):
        recorder.record_output(one, 1, now)
    counters = recorder.counters
    assert counters.steps == 0
    recorder.record_iteration(Iteration(STATS, 0.0125, num_drafted=8, num_accepted=5), 0.3)
    assert (counters.steps, counters.runner_seconds) == (1, 0.0125)
    assert (counters.draft_tokens, counters.accepted_tokens, counters.preemptions) == (8, 5, 1)
    assert recorder.blocks_used([one]) == 3
    recorder.record_output(one, 1, 0.4 + SILENCE_S)
    assert counters.steps == 2
