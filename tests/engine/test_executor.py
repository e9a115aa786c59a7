"""The loop's promises, on a runner whose answers depend on every token read back through the block tables."""

from collections import defaultdict

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.errors import ErrorCode
from engine.executor import InflightExecutor
from engine.frames import Cancel, Command, Shutdown, StepFrame, Submit
from engine.runners.base import FloatArray, StepBatch
from engine.types import EventDetail, FinishReason, GenerateRequest, RequestFailed, SamplingParams
from tests.engine.fake_runner import EchoRunner, echo_next


class Script:
    """Commands handed out in order, one list a call; the executor is never made to wait."""

    def __init__(self) -> None:
        self.pending: list[Command] = []

    def receive(self, timeout_s: float) -> list[Command]:
        commands, self.pending = self.pending, []
        return commands


class Bench:
    """An executor with its script and everything that it said."""

    def __init__(
        self, runner: EchoRunner | None = None, draft_runner: EchoRunner | None = None, **limits: object
    ) -> None:
        self.script = Script()
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.reasons: dict[int, list[FinishReason]] = defaultdict(list)
        self.failures: list[RequestFailed] = []
        self.details: dict[int, EventDetail] = {}
        self.now = 0.0
        self.runner = runner or EchoRunner(num_blocks=24, block_size=4, max_model_len=64)
        config = msgspec.convert(
            {"model_path": "", "max_num_seqs": 6, "max_num_batched_tokens": 16, **limits}, EngineConfig
        )
        self.executor = InflightExecutor(self.runner, config, self.script, self.hear, lambda: self.now, draft_runner)

    def hear(self, frame: StepFrame) -> None:
        for event in frame.events:
            assert not self.reasons[event.stream_id], "nothing comes after the end"
            self.tokens[event.stream_id] += event.token_ids
            if event.detail is not None:
                self.details.setdefault(event.stream_id, event.detail)
            if event.finish_reason is not None:
                self.reasons[event.stream_id].append(event.finish_reason)
        self.failures += frame.failures

    def submit(self, stream_id: int, prompt: list[int], **fields: object) -> None:
        """`fields` of the request and of its sampling."""
        of_request = {name: fields.pop(name) for name in GenerateRequest.__struct_fields__ if name in fields}
        params = SamplingParams(**{"temperature": 0.0, **fields})  # type: ignore[arg-type]
        request = GenerateRequest(request_id=str(stream_id), prompt_token_ids=prompt, sampling=params, **of_request)  # type: ignore[arg-type]
        self.script.pending.append(Submit(stream_id, request))

    def step(self) -> None:
        self.executor.step()
        self.executor.check_invariants()

    def finish(self) -> None:
        for _ in range(10_000):
            self.step()
            stats = self.executor.stats()
            if not (stats.num_running or stats.num_waiting or self.script.pending):
                return
        raise AssertionError("requests never end")


def echo(prompt: list[int], count: int, vocab_size: int = 4096) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(echo_next(tokens, vocab_size))
    return tokens[len(prompt) :]


# Few first tokens and few kinds, so that many share prefixes.
prompts = st.builds(
    lambda kind, length, end: [kind] * length + end,
    st.integers(0, 2),
    st.integers(0, 30),
    st.lists(st.integers(0, 4095), min_size=1, max_size=10),
)
requests = st.lists(st.tuples(prompts, st.integers(1, 20), st.integers(0, 30)), min_size=1, max_size=20)


POLICIES = ("guaranteed_no_evict", "max_utilization", "static_batch")


@pytest.mark.parametrize("policy", POLICIES)
@settings(deadline=None, max_examples=50)
@given(arrivals=requests)
def test_everyone_gets_the_right_tokens_and_ends_once(policy: str, arrivals: list[tuple[list[int], int, int]]) -> None:
    bench = Bench(scheduler_policy=policy)
    for turn in range(31):
        for stream_id, (prompt, max_tokens, arrival) in enumerate(arrivals):
            if arrival == turn:
                bench.submit(stream_id, prompt, max_tokens=max_tokens)
        bench.step()
    bench.finish()
    for stream_id, (prompt, max_tokens, _) in enumerate(arrivals):
        assert bench.tokens[stream_id] == echo(prompt, max_tokens)
        assert bench.reasons[stream_id] == [FinishReason.LENGTH]
    assert bench.executor.stats().num_blocks_free == 24


