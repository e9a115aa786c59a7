"""The accuracy of the forecast, against a server in simulated time under overload."""

import random
import statistics
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.forecast.wait import MIN_STEPS, FreedCapacity, QueuedWork, WaitForecast
from tests.engine.forecast.simulation import Costs, Server, Simulated, Source, engine_info, overload

NUM_WARM_UP, NUM_MEASURED = 150, 350
MAX_MEDIAN_ERROR = 0.25


def all_alike(rng: random.Random, number: int) -> Simulated:
    return Simulated(number, 100, 100, 100)


def ends_at_random(rng: random.Random, number: int) -> Simulated:
    return Simulated(number, 100, 512, min(1 + int(rng.expovariate(1 / 60)), 512))


def mixed(rng: random.Random, number: int) -> Simulated:
    max_tokens = rng.choice([16, 32, 64, 128, 256])
    prompt = min(int(rng.lognormvariate(4.5, 1.0)), 2000) + 2
    return Simulated(number, prompt, max_tokens, rng.randint(1, max_tokens))


def long_prompts(rng: random.Random, number: int) -> Simulated:
    return Simulated(number, rng.randint(200, 900), 64, rng.randint(32, 64))


def _relative_errors(admitted: list[Simulated], at_least_s: float = 0.05) -> list[float]:
    return [abs(s.predicted_s - s.waited_s) / s.waited_s for s in admitted if s.waited_s >= at_least_s]


PLACES, BLOCKS = (16, 4096), (64, 150)


@pytest.mark.parametrize("max_waiting", [20, 150])
@pytest.mark.parametrize("limits", [PLACES, BLOCKS], ids=["places", "blocks"])
@pytest.mark.parametrize("source", [all_alike, ends_at_random, mixed, long_prompts])
def test_under_overload_half_the_predictions_are_within_a_quarter(
    source: Source, limits: tuple[int, int], max_waiting: int
) -> None:
    rng = random.Random(1)
    server = Server(engine_info(*limits), rng)
    overload(server, source, rng, rate=80.0, max_waiting=max_waiting, count=NUM_WARM_UP + NUM_MEASURED)
    errors = _relative_errors(server.admitted[NUM_WARM_UP:])
    assert len(errors) > 0.9 * NUM_MEASURED, "it was no overload"
    assert statistics.median(errors) < MAX_MEDIAN_ERROR


@pytest.mark.parametrize("source", [all_alike, mixed])
def test_static_batches_are_waited_for_whole(source: Source) -> None:
    rng = random.Random(1)
    server = Server(engine_info(policy="static_batch"), rng)
    overload(server, source, rng, rate=80.0, max_waiting=80, count=NUM_WARM_UP + NUM_MEASURED)
    assert statistics.median(_relative_errors(server.admitted[NUM_WARM_UP:])) < MAX_MEDIAN_ERROR


def test_a_tenant_with_much_in_the_queue_waits_and_a_new_one_does_not() -> None:
    """The waiting requests of another tenant are not ahead of it."""
    rng = random.Random(1)
    server = Server(engine_info(), rng)
    for number in range(200):
        server.submit(all_alike(rng, number))
    for _ in range(150):
        server.step()
    lone, last = Simulated(1000, 100, 100, 100, tenant="lone"), Simulated(1001, 100, 100, 100)
    for sequence in (lone, last):
        server.submit(sequence)
    while server.queue:
        server.step()
    assert lone.waited_s < 0.2 * last.waited_s
    assert 0.0 < lone.predicted_s < 0.2 * last.waited_s
    assert last.predicted_s == pytest.approx(last.waited_s, rel=0.25)


def test_it_follows_when_the_load_changes() -> None:
    """Outputs become half as long and steps twice as slow; the forecast learns both within a few hundred endings."""
    rng = random.Random(1)
    server = Server(engine_info(), rng)
    overload(server, all_alike, rng, rate=80.0, max_waiting=20, count=150)
    server._costs = Costs(step=0.02, token=0.0002)

    def shorter(rng: random.Random, number: int) -> Simulated:
        return Simulated(10_000 + number, 100, 100, 50)

    overload(server, shorter, rng, rate=80.0, max_waiting=20, count=1200)
    assert statistics.median(_relative_errors(server.admitted[900:])) < 0.1


def test_there_is_no_wait_where_there_is_room() -> None:
    forecast = WaitForecast(engine_info(max_num_seqs=4, num_blocks=20))
    forecast.observe_step(4, 0.01)
    running = [Simulated(0, 10, 100, 100)]
    assert forecast.wait_s(running, QueuedWork(), 5, 5) == 0.0
    assert forecast.wait_s(running, QueuedWork(2, 20, 2, 20, 20), 3, 5) == 0.0
    assert forecast.wait_s(running, QueuedWork(3, 20, 2, 20, 20), 3, 5) > 0.0, "no place"
    assert forecast.wait_s(running, QueuedWork(2, 20, 2, 20, 20), 4, 5) > 0.0, "no blocks"


