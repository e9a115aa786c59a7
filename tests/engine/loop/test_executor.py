"""The executor's guarantees: each request gets the right tokens and ends once, whatever happens."""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.engine.arrays import FloatArray
from sluice.engine.frames import Cancel, Shutdown
from sluice.engine.runners.base import Draws, LaunchedStep, StepBatch
from sluice.engine.sampling.host_logits import HostLogits
from sluice.engine.types import FinishReason
from sluice.errors import ErrorCode
from tests.engine.fake_runner import EchoRunner, echo
from tests.engine.scripted_executor import Arrivals, ScriptedExecutor, requests

pytestmark = pytest.mark.usefixtures("looks_ahead")
POLICIES = ("guaranteed_no_evict", "max_utilization", "static_batch")


class FaultyRunner(EchoRunner):
    """Fails its launches and runs of these numbers. Sequences that begin with 666 get NaN after some tokens."""

    bad_launches: frozenset[int] = frozenset()
    bad_runs: frozenset[int] = frozenset()
    num_launches = 0
    first_nan = 0
    """Tokens that a sequence of 666 has before its first NaN."""

    def launch(self, batch: StepBatch, draws: Draws | None) -> LaunchedStep:
        self.num_launches += 1
        if self.num_launches in self.bad_launches:
            raise RuntimeError("launch failed")
        return super().launch(batch, draws)

    def compute(self, batch: StepBatch) -> FloatArray:
        if self.num_runs + 1 in self.bad_runs:
            self.num_runs += 1
            raise RuntimeError("kernel failed")
        logits = super().compute(batch)
        for row, token_row in enumerate(batch.sampled_rows.tolist()):
            sequence = int(np.searchsorted(batch.subsequence_begins, token_row, side="right")) - 1
            if self.first_token(batch, sequence) == 666 and batch.past_lens[sequence] >= self.first_nan:
                logits[row] = np.nan
        return logits


def faulty(**faults: object) -> FaultyRunner:
    runner = FaultyRunner(num_blocks=24, block_size=4, max_model_len=64)
    for name, value in faults.items():
        setattr(runner, name, value)
    return runner


def sometimes(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(st.just(()), strategy)


faults = sometimes(st.frozensets(st.integers(1, 30), max_size=3))


@pytest.mark.parametrize("policy", POLICIES)
@settings(deadline=None, max_examples=20)
@given(
    arrivals=requests,
    stops=sometimes(st.lists(st.integers(0, 19), min_size=20, max_size=20)),
    cancels=sometimes(st.lists(st.tuples(st.integers(0, 19), st.integers(0, 40)), max_size=12)),
    bad_launches=faults,
    bad_runs=faults,
)
def test_everyone_gets_the_right_tokens_and_ends_once_whatever_fails(
    policy: str,
    arrivals: Arrivals,
    stops: Sequence[int],
    cancels: Sequence[tuple[int, int]],
    bad_launches: Collection[int],
    bad_runs: Collection[int],
) -> None:
    """`stops` are places in the answers; the token there is a stop token, which nobody foresees."""
    bench = ScriptedExecutor(faulty(bad_launches=bad_launches, bad_runs=bad_runs), scheduler_policy=policy)
    expected = {number: echo(prompt, max_tokens) for number, (prompt, max_tokens, _) in enumerate(arrivals)}
    fields: dict[int, dict[str, object]] = {}
    for (number, tokens), place in zip(expected.items(), stops, strict=False):
        stop = tokens[min(place, len(tokens) - 1)]
        fields[number] = {"stop_token_ids": (stop,)}
        expected[number] = tokens[: tokens.index(stop) + 1]
    bench.play(arrivals, 41, cancels, fields)
    failed, cancelled = {failure.stream_id for failure in bench.failures}, {number for number, _ in cancels}
    assert len(failed) == len(bench.failures), "each fails once"
    assert not failed or bad_launches or bad_runs
    for number, tokens in expected.items():
        assert len(bench.reasons[number]) == (number not in failed)
        if number in failed | cancelled:
            assert bench.tokens[number] == tokens[: len(bench.tokens[number])]
        else:
            assert bench.tokens[number] == tokens
            assert bench.reasons[number] == [FinishReason.STOP if number in fields else FinishReason.LENGTH]
    stats = bench.executor.stats()
    assert stats.num_blocks_free == 24
    if policy != "max_utilization":
        assert (stats.preemptions_total, stats.recomputed_tokens_total) == (0, 0)


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
    assert message in bench.failures[0].to_error().message
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


def test_a_step_that_raises_fails_its_batch_and_serving_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    bench = ScriptedExecutor(faulty(bad_runs={2}))
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


@pytest.mark.parametrize("num_good", [0, 8])
def test_logits_that_are_no_numbers_fail_their_own_request_and_are_not_shared(num_good: int) -> None:
    bench = ScriptedExecutor(faulty(first_nan=num_good))
    prompt = [666, 1, 2] if num_good else [666] * 9
    bench.submit(1, prompt, max_tokens=12)
    bench.submit(2, [1, 2], max_tokens=12)
    bench.finish()
    assert [(failure.stream_id, failure.code) for failure in bench.failures] == [(1, ErrorCode.INTERNAL)]
    assert bench.tokens[1] == echo(prompt, 6 if num_good else 0)
    assert bench.tokens[2] == echo([1, 2], 12)
    bench.submit(3, [*prompt, *bench.tokens[1]], max_tokens=1)
    bench.finish()
    assert len(bench.failures) == 2, "what the failed step wrote was computed again"


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
