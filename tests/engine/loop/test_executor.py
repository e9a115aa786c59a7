"""The executor's guarantees: each request gets the right tokens and ends once, whatever happens."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.arrays import FloatArray
from engine.frames import Cancel, Shutdown
from engine.runners.base import StepBatch
from engine.sampling.host_logits import HostLogits
from engine.types import FinishReason
from sluice.errors import ErrorCode
from tests.engine.fake_runner import EchoRunner, echo
from tests.engine.scripted_executor import Arrivals, ScriptedExecutor, requests

pytestmark = pytest.mark.usefixtures("looks_ahead")
POLICIES = ("guaranteed_no_evict", "max_utilization", "static_batch")


@pytest.mark.parametrize("policy", POLICIES)
@settings(deadline=None, max_examples=25)
@given(arrivals=requests)
def test_everyone_gets_the_right_tokens_and_ends_once(policy: str, arrivals: Arrivals) -> None:
    bench = ScriptedExecutor(scheduler_policy=policy)
    bench.play(arrivals, 31)
    for stream_id, (prompt, max_tokens, _) in enumerate(arrivals):
        assert bench.tokens[stream_id] == echo(prompt, max_tokens)
        assert bench.reasons[stream_id] == [FinishReason.LENGTH]
    assert bench.executor.stats().num_blocks_free == 24


@pytest.mark.parametrize("policy", POLICIES)
@settings(deadline=None, max_examples=25)
@given(arrivals=requests, cancels=st.lists(st.tuples(st.integers(0, 19), st.integers(0, 40)), max_size=25))
def test_cancel_at_any_point_frees_everything(policy: str, arrivals: Arrivals, cancels: list[tuple[int, int]]) -> None:
    bench = ScriptedExecutor(scheduler_policy=policy)
    bench.play(arrivals, 41, cancels)
    cancelled = {stream_id for stream_id, _ in cancels}
    for stream_id, (prompt, max_tokens, _) in enumerate(arrivals):
        assert len(bench.reasons[stream_id]) == 1
        expected = echo(prompt, max_tokens)
        assert bench.tokens[stream_id] == expected[: len(bench.tokens[stream_id])]
        if stream_id not in cancelled:
            assert bench.tokens[stream_id] == expected
    assert bench.executor.stats().num_blocks_free == 24


def test_cancel_while_the_batch_runs_frees_at_once() -> None:
    bench = ScriptedExecutor()
    bench.submit(1, [1, 2, 3], max_tokens=20)
    bench.step_through()
    held = bench.executor.stats().num_blocks_used
    original = bench.runner.run

    def run_and_cancel(batch: StepBatch) -> HostLogits:
        bench.script.pending.append(Cancel(1))
        return original(batch)

    bench.runner.run = run_and_cancel  # type: ignore[method-assign]
    bench.step_through()
    assert held > 0
    assert bench.executor.stats().num_blocks_used == 0
    assert bench.reasons[1] == [FinishReason.CANCELLED]


def test_a_stop_token_ends_the_sequence_and_is_its_last_token() -> None:
    expected = echo([5, 6], 10)
    bench = ScriptedExecutor()
    bench.submit(1, [5, 6], max_tokens=10, stop_token_ids=(expected[3],))
    bench.finish()
    assert bench.tokens[1] == expected[:4]
    assert bench.reasons[1] == [FinishReason.STOP]


@pytest.mark.parametrize(("ignore_eos", "length"), [(False, 4), (True, 10)])
def test_end_of_sequence_ends_unless_ignored(ignore_eos: bool, length: int) -> None:
    eos = echo([5, 6], 10)[3]
    bench = ScriptedExecutor(EchoRunner(num_blocks=24, block_size=4, max_model_len=64, eos_token_ids=(eos,)))
    bench.submit(1, [5, 6], max_tokens=10, ignore_eos=ignore_eos)
    bench.finish()
    assert len(bench.tokens[1]) == length


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([1] * 64, 1, "the prompt has 64 tokens, but this model's context is 64"),
        ([1] * 40, 30, "so max_tokens may be at most 24"),
        ([9999], 1, "must be between 0 and 4095, got 9999"),
        ([], 1, "at least 1 token"),
    ],
)
def test_what_can_never_be_served_is_refused_at_once(prompt: list[int], max_tokens: int, message: str) -> None:
    bench = ScriptedExecutor()
    bench.submit(1, prompt, max_tokens=max_tokens)
    bench.step()
    assert [failure.code for failure in bench.failures] == [ErrorCode.INVALID]
    assert message in bench.failures[0].message
    assert bench.runner.num_runs == 0


def test_what_never_fits_the_cache_is_refused_and_blocks_nobody() -> None:
    bench = ScriptedExecutor(EchoRunner(num_blocks=4, block_size=4, max_model_len=64))
    bench.submit(1, [1] * 10, max_tokens=8)
    bench.submit(2, [1] * 10, max_tokens=7)
    bench.submit(3, [1] * 17, max_tokens=1)
    bench.finish()
    assert [(failure.stream_id, failure.param) for failure in bench.failures] == [(1, "max_tokens"), (3, "prompt")]
    assert "needs up to 5 blocks, but the whole KV cache has 4 blocks of 4 tokens" in bench.failures[0].message
    assert len(bench.tokens[2]) == 7


def test_a_full_queue_refuses_with_a_time_to_come_back() -> None:
    bench = ScriptedExecutor(max_queued_requests=2, max_num_seqs=3)
    for stream_id in range(6):
        bench.submit(stream_id, [1, 2], max_tokens=5)
    bench.step()
    assert [failure.stream_id for failure in bench.failures] == [5], "three run, two wait"
    failure = bench.failures[0]
    assert failure.code is ErrorCode.OVERLOADED
    assert failure.retry_after_s is not None
    assert failure.retry_after_s >= 1
    bench.finish()
    assert all(len(bench.tokens[stream_id]) == 5 for stream_id in range(5))


class FailingRunner(EchoRunner):
    """Fails its second run."""

    def compute(self, batch: StepBatch) -> FloatArray:
        if self.num_runs == 1:
            self.num_runs += 1
            raise RuntimeError("kernel failed")
        return super().compute(batch)


def test_a_step_that_raises_fails_its_batch_and_serving_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    bench = ScriptedExecutor(FailingRunner(num_blocks=24, block_size=4, max_model_len=64))
    bench.submit(1, [1, 2], max_tokens=5)
    bench.step()
    bench.step_through()
    assert [(failure.stream_id, failure.code) for failure in bench.failures] == [(1, ErrorCode.INTERNAL)]
    assert "kernel" not in bench.failures[0].message, "the log has the trace, the client does not"
    assert "kernel failed" in caplog.text
    assert bench.executor.stats().num_blocks_used == 0
    bench.submit(2, [1, 2], max_tokens=5)
    bench.finish()
    assert bench.tokens[2] == echo([1, 2], 5)


def test_shutdown_ends_all_as_cancelled() -> None:
    bench = ScriptedExecutor(max_num_seqs=1)
    for stream_id in range(3):
        bench.submit(stream_id, [1], max_tokens=50)
    bench.step()
    bench.script.pending.append(Shutdown())
    bench.executor.run()
    assert [bench.reasons[stream_id] for stream_id in range(3)] == [[FinishReason.CANCELLED]] * 3


def test_a_long_prompt_does_not_hold_up_decode() -> None:
    bench = ScriptedExecutor(max_num_batched_tokens=8)
    bench.submit(1, [1, 2], max_tokens=20)
    bench.step_through()
    bench.submit(2, [3] * 40, max_tokens=2)
    for turn in range(2, 7):
        bench.step()
        assert len(bench.tokens[1]) == turn, "one token every step"
    assert not bench.tokens[2]
    bench.finish()
    assert bench.tokens[2] == echo([3] * 40, 2)


def test_counters_count_what_ran() -> None:
    bench = ScriptedExecutor()
    bench.submit(1, [1] * 20, max_tokens=5)
    bench.finish()
    stats = bench.executor.stats()
    assert (stats.prompt_tokens_total, stats.generation_tokens_total, stats.steps_total) == (20, 5, 6)
    assert stats.overhead_seconds_total == stats.runner_seconds_total == 0, "the clock stands still"