@pytest.mark.parametrize("policy", POLICIES)
@settings(deadline=None, max_examples=50)
@given(arrivals=requests, cancels=st.lists(st.tuples(st.integers(0, 19), st.integers(0, 40)), max_size=25))
def test_cancel_at_any_point_frees_everything(
    policy: str, arrivals: list[tuple[list[int], int, int]], cancels: list[tuple[int, int]]
) -> None:
    bench = Bench(scheduler_policy=policy)
    for turn in range(41):
        for stream_id, (prompt, max_tokens, arrival) in enumerate(arrivals):
            if arrival == turn:
                bench.submit(stream_id, prompt, max_tokens=max_tokens)
        bench.script.pending += [Cancel(stream_id) for stream_id, when in cancels if when == turn]
        bench.step()
    bench.finish()
    cancelled = {stream_id for stream_id, _ in cancels}
    for stream_id, (prompt, max_tokens, _) in enumerate(arrivals):
        assert len(bench.reasons[stream_id]) == 1
        expected = echo(prompt, max_tokens)
        assert bench.tokens[stream_id] == expected[: len(bench.tokens[stream_id])]
        if stream_id not in cancelled:
            assert bench.tokens[stream_id] == expected
    assert bench.executor.stats().num_blocks_free == 24


def test_cancel_while_the_batch_runs_frees_within_the_step() -> None:
    bench = Bench()
    bench.submit(1, [1, 2, 3], max_tokens=20)
    bench.step()
    held = bench.executor.stats().num_blocks_used
    original = bench.runner.run

    def run_and_cancel(batch: StepBatch) -> FloatArray:
        bench.script.pending.append(Cancel(1))
        return original(batch)

    bench.runner.run = run_and_cancel  # type: ignore[method-assign]
    bench.step()
    assert held > 0
    assert bench.executor.stats().num_blocks_used == 0
    assert bench.reasons[1] == [FinishReason.CANCELLED]


def test_a_stop_token_ends_the_sequence_and_is_its_last_token() -> None:
    expected = echo([5, 6], 10)
    bench = Bench()
    bench.submit(1, [5, 6], max_tokens=10, stop_token_ids=(expected[3],))
    bench.finish()
    assert bench.tokens[1] == expected[:4]
    assert bench.reasons[1] == [FinishReason.STOP]


@pytest.mark.parametrize(("ignore_eos", "length"), [(False, 4), (True, 10)])
def test_end_of_sequence_ends_unless_ignored(ignore_eos: bool, length: int) -> None:
    eos = echo([5, 6], 10)[3]
    bench = Bench(EchoRunner(num_blocks=24, block_size=4, max_model_len=64, eos_token_ids=(eos,)))
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
    bench = Bench()
    bench.submit(1, prompt, max_tokens=max_tokens)
    bench.step()
    assert [failure.code for failure in bench.failures] == [ErrorCode.INVALID]
    assert message in bench.failures[0].message
    assert bench.runner.num_runs == 0


def test_what_never_fits_the_cache_is_refused_and_blocks_nobody() -> None:
    bench = Bench(EchoRunner(num_blocks=4, block_size=4, max_model_len=64))
    bench.submit(1, [1] * 10, max_tokens=8)
    bench.submit(2, [1] * 10, max_tokens=7)
    bench.submit(3, [1] * 17, max_tokens=1)
    bench.finish()
    assert [(failure.stream_id, failure.param) for failure in bench.failures] == [(1, "max_tokens"), (3, "prompt")]
    assert "needs up to 5 blocks, but the whole KV cache has 4 blocks of 4 tokens" in bench.failures[0].message
    assert len(bench.tokens[2]) == 7


def test_a_full_queue_refuses_with_a_time_to_come_back() -> None:
    bench = Bench(max_queued_requests=2, max_num_seqs=3)
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

    def run(self, batch: StepBatch) -> FloatArray:
        if self.num_runs == 1:
            self.num_runs += 1
            raise RuntimeError("kernel failed")
        return super().run(batch)


def test_a_step_that_raises_fails_its_batch_and_serving_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(FailingRunner(num_blocks=24, block_size=4, max_model_len=64))
    bench.submit(1, [1, 2], max_tokens=5)
    bench.step()
    bench.step()
    assert [(failure.stream_id, failure.code) for failure in bench.failures] == [(1, ErrorCode.INTERNAL)]
    assert "kernel" not in bench.failures[0].message, "the log has the trace, the client does not"
    assert "kernel failed" in caplog.text
    assert bench.executor.stats().num_blocks_used == 0
    bench.submit(2, [1, 2], max_tokens=5)
    bench.finish()
    assert bench.tokens[2] == echo([1, 2], 5)


def test_shutdown_ends_all_as_cancelled() -> None:
    bench = Bench(max_num_seqs=1)
    for stream_id in range(3):
        bench.submit(stream_id, [1], max_tokens=50)
    bench.step()
    bench.script.pending.append(Shutdown())
    bench.executor.run()
    assert [bench.reasons[stream_id] for stream_id in range(3)] == [[FinishReason.CANCELLED]] * 3


