"""Drafts change only the speed."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sluice.engine.arrays import FloatArray
from sluice.engine.runners.base import StepBatch
from sluice.engine.sequence import Sequence
from sluice.engine.speculation.drafter import FIRST_PAUSE, DraftGate, TokenPrices
from sluice.engine.speculation.ngram import NgramIndex
from sluice.engine.types import EngineInfo, GenerateRequest, SamplingParams, ThinkingBudget
from tests.engine.fake_runner import EchoRunner, echo
from tests.engine.scripted_executor import Arrivals, ScriptedExecutor, requests

CHEAP, DEAR = TokenPrices(1.0, 0.01), TokenPrices(1.0, 0.99)


class CopyRunner(EchoRunner):
    """Repeats the context from its beginning with occasional errors, which suits prompt lookup."""

    def compute(self, batch: StepBatch) -> FloatArray:
        logits = super().compute(batch)
        logits[:] = 0
        for row, token_row in enumerate(batch.sampled_rows.tolist()):
            i = int(np.searchsorted(batch.subsequence_begins, token_row, side="right")) - 1
            position = int(batch.past_lens[i]) + token_row - int(batch.subsequence_begins[i]) + 1
            table = batch.block_indices[batch.block_indices_begins[i] : batch.block_indices_begins[i + 1]]
            source = position % 8
            token = int(self._cache[table[source // self.info.block_size], source % self.info.block_size])
            logits[row, token if position % 11 else 5] = 1.0
        return logits


def copy_runner() -> CopyRunner:
    return CopyRunner(num_blocks=64, block_size=4, max_model_len=128)


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 1.0, "seed": 7},
        {"repetition_penalty": 1.3},
        {"thinking_token_budget": ThinkingBudget(2, (102,), (200, 201))},
    ],
)
def test_the_tokens_are_those_without_drafts(sampling: dict[str, object]) -> None:
    plain, drafted = (
        ScriptedExecutor(copy_runner(), speculation=kind, max_num_batched_tokens=64) for kind in ("off", "ngram")
    )
    for bench in (plain, drafted):
        for stream_id in range(4):
            bench.submit(stream_id, [10 + stream_id, *range(100, 107)], max_tokens=60, **sampling)
        bench.finish()
    assert drafted.tokens == plain.tokens
    stats = drafted.executor.stats()
    if not sampling:
        assert 0 < stats.accepted_tokens_total < stats.draft_tokens_total, "some right, some wrong"
        assert stats.steps_total < 0.7 * plain.executor.stats().steps_total


class WrongNowAndThen(EchoRunner):
    """A draft model that agrees with EchoRunner except at every seventh step."""

    def compute(self, batch: StepBatch) -> FloatArray:
        logits = super().compute(batch)
        return np.roll(logits, 1, axis=1) if self.num_runs % 7 == 0 else logits


def draft_bench(num_blocks: int = 24, **limits: object) -> ScriptedExecutor:
    runners = (EchoRunner, WrongNowAndThen)
    model, draft = (kind(num_blocks=num_blocks, block_size=4, max_model_len=64) for kind in runners)
    return ScriptedExecutor(model, draft, speculation="draft_model", **limits)


def test_a_draft_model_shares_the_block_tables_and_saves_steps() -> None:
    bench = draft_bench(num_blocks=64, max_num_batched_tokens=64)
    for stream_id in range(3):
        bench.submit(stream_id, [stream_id, 5, 6, 7], max_tokens=40)
    bench.finish()
    assert all(bench.tokens[i] == echo([i, 5, 6, 7], 40) for i in range(3))
    stats = bench.executor.stats()
    assert 0 < stats.accepted_tokens_total < stats.draft_tokens_total
    assert stats.steps_total < 30


@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
def test_drafts_that_need_several_blocks_never_take_more_than_there_are(
    policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    bench = draft_bench(scheduler_policy=policy, num_speculative_tokens=12, max_num_batched_tokens=64)
    for stream_id in range(10):
        bench.submit(stream_id, [stream_id, *range(9)], max_tokens=30)
    bench.finish()
    assert all(bench.tokens[i] == echo([i, *range(9)], 30) for i in range(10))
    assert "drafting failed" not in caplog.text
    assert bench.executor.stats().accepted_tokens_total > 0


def test_a_draft_model_catches_up_with_a_long_context_in_pieces() -> None:
    bench = draft_bench(max_num_batched_tokens=8)
    prompt = list(range(30))
    bench.submit(1, prompt, max_tokens=30)
    bench.finish()
    assert bench.tokens[1] == echo(prompt, 30)
    assert bench.executor.stats().accepted_tokens_total > 0


@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
@pytest.mark.parametrize("speculation", ["draft_model", "ngram"])
@settings(deadline=None, max_examples=15)
@given(arrivals=requests)
@example(arrivals=[([0], 1, 0), ([1] * 21 + [0] * 8, 1, 1), ([0] * 36, 6, 0), ([2] * 18 + [0], 3, 0)])
def test_every_promise_holds_with_drafts(speculation: str, policy: str, arrivals: Arrivals) -> None:
    is_ngram = speculation == "ngram"
    bench = (
        ScriptedExecutor(scheduler_policy=policy, speculation=speculation)
        if is_ngram
        else draft_bench(scheduler_policy=policy)
    )
    bench.play(arrivals)
    for stream_id, (prompt, max_tokens, _) in enumerate(arrivals):
        assert bench.tokens[stream_id] == echo(prompt, max_tokens)
    assert bench.executor.stats().num_blocks_free == 24


def test_a_stop_token_among_the_drafts_ends_the_sequence_there() -> None:
    bench = ScriptedExecutor(copy_runner(), speculation="ngram")
    bench.submit(1, list(range(100, 108)), max_tokens=60, stop_token_ids=(105,))
    bench.finish()
    assert bench.tokens[1][-1] == 105
    assert 105 not in bench.tokens[1][:-1]


@pytest.mark.parametrize("num_wrong", [0, 3])
def test_a_prediction_is_drafted_from(num_wrong: int) -> None:
    """Its first tokens may be others: the output is found in it all the same."""
    prompt, num_tokens = [1, 5, 6, 7], 40
    expected = echo(prompt, num_tokens)
    predicted = [9] * num_wrong + expected
    plain, drafted = (ScriptedExecutor(speculation="ngram", max_num_batched_tokens=64) for _ in range(2))
    for bench, fields in ((plain, {}), (drafted, {"predicted_token_ids": predicted})):
        bench.submit(1, prompt, max_tokens=num_tokens, **fields)
        bench.finish()
        assert bench.tokens[1] == expected
    stats = drafted.executor.stats()
    assert stats.accepted_tokens_total > 20
    assert stats.steps_total < 0.7 * plain.executor.stats().steps_total


def sequence_of(token_ids: list[int]) -> Sequence:
    runner = EchoRunner()
    info = EngineInfo(
        **{field: getattr(runner.info, field) for field in runner.info.__slots__},
        max_num_seqs=1,
        max_num_batched_tokens=1,
        load_seconds=0.0,
    )
    params = SamplingParams(max_tokens=100, temperature=0.0)
    sequence = Sequence(1, GenerateRequest(request_id="", prompt_token_ids=token_ids, sampling=params), info, 0.0)
    sequence.start_sampling(info.vocab_size, None)
    return sequence


def test_lookup_finds_what_followed_the_longest_and_latest_run() -> None:
    assert NgramIndex().find_continuation(sequence_of([1, 2, 3, 4, 9, 1, 2, 3, 4]), 3) == [9, 1, 2]
    assert NgramIndex().find_continuation(sequence_of([7, 3, 4, 5, 1, 2, 3, 4, 8, 3, 4, 6, 1, 2, 3, 4]), 2) == [8, 3]
    assert NgramIndex().find_continuation(sequence_of([3, 4, 5, 3, 4, 6, 3, 4]), 2) == [6, 3], "the latest"
    assert NgramIndex().find_continuation(sequence_of([1, 2, 3]), 2) == []
    assert NgramIndex().find_continuation(sequence_of([1]), 2) == []


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.lists(st.integers(0, 3), max_size=20))
def test_lookup_learns_as_it_goes(prompt: list[int], output: list[int]) -> None:
    sequence, index = sequence_of(prompt), NgramIndex()
    for token_id in output:
        index.find_continuation(sequence, 4)
        sequence.append(token_id)
    assert index.find_continuation(sequence, 4) == NgramIndex().find_continuation(sequence_of(prompt + output), 4)


def test_lookups_are_skipped_after_many_without_a_match() -> None:
    sequence, index = sequence_of([0]), NgramIndex()
    looks = []
    for token_id in range(1, 60):
        sequence.append(token_id)
        looks.append(not index.skips_step())
        if looks[-1]:
            assert index.find_continuation(sequence, 4) == []
    assert looks[:16] == [True] * 16
    assert looks[16:24] == [False, False, False, True] * 2
    for token_id in (1, 2, 3, 4):
        sequence.append(token_id)
    assert index.find_continuation(sequence, 2) == [5, 6], "it has learned all the same"
    assert not index.skips_step()


def test_the_gate_checks_as_many_as_pay() -> None:
    gate = DraftGate()
    assert gate.num_drafts(4, CHEAP) == 3, "the fourth has a chance of 0.13 only"
    assert gate.num_drafts(4, TokenPrices(1.0, 0.3)) == 2, "0.6 and 0.36, but not 0.216"
    assert gate.num_drafts(0, CHEAP) == 0


def test_the_gate_closes_on_refusals_and_tries_ever_more_rarely() -> None:
    gate = DraftGate()
    tried_at = []
    for step in range(400):
        if gate.num_drafts(4, DEAR):
            tried_at.append(step)
            gate.observe(1, 0)
    gaps = np.diff(tried_at).tolist()
    assert gaps[0] == FIRST_PAUSE + 1
    assert all(later > earlier for earlier, later in itertools.pairwise(gaps))


def test_the_gate_opens_again_when_drafts_are_accepted() -> None:
    gate = DraftGate(rate=0.01)
    prices = TokenPrices(1.0, 0.2)
    for _ in range(3):
        gate.observe(1, 1)
    assert gate.num_drafts(4, prices) > 0
