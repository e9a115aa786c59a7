"""The size of a chunk: by what tokens cost, and by who waits for the step."""

import pytest

from sluice.engine.scheduling.chunks import (
    FIRST_CHUNK,
    LARGEST_CHUNK,
    LONGEST_STEP_S,
    MAX_RATIO,
    TARGET_STEP_S,
    ChunkLimits,
    StepCosts,
    choose_chunk,
)

BY_LOAD = ChunkLimits(32, LARGEST_CHUNK, is_chosen_by_load=True)
GIVEN = ChunkLimits(32, 700)

FAST, MIDDLING, SLOW = StepCosts(0.002, 2e-6), StepCosts(0.004, 1e-4), StepCosts(0.4, 5e-3)


def test_a_fast_model_takes_the_largest_chunk_beside_streams_or_without() -> None:
    assert [choose_chunk(FAST, BY_LOAD, is_decoding=each) for each in (True, False)] == [LARGEST_CHUNK] * 2


def test_beside_streams_a_step_keeps_its_target() -> None:
    chunk = choose_chunk(MIDDLING, BY_LOAD, is_decoding=True)
    assert 0.004 + chunk * 1e-4 == pytest.approx(TARGET_STEP_S, abs=1e-4)


def test_without_streams_a_step_may_take_longer_but_not_for_ever() -> None:
    assert choose_chunk(MIDDLING, BY_LOAD, is_decoding=False) == LARGEST_CHUNK
    assert choose_chunk(SLOW, BY_LOAD, is_decoding=False) == pytest.approx(LONGEST_STEP_S / 5e-3, abs=1)


def test_a_large_model_gives_prompts_a_multiple_of_decode() -> None:
    assert choose_chunk(SLOW, BY_LOAD, is_decoding=True) == pytest.approx(MAX_RATIO * 0.4 / 5e-3, abs=1)


@pytest.mark.parametrize("is_decoding", [True, False])
def test_a_chunk_has_at_least_a_block(is_decoding: bool) -> None:
    assert choose_chunk(StepCosts(0.001, 1.0), BY_LOAD, is_decoding=is_decoding) == 32


@pytest.mark.parametrize("is_decoding", [True, False])
def test_before_a_cost_is_known_the_chunk_is_middling(is_decoding: bool) -> None:
    assert choose_chunk(StepCosts(), BY_LOAD, is_decoding=is_decoding) == FIRST_CHUNK
    assert choose_chunk(StepCosts(), ChunkLimits(16, 64, is_chosen_by_load=True), is_decoding=is_decoding) == 64


def test_a_size_that_was_given_stands() -> None:
    for costs in (StepCosts(), FAST, MIDDLING, SLOW):
        assert choose_chunk(costs, GIVEN, is_decoding=False) == 700
    assert choose_chunk(StepCosts(), GIVEN, is_decoding=True) == 700
