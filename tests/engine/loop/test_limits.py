"""Deadlines, failures of one among many, resumption, priorities and bursts."""

import numpy as np
import pytest

from sluice.engine.arrays import FloatArray
from sluice.engine.frames import Cancel
from sluice.engine.loop import executor
from sluice.engine.runners.base import StepBatch
from sluice.engine.sampling.host_logits import HostLogits
from sluice.engine.scheduling.planner import TARGET_STEP_S
from sluice.engine.types import FinishReason
from sluice.errors import ErrorCode
from tests.engine.fake_runner import EchoRunner, echo, echo_next
from tests.engine.scripted_executor import ScriptedExecutor

pytestmark = pytest.mark.usefixtures("looks_ahead")

# -- deadlines, failures, resumption


def test_a_request_goes_on_where_another_engine_stopped() -> None:
    expected = echo([5, 6, 7], 12)
    bench = ScriptedExecutor()
    bench.submit(1, [5, 6, 7], max_tokens=12, resume_token_ids=expected[:5])
    bench.finish()
    assert bench.tokens[1] == expected[5:]
    assert bench.reasons[1] == [FinishReason.LENGTH]


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (4, [16, 4, 1, 1, 1, 1, 1, 1, 1]),  # the prompt in chunks; four again, of which the last samples; three new
        (3, [16, 8, 1, 1, 1]),  # in chunks too, of which the last samples
    ],
)
def test_resumed_output_is_run_one_token_a_step_as_it_was_before_unless_it_is_long(
    most: int, expected: list[int]
) -> None:
    bench = ScriptedExecutor(max_replayed_tokens=most)
    lengths = []
    original = bench.runner.run

    def note(batch: StepBatch) -> HostLogits:
        lengths.append(len(batch.token_ids))
        return original(batch)

    bench.runner.run = note  # type: ignore[method-assign]
    bench.submit(1, list(range(20)), max_tokens=8, resume_token_ids=echo(list(range(20)), 4))
    bench.finish()
    assert lengths == expected
    assert bench.tokens[1] == echo(list(range(20)), 8)[4:]


def test_who_waits_too_long_is_told_so_on_time() -> None:
    bench = ScriptedExecutor(max_num_seqs=1)
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
    bench = ScriptedExecutor()
    bench.submit(1, [1], max_tokens=40, timeout_s=3.0, queue_timeout_s=1.0)
    bench.step_through()
    bench.now = 2.0
    bench.step()
    assert len(bench.tokens[1]) == 2, "it started in time, so the limit on waiting is met"
    bench.now = 3.0
    bench.step()
    assert [failure.code for failure in bench.failures] == [ErrorCode.DEADLINE]
    assert bench.executor.stats().num_blocks_used == 0


def test_prompt_logprobs_tell_of_every_prompt_token_in_chunks_too() -> None:
    bench = ScriptedExecutor(max_num_batched_tokens=7)
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


def test_context_logits_are_those_of_every_prompt_token_in_chunks_too() -> None:
    bench = ScriptedExecutor(max_num_batched_tokens=7)
    prompt = list(range(1, 19))
    bench.submit(0, prompt, max_tokens=2, returns_context_logits=True)
    bench.finish()
    content = bench.details[0].context_logits
    assert content is not None
    rows = np.frombuffer(content, np.float32).reshape(-1, 4096)
    assert rows.argmax(axis=1).tolist() == [echo_next(prompt[: i + 1], 4096) for i in range(18)]


def test_a_lower_priority_number_goes_first() -> None:
    bench = ScriptedExecutor(max_num_seqs=1)
    bench.submit(1, [1], max_tokens=3)
    bench.step()
    bench.submit(2, [2], max_tokens=3)
    bench.submit(3, [3], max_tokens=3, priority=-1)
    while not bench.tokens[3]:
        bench.step()
    assert not bench.tokens[2]


def test_a_prompt_cancelled_while_it_is_computed_leaves_no_more_than_whole_steps_in_the_index() -> None:
    bench = ScriptedExecutor()
    bench.submit(1, [7] * 18, max_tokens=2)
    original = bench.runner.run

    def run_and_cancel(batch: StepBatch) -> HostLogits:
        bench.script.pending.append(Cancel(1))
        return original(batch)

    bench.runner.run = run_and_cancel  # type: ignore[method-assign]
    bench.step()
    bench.step_through()
    stats = bench.executor.stats()
    num_cached = 4 if bench.runner.looks_ahead else 0  # its first step ends before it hears of the cancel
    assert (stats.num_blocks_used, stats.num_blocks_cached) == (0, num_cached)


def test_a_burst_of_requests_does_not_hold_up_those_who_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "MAX_COMMANDS", 8)
    bench = ScriptedExecutor(max_queued_requests=1000)
    bench.submit(0, [1, 2], max_tokens=20)
    bench.step_through()
    for stream_id in range(1, 41):
        bench.submit(stream_id, [stream_id], max_tokens=1)
    bench.step()
    assert bench.executor.stats().num_waiting <= 16, "the rest is taken in by and by"
    assert len(bench.tokens[0]) == 2
    bench.finish()
    assert all(bench.tokens[i] == echo([i], 1) for i in range(1, 41))


class SlowRunner(EchoRunner):
    """A runner that takes 2 ms for a step and 1 ms for each of its tokens, by the clock of its bench."""

    bench: ScriptedExecutor
    longest_s = 0.0

    def compute(self, batch: StepBatch) -> FloatArray:
        seconds = 0.002 + 0.001 * len(batch.token_ids)
        self.longest_s = max(self.longest_s, seconds)
        self.bench.now += seconds
        return super().compute(batch)


def test_a_long_prompt_beside_a_stream_leaves_its_steps_short() -> None:
    runner = SlowRunner(num_blocks=64, block_size=4, max_model_len=256)
    runner.bench = bench = ScriptedExecutor(runner, max_num_batched_tokens=128)
    bench.submit(0, [1] * 16, max_tokens=40)
    for _ in range(10):
        bench.step()
    runner.longest_s = 0.0
    bench.submit(1, [2] * 200, max_tokens=1)
    while not bench.reasons[1]:
        bench.step()
    assert runner.longest_s <= TARGET_STEP_S + 0.003, "the target and a token"
    assert len(bench.tokens[0]) in range(15, 40), "the stream went on meanwhile"