def test_more_ahead_is_never_less_to_wait() -> None:
    forecast = WaitForecast(engine_info(max_num_seqs=8, num_blocks=100))
    rng = random.Random(3)
    for _ in range(200):
        forecast.observe_step(rng.randint(1, 64), 0.01)
        forecast.observe_end(100, rng.randint(1, 100))
    running = [Simulated(i, 50, 100, 100, num_output=rng.randint(1, 99)) for i in range(8)]
    size = QueuedWork(1, 50, 5, 100, 500)
    waits = [forecast.wait_s(running, QueuedWork().plus(size, number), 5, 60) for number in range(100)]
    assert waits == sorted(waits) and waits[0] > 0.0


def test_a_burst_on_an_idle_engine_waits_by_its_lifetimes() -> None:
    forecast = WaitForecast(engine_info(max_num_seqs=8))
    for _ in range(MIN_STEPS):
        assert not forecast.is_warm
        forecast.observe_step(8, 0.01)
    assert forecast.is_warm
    size = QueuedWork(1, 1, 4, 100, 400)
    assert forecast.wait_s([], QueuedWork().plus(size, 7), 4, 4096) == 0.0
    assert forecast.wait_s([], QueuedWork().plus(size, 8), 4, 4096) == pytest.approx(1.0, rel=0.05)
    assert forecast.wait_s([], QueuedWork().plus(size, 16), 4, 4096) == pytest.approx(2.0, rel=0.05)


def test_it_knows_nothing_before_the_first_step() -> None:
    forecast = WaitForecast(engine_info(max_num_seqs=1))
    assert forecast.wait_s([Simulated(0, 10, 100, 100)], QueuedWork(3, 30, 12, 300, 1200), 4, 0) == 0.0


def test_max_utilization_counts_on_what_is_held_and_not_on_the_worst_case() -> None:
    sequences = [Simulated(i, 10, 500, 500, num_output=250) for i in range(10)]
    waits = {}
    for policy in ("guaranteed_no_evict", "max_utilization"):
        forecast = WaitForecast(engine_info(64, 160, policy=policy))
        forecast.observe_step(10, 0.01)
        waits[policy] = forecast.wait_s(sequences, QueuedWork(), 16, 0)
    assert waits["max_utilization"] == 0.0 < waits["guaranteed_no_evict"]


def test_it_keeps_the_sums_of_its_errors() -> None:
    forecast = WaitForecast(engine_info())
    forecast.record_wait(1.0, 1.5)
    forecast.record_wait(3.0, 2.0)
    assert (forecast.waits_total, forecast.wait_seconds_total, forecast.wait_error_seconds_total) == (2, 3.5, 1.5)


def free_places(free: float, *ends: float) -> FreedCapacity:
    return FreedCapacity(free, np.array(ends), np.ones(len(ends)))


def test_what_is_free_is_had_at_once_and_the_rest_as_it_ends() -> None:
    openings = free_places(1, 10, 20, 30)
    assert [openings.steps_to(amount, 100, 0.0) for amount in (1, 2, 3, 4)] == [0, 10, 20, 30]


def test_alike_lives_give_back_what_they_took_a_life_later() -> None:
    openings = free_places(0, 10, 20)
    assert [openings.steps_to(amount, 100, 0.0) for amount in (3, 4, 5)] == [110, 120, 210]


def test_random_lives_give_back_some_of_it_at_any_time() -> None:
    openings = free_places(0, 10, 20)
    # 2 are held from step 20 on, each for 100 steps in the mean: one more every 50 steps.
    assert openings.steps_to(12, 100, 1.0) - openings.steps_to(11, 100, 1.0) == pytest.approx(50)
    assert openings.steps_to(2, 100, 1.0) <= 20
    # Places of lives that are somewhat alike come in between.
    assert openings.steps_to(11, 100, 0.5) == pytest.approx(
        (openings.steps_to(11, 100, 0.0) + openings.steps_to(11, 100, 1.0)) / 2
    )


def test_with_nobody_running_what_is_free_turns_over() -> None:
    openings = free_places(4)
    assert openings.steps_to(4, 50, 0.0) == openings.steps_to(4, 50, 1.0) == 0
    assert openings.steps_to(5, 50, 0.0) == 50
    assert openings.steps_to(8, 50, 1.0) == 50


@given(st.floats(0, 5), st.lists(st.floats(1, 500), min_size=1, max_size=20), st.floats(1, 300), st.floats(0, 2))
def test_more_takes_longer(free: float, ends: list[float], life: float, variation: float) -> None:
    openings = free_places(free, *sorted(ends))
    steps = [openings.steps_to(amount, life, variation) for amount in range(1, 60)]
    assert all(before <= after + 1e-6 for before, after in pairwise(steps))
    assert steps[0] >= 0.0
