import msgspec

from engine.client.base import NO_STATS, add_counters, without_gauges


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
