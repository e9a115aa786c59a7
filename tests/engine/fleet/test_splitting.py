"""Which prompts a prefill replica computes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.engine.fleet.handover import (
    PATIENCE,
    SLACK_S,
    SplitReason,
    choose_split,
    needs_whole_prompt,
    prompt_request,
)
from tests.engine.parts import make_request


@pytest.mark.parametrize(
    ("num_prompt", "num_cached", "reason"),
    [
        (512, 0, SplitReason.SHORT),  # its last block is computed where it is needed
        (545, 0, SplitReason.SPLIT),
        (545, 64, SplitReason.SHORT),
        (5000, 4600, SplitReason.SHORT),
        (1, 0, SplitReason.SHORT),
    ],
)
def test_what_is_left_to_compute_decides(num_prompt: int, num_cached: int, reason: SplitReason) -> None:
    assert choose_split(num_prompt, num_cached, block_size=32, prefill_s=0.1).reason is reason


def test_less_than_a_block_is_never_handed_over() -> None:
    assert choose_split(33, 0, block_size=32, min_tokens=1, prefill_s=0.0).reason is SplitReason.SPLIT
    assert choose_split(32, 0, block_size=32, min_tokens=1, prefill_s=0.0).reason is SplitReason.SHORT


def test_it_takes_a_replica_that_is_not_too_slow() -> None:
    assert choose_split(2000, 0, block_size=32).reason is SplitReason.NOBODY
    assert choose_split(2000, 0, block_size=32, is_whole=True, prefill_s=0.0).reason is SplitReason.WHOLE
    limit_s = PATIENCE * 2.0 + SLACK_S
    assert choose_split(2000, 0, block_size=32, compute_s=2.0, prefill_s=limit_s) == (SplitReason.SPLIT, limit_s)
    assert choose_split(2000, 0, block_size=32, compute_s=2.0, prefill_s=limit_s + 0.1).reason is SplitReason.BUSY


@given(st.integers(1, 5000), st.integers(0, 5000), st.integers(1, 2000), st.floats(0, 100), st.floats(0, 100))
def test_more_to_compute_never_speaks_against_it(
    num_prompt: int, num_cached: int, min_tokens: int, compute_s: float, prefill_s: float
) -> None:
    def is_split(num_prompt: int, compute_s: float) -> bool:
        choice = choose_split(
            num_prompt, num_cached, block_size=32, min_tokens=min_tokens, compute_s=compute_s, prefill_s=prefill_s
        )
        assert choice.limit_s >= prefill_s or choice.reason is not SplitReason.SPLIT
        return choice.reason is SplitReason.SPLIT

    if is_split(num_prompt, compute_s):
        assert is_split(num_prompt + 100, compute_s + 1.0)
        assert num_prompt - num_cached > min_tokens


def test_a_prompt_keeps_what_its_blocks_depend_on() -> None:
    request = make_request(
        [*range(100)],
        cache_salt="s",
        adapter="a",
        tenant="t",
        priority=3,
        timeout_s=9.0,
        max_tokens=50,
        temperature=1.0,
    )
    part = prompt_request(request, 96, 4.0)
    assert part.prompt_token_ids == [*range(96)]
    assert (part.cache_salt, part.adapter, part.tenant, part.priority) == ("s", "a", "t", 3)
    assert (part.timeout_s, part.sampling.max_tokens, part.sampling.temperature) == (4.0, 1, 0.0)
    assert prompt_request(request, 96, 10.0).timeout_s == 4.5
    assert prompt_request(make_request([*range(100)], queue_timeout_s=2.0), 96, 10.0).timeout_s == 1.0


@pytest.mark.parametrize(
    ("fields", "is_whole"),
    [({}, False), ({"prompt_logprobs": 1}, True), ({"logprobs": 1}, False), ({"returns_context_logits": True}, True)],
)
def test_who_needs_the_logits_of_the_prompt_computes_it(fields: dict[str, object], is_whole: bool) -> None:
    assert needs_whole_prompt(make_request([1, 2], "r", **fields)) is is_whole