def test_a_long_prompt_does_not_hold_up_decode() -> None:
    bench = Bench(max_num_batched_tokens=8)
    bench.submit(1, [1, 2], max_tokens=20)
    bench.step()
    bench.submit(2, [3] * 40, max_tokens=2)
    for turn in range(2, 7):
        bench.step()
        assert len(bench.tokens[1]) == turn, "one token every step"
    assert not bench.tokens[2]
    bench.finish()
    assert bench.tokens[2] == echo([3] * 40, 2)


def test_counters_count_what_ran() -> None:
    bench = Bench()
    bench.submit(1, [1] * 20, max_tokens=5)
    bench.finish()
    stats = bench.executor.stats()
    assert (stats.prompt_tokens_total, stats.generation_tokens_total, stats.steps_total) == (20, 5, 6)
    assert stats.overhead_seconds_total == stats.runner_seconds_total == 0, "the clock stands still"


# -- prefix reuse


def test_a_known_prefix_is_not_computed_again() -> None:
    bench = Bench()
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


def test_output_is_reused_in_the_next_turn() -> None:
    bench = Bench()
    bench.submit(1, [1, 2, 3], max_tokens=10)
    bench.finish()
    conversation = [1, 2, 3, *bench.tokens[1], 9]
    bench.submit(2, conversation, max_tokens=3)
    bench.finish()
    assert bench.details[2].num_cached_tokens == 12
    assert bench.tokens[2] == echo(conversation, 3)


@pytest.mark.parametrize(("salts", "cached"), [(("a", "a"), 16), (("a", "b"), 0), (("a", ""), 0)])
def test_a_salt_keeps_the_cache_to_itself(salts: tuple[str, str], cached: int) -> None:
    bench = Bench()
    for stream_id, salt in enumerate(salts):
        bench.submit(stream_id, [7] * 18, max_tokens=2, cache_salt=salt)
        bench.finish()
    assert bench.details[1].num_cached_tokens == cached


def test_without_prefix_caching_nothing_is_shared() -> None:
    bench = Bench(enable_prefix_caching=False)
    for stream_id in range(2):
        bench.submit(stream_id, [7] * 18, max_tokens=2)
        bench.finish()
    assert bench.details[1].num_cached_tokens == 0
    assert bench.executor.stats().num_blocks_cached == 0


def test_answers_to_one_prompt_share_its_blocks() -> None:
    bench = Bench(max_num_batched_tokens=32)
    prompt = list(range(1, 26))
    for stream_id in range(6):
        bench.submit(stream_id, prompt, max_tokens=8)
    for _ in range(3):
        bench.step()
    stats = bench.executor.stats()
    assert stats.num_running == 6
    assert stats.num_blocks_used == 6 + 6, "six full blocks of prompt for all, and one each of their own"
    assert stats.prompt_tokens_total == 25 + 5, "one computed it, five only their last token"
    bench.finish()
    assert all(bench.tokens[stream_id] == echo(prompt, 8) for stream_id in range(6))


def test_shared_blocks_are_reserved_once() -> None:
    prompt = list(range(1, 34))
    alone = Bench(EchoRunner(num_blocks=12, block_size=4, max_model_len=64), max_num_batched_tokens=64)
    for stream_id in range(2):  # 10 blocks each in the worst case, 8 of them the same
        alone.submit(stream_id, prompt, max_tokens=8)
    alone.step()
    alone.step()
    assert alone.executor.stats().num_running == 2
    alone.finish()
    assert all(alone.tokens[stream_id] == echo(prompt, 8) for stream_id in range(2))


# -- policies


def crowd(policy: str) -> Bench:
    """Twelve requests that all want far more blocks than there are."""
    bench = Bench(scheduler_policy=policy, max_num_batched_tokens=64)
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
    bench = Bench(scheduler_policy="static_batch")
    bench.submit(1, [1, 2], max_tokens=5)
    bench.step()
    bench.submit(2, [3], max_tokens=5)
    while not bench.reasons[1]:
        bench.step()
        assert not bench.tokens[2]
    bench.finish()
    assert bench.tokens[2] == echo([3], 5)


# -- deadlines, failures, resumption


def test_a_request_goes_on_where_another_engine_stopped() -> None:
    expected = echo([5, 6, 7], 12)
    bench = Bench()
    bench.submit(1, [5, 6, 7], max_tokens=12, resume_token_ids=expected[:5])
    bench.finish()
    assert bench.tokens[1] == expected[5:]
    assert bench.reasons[1] == [FinishReason.LENGTH]


def test_resumed_output_is_run_as_it_was_before_one_token_a_step() -> None:
    bench = Bench()
    lengths = []
    original = bench.runner.run

    def note(batch: StepBatch) -> FloatArray:
        lengths.append(len(batch.token_ids))
        return original(batch)

    bench.runner.run = note  # type: ignore[method-assign]
    bench.submit(1, list(range(20)), max_tokens=8, resume_token_ids=echo(list(range(20)), 4))
    bench.finish()
    assert lengths == [16, 4, 1, 1, 1, 1, 1, 1, 1], "prompt in chunks; four again, of which the last samples; three new"
    assert bench.tokens[1] == echo(list(range(20)), 8)[4:]


