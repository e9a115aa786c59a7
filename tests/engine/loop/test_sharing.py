"""Blocks that several requests share, and the policies when there are too few blocks."""

import pytest

from tests.engine.fake_runner import EchoRunner, echo
from tests.engine.scripted_executor import ScriptedExecutor

pytestmark = pytest.mark.usefixtures("looks_ahead")

# -- prefix reuse


def test_a_known_prefix_is_not_computed_again() -> None:
    bench = ScriptedExecutor()
    prompt = list(range(1, 19))
    bench.submit(1, prompt, max_tokens=4)
    bench.finish()
    assert bench.details[1].num_cached_tokens == 0
    computed = bench.executor.stats().prompt_tokens_total
    bench.submit(2, prompt, max_tokens=4)
    bench.finish()
    assert bench.tokens[2] == bench.tokens[1] == echo(prompt, 4)
    assert bench.details[2].num_cached_tokens == 16, "four full blocks of 4; the last token is always computed"
    stats = bench.executor.stats()
    assert (stats.prompt_tokens_total - computed, stats.cached_tokens_total) == (2, 16)


def test_the_last_token_is_computed_though_its_block_is_full_and_known() -> None:
    bench = ScriptedExecutor()
    for stream_id in range(2):
        bench.submit(stream_id, list(range(16)), max_tokens=4)
        bench.finish()
    assert bench.tokens[1] == bench.tokens[0] == echo(list(range(16)), 4)
    assert bench.details[1].num_cached_tokens == 12


def test_output_is_reused_in_the_next_turn() -> None:
    bench = ScriptedExecutor()
    bench.submit(1, [1, 2, 3], max_tokens=10)
    bench.finish()
    conversation = [1, 2, 3, *bench.tokens[1], 9]
    bench.submit(2, conversation, max_tokens=3)
    bench.finish()
    assert bench.details[2].num_cached_tokens == 12
    assert bench.tokens[2] == echo(conversation, 3)


@pytest.mark.parametrize(("salts", "cached"), [(("a", "a"), 16), (("a", "b"), 0), (("a", ""), 0)])
def test_a_salt_keeps_the_cache_to_itself(salts: tuple[str, str], cached: int) -> None:
    bench = ScriptedExecutor()
    for stream_id, salt in enumerate(salts):
        bench.submit(stream_id, [7] * 18, max_tokens=2, cache_salt=salt)
        bench.finish()
    assert bench.details[1].num_cached_tokens == cached


def test_without_prefix_caching_nothing_is_shared() -> None:
    bench = ScriptedExecutor(enable_prefix_caching=False)
    for stream_id in range(2):
        bench.submit(stream_id, [7] * 18, max_tokens=2)
        bench.finish()
    assert bench.details[1].num_cached_tokens == 0
    assert bench.executor.stats().num_blocks_cached == 0


def test_answers_to_one_prompt_share_its_blocks() -> None:
    bench = ScriptedExecutor(max_num_batched_tokens=32)
    prompt = list(range(1, 26))
    for stream_id in range(6):
        bench.submit(stream_id, prompt, max_tokens=8)
    for _ in range(2):
        bench.step()
    bench.step_through()
    stats = bench.executor.stats()
    assert stats.num_running == 6
    assert stats.num_blocks_used == 6 + 6, "six full blocks of prompt for all, and one each of their own"
    assert stats.prompt_tokens_total == 25 + 5, "one computed it, five only their last token"
    bench.finish()
    assert all(bench.tokens[stream_id] == echo(prompt, 8) for stream_id in range(6))


def test_shared_blocks_are_reserved_once() -> None:
    prompt = list(range(1, 34))
    alone = ScriptedExecutor(EchoRunner(num_blocks=12, block_size=4, max_model_len=64), max_num_batched_tokens=64)
    for stream_id in range(2):  # 10 blocks each in the worst case, 8 of them the same
        alone.submit(stream_id, prompt, max_tokens=8)
    alone.step()
    alone.step_through()
    stats = alone.executor.stats()
    assert (stats.num_running, stats.num_blocks_reserved) == (2, 12)
    alone.finish()
    assert all(alone.tokens[stream_id] == echo(prompt, 8) for stream_id in range(2))


def test_a_pause_frees_only_blocks_that_nobody_else_holds() -> None:
    bench = ScriptedExecutor(max_num_batched_tokens=64)
    for stream_id in range(2):
        bench.submit(stream_id, list(range(18)), max_tokens=20)
    while len(bench.tokens[1]) < 2:
        bench.step()
    running, kv = bench.executor._running.values(), bench.executor.kv
    shared = [each.num_allocated_blocks - kv.num_private_blocks(each) for each in running]
    assert shared == [4, 4], "the full blocks of the prompt"


# -- policies


def crowd(policy: str) -> ScriptedExecutor:
    """Submit twelve requests that together need far more blocks than there are."""
    bench = ScriptedExecutor(scheduler_policy=policy, max_num_batched_tokens=64)
    for stream_id in range(12):
        bench.submit(stream_id, [stream_id, *range(9)], max_tokens=30)
    bench.finish()
    assert all(bench.tokens[i] == echo([i, *range(9)], 30) for i in range(12))
    return bench


@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "static_batch"])
def test_whoever_started_is_never_paused(policy: str) -> None:
    stats = crowd(policy).executor.stats()
    assert (stats.preemptions_total, stats.recomputed_tokens_total) == (0, 0)


def test_max_utilization_pauses_recomputes_and_gives_the_same_tokens() -> None:
    stats = crowd("max_utilization").executor.stats()
    assert stats.preemptions_total > 0
    assert stats.recomputed_tokens_total > 0


def test_a_static_batch_is_not_joined() -> None:
    bench = ScriptedExecutor(scheduler_policy="static_batch")
    bench.submit(1, [1, 2], max_tokens=5)
    bench.step()
    bench.submit(2, [3], max_tokens=5)
    while not bench.reasons[1]:
        bench.step()
        assert not bench.tokens[2]
    bench.finish()
    assert bench.tokens[2] == echo([3], 5)
