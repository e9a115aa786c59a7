import pytest

from sluice.engine.forecast.learning import PrefillPace
from sluice.engine.scheduling.planner import TARGET_STEP_S, ChunkLimits

BLOCK, MOST = 32, 512


def learned(decode_s: float, token_s: float) -> PrefillPace:
    pace = PrefillPace(ChunkLimits(BLOCK, MOST))
    for _ in range(100):
        pace.observe(0, decode_s)
        pace.observe(pace.max_prefill_tokens()[0], decode_s + pace.max_prefill_tokens()[0] * token_s)
    return pace


def test_before_the_first_prompt_there_is_no_bound() -> None:
    pace = PrefillPace(ChunkLimits(BLOCK, MOST))
    assert pace.max_prefill_tokens()[0] == MOST
    pace.observe(0, 0.01)
    assert pace.max_prefill_tokens()[0] == MOST


def test_prompts_fill_a_step_up_to_the_target() -> None:
    assert learned(0.004, 0.0001).max_prefill_tokens()[0] == pytest.approx((TARGET_STEP_S - 0.004) / 0.0001, abs=1)


def test_a_fast_model_takes_whole_steps() -> None:
    assert learned(0.002, 0.00001).max_prefill_tokens()[0] == MOST


def test_a_slow_model_gives_prompts_a_multiple_of_decode() -> None:
    assert learned(0.06, 0.001).max_prefill_tokens()[0] == pytest.approx(180, abs=1)


def test_a_prompt_always_gets_a_block() -> None:
    assert learned(0.001, 0.01).max_prefill_tokens()[0] == BLOCK


def test_one_interrupted_step_changes_little() -> None:
    pace = learned(0.004, 0.0001)
    before = pace.max_prefill_tokens()[0]
    pace.observe(before, 5.0)
    pace.observe(0, 5.0)
    assert pace.max_prefill_tokens()[0] > 0.8 * before


def test_a_first_step_that_was_slow_is_forgotten() -> None:
    pace = PrefillPace(ChunkLimits(BLOCK, MOST))
    pace.observe(8, 2.0)
    assert pace.max_prefill_tokens()[0] == BLOCK
    for _ in range(100):
        pace.observe(0, 0.004)
        pace.observe(pace.max_prefill_tokens()[0], 0.004 + pace.max_prefill_tokens()[0] * 0.0001)
    assert pace.max_prefill_tokens()[0] > 250