def test_who_waits_too_long_is_told_so_on_time() -> None:
    bench = Bench(max_num_seqs=1)
    bench.submit(1, [1], max_tokens=40)
    bench.submit(2, [2], max_tokens=2, queue_timeout_s=5.0)
    bench.step()
    bench.now = 4.9
    bench.step()
    assert not bench.failures
    bench.now = 5.0
    bench.step()
    assert [(failure.stream_id, failure.code) for failure in bench.failures] == [(2, ErrorCode.DEADLINE)]
    assert "longer than its 5 s" in bench.failures[0].message
    bench.finish()
    assert len(bench.tokens[1]) == 40
    assert bench.executor.stats().timeouts_total == 1


def test_a_deadline_ends_a_running_request_and_frees_its_blocks() -> None:
    bench = Bench()
    bench.submit(1, [1], max_tokens=40, timeout_s=3.0, queue_timeout_s=1.0)
    bench.step()
    bench.now = 2.0
    bench.step()
    assert len(bench.tokens[1]) == 2, "it started in time, so the limit on waiting is met"
    bench.now = 3.0
    bench.step()
    assert [failure.code for failure in bench.failures] == [ErrorCode.DEADLINE]
    assert bench.executor.stats().num_blocks_used == 0


class SpoiltRunner(EchoRunner):
    """Answers sequences whose first token is 666 with what is no number."""

    def run(self, batch: StepBatch) -> FloatArray:
        logits = super().run(batch)
        for row, token_row in enumerate(batch.sampled_rows.tolist()):
            sequence = int(np.searchsorted(batch.subsequence_begins, token_row, side="right")) - 1
            if self.first_token(batch, sequence) == 666:
                logits[row] = np.nan
        return logits


def test_logits_that_are_no_numbers_fail_only_their_own_request() -> None:
    bench = Bench(SpoiltRunner(num_blocks=24, block_size=4, max_model_len=64))
    bench.submit(1, [666, 1, 2], max_tokens=5)
    bench.submit(2, [1, 2], max_tokens=5)
    bench.finish()
    assert [(failure.stream_id, failure.code) for failure in bench.failures] == [(1, ErrorCode.INTERNAL)]
    assert bench.tokens[2] == echo([1, 2], 5)


def test_prompt_logprobs_tell_of_every_prompt_token_in_chunks_too() -> None:
    bench = Bench(max_num_batched_tokens=7)
    prompt = list(range(1, 19))
    for stream_id in range(2):
        bench.submit(stream_id, prompt, max_tokens=2, prompt_logprobs=1, logprobs=0)
        bench.finish()
        found = bench.details[stream_id].prompt_logprobs
        assert found is not None
        assert found[0] is None
        assert [entry.token_id for entry in found[1:] if entry is not None] == prompt[1:]
        best = [entry.top[0][0] for entry in found[1:] if entry is not None]
        assert best == [echo_next(prompt[: i + 1], 4096) for i in range(17)]
    assert bench.details[1].num_cached_tokens == 0, "only computing a prompt tells how likely it is"


def test_a_lower_priority_number_goes_first() -> None:
    bench = Bench(max_num_seqs=1)
    bench.submit(1, [1], max_tokens=3)
    bench.step()
    bench.submit(2, [2], max_tokens=3)
    bench.submit(3, [3], max_tokens=3, priority=-1)
    while not bench.tokens[3]:
        bench.step()
    assert not bench.tokens[2]


def test_a_prompt_cancelled_while_it_is_computed_leaves_nothing_in_the_index() -> None:
    bench = Bench()
    bench.submit(1, [7] * 18, max_tokens=2)
    original = bench.runner.run

    def run_and_cancel(batch: StepBatch) -> FloatArray:
        bench.script.pending.append(Cancel(1))
        return original(batch)

    bench.runner.run = run_and_cancel  # type: ignore[method-assign]
    bench.step()
    stats = bench.executor.stats()
    assert (stats.num_blocks_used, stats.num_blocks_cached) == (0, 0)


def test_a_burst_of_requests_does_not_hold_up_those_who_decode() -> None:
    bench = Bench(max_queued_requests=1000)
    bench.submit(0, [1, 2], max_tokens=20)
    bench.step()
    for stream_id in range(1, 201):
        bench.submit(stream_id, [stream_id], max_tokens=1)
    bench.step()
    assert bench.executor.stats().num_waiting < 150, "the rest is taken in by and by"
    assert len(bench.tokens[0]) == 2
    bench.finish()
    assert all(bench.tokens[i] == echo([i], 1) for i in range(1, 201))
