"""Steps that are launched before the last one's tokens are known: what they give is as without, and nothing is lost."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.engine.arrays import FloatArray
from sluice.engine.frames import Cancel, LoadAdapter, Shutdown
from sluice.engine.runners.base import Draws, LaunchedStep, StepBatch
from sluice.engine.sampling.state import SamplingState, is_simple
from sluice.engine.types import FinishReason, Grammar, GrammarKind, SamplingParams, ThinkingBudget
from sluice.errors import ErrorCode
from tests.engine.fake_runner import EchoRunner, echo
from tests.engine.loop.test_executor import FaultyRunner
from tests.engine.scripted_executor import ScriptedExecutor, prompts

POLICIES = ("guaranteed_no_evict", "max_utilization", "static_batch")
LIMITS = {"num_blocks": 24, "block_size": 4, "max_model_len": 64}


class AheadRunner(EchoRunner):
    looks_ahead = True


def ahead(**limits: object) -> ScriptedExecutor:
    return ScriptedExecutor(AheadRunner(**LIMITS), **limits)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("limits", "sampling", "num_ahead"),
    [
        pytest.param({}, {}, 19, id="all but the last are fed back"),
        pytest.param({}, {"temperature": 1e-9, "seed": 3}, 19, id="random rows too"),
        pytest.param({"speculation": "ngram", "num_speculative_tokens": 2}, {}, 0, id="speculation needs the tokens"),
    ],
)
def test_tokens_are_launched_before_they_are_known(
    limits: dict[str, object], sampling: dict[str, object], num_ahead: int
) -> None:
    bench = ahead(**limits)
    bench.submit(1, [1, 2, 3], max_tokens=20, **sampling)
    bench.finish()
    assert bench.tokens[1] == echo([1, 2, 3], 20)
    assert bench.runner.num_ahead == num_ahead
    assert not bench.runner._launched, "no step for a token that nobody wants"


# -- some need the host, some do not

KINDS: list[dict[str, object]] = [
    {},
    {"temperature": 0.1, "seed": 7},
    {"temperature": 1.0, "seed": 8, "top_k": 50, "top_p": 0.9},
    {"temperature": 0.3, "seed": 9, "min_p": 0.001},
    {"logprobs": 2},
    {"presence_penalty": 2.0},
    {"temperature": 0.2, "seed": 10, "repetition_penalty": 1.5},
    {"min_tokens": 3},
    {"prompt_logprobs": 1},
    {"logit_bias": {5: 2.0}},
    {"thinking_token_budget": ThinkingBudget(3, (1,), (9, 10))},
]
mixed = st.lists(
    st.tuples(prompts, st.integers(1, 20), st.integers(0, 30), st.integers(0, len(KINDS) - 1)), min_size=1, max_size=12
)


@pytest.mark.parametrize("policy", POLICIES)
@settings(deadline=None, max_examples=12)
@given(arrivals=mixed)
def test_all_kinds_of_requests_get_the_tokens_that_they_get_in_turn(
    policy: str, arrivals: list[tuple[list[int], int, int, int]]
) -> None:
    looking, in_turn = ahead(scheduler_policy=policy), ScriptedExecutor(scheduler_policy=policy)
    for bench in (looking, in_turn):
        bench.play([each[:3] for each in arrivals], fields={i: KINDS[each[3]] for i, each in enumerate(arrivals)})
    assert looking.tokens == in_turn.tokens
    assert looking.reasons == in_turn.reasons
    stats = looking.executor.stats()
    assert stats.num_blocks_free == 24
    assert stats.generation_tokens_total == in_turn.executor.stats().generation_tokens_total


def test_one_that_needs_the_host_stops_the_lookahead_for_as_long_as_it_runs() -> None:
    bench = ahead()
    bench.submit(1, [1, 2, 3], max_tokens=30)
    for _ in range(5):
        bench.step()
    before = bench.runner.num_ahead
    bench.submit(2, [4, 5], max_tokens=5, logprobs=1)
    while not bench.reasons[2]:
        bench.step()
    assert bench.runner.num_ahead <= before + 1, "the step that was under way"
    bench.finish()
    assert bench.runner.num_ahead > before + 10
    assert (bench.tokens[1], bench.tokens[2]) == (echo([1, 2, 3], 30), echo([4, 5], 5))


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"logit_bias": {1: 1.0}},
        {"allowed_token_ids": (1,)},
        {"bad_words": ((1,),)},
        {"bad_words": ((1, 2),)},
        {"min_tokens": 1},
        {"thinking_token_budget": ThinkingBudget(0, (1,), (2,))},
    ],
)
def test_what_edits_logits_is_not_simple(fields: dict[str, object]) -> None:
    params = SamplingParams(temperature=0.0, **fields)  # type: ignore[arg-type]
    assert SamplingState(params, [1, 1], frozenset({2}), 10).edits_logits
    assert not is_simple(params)


def test_what_follows_a_grammar_or_reports_log_probabilities_is_not_simple() -> None:
    assert not is_simple(SamplingParams(grammar=Grammar(GrammarKind.REGEX, "a")))
    assert not is_simple(SamplingParams(logprobs=0))
    assert is_simple(SamplingParams(temperature=0.5, seed=1, top_k=3, top_p=0.5, min_p=0.1, typical_p=0.9))


# -- failures


class FaultyAheadRunner(FaultyRunner):
    looks_ahead = True


def test_a_launch_that_fails_leaves_the_step_before_it_its_tokens() -> None:
    runner = FaultyAheadRunner(**LIMITS)  # type: ignore[arg-type]
    runner.bad_launches = frozenset({2})
    bench = ScriptedExecutor(runner)
    bench.submit(1, [1, 2], max_tokens=1)
    bench.step()
    bench.submit(2, [3, 4], max_tokens=5)
    bench.step()
    assert bench.tokens[1] == echo([1, 2], 1)
    assert [(failure.stream_id, failure.code) for failure in bench.failures] == [(2, ErrorCode.INTERNAL)]
    assert bench.executor.stats().num_blocks_used == 0


def test_a_step_that_fails_does_not_end_those_who_came_after_its_launch() -> None:
    runner = FaultyAheadRunner(**LIMITS)  # type: ignore[arg-type]
    runner.bad_runs = frozenset({1})
    bench = ScriptedExecutor(runner)
    bench.submit(1, [1, 2], max_tokens=5)
    bench.step()
    bench.submit(2, [3, 4], max_tokens=5)
    bench.finish()
    assert [failure.stream_id for failure in bench.failures] == [1]
    assert bench.tokens[2] == echo([3, 4], 5)


# -- what waits for the step under way


def test_a_prefix_that_a_step_under_way_computes_is_waited_for() -> None:
    bench = ahead(max_num_batched_tokens=64)
    bench.submit(1, [*range(20), 30], max_tokens=5)
    bench.step()
    bench.submit(2, [*range(20), 31], max_tokens=5)
    bench.finish()
    assert bench.details[2].num_cached_tokens == 20
    assert bench.tokens[2] == echo([*range(20), 31], 5)


def test_shutdown_waits_for_the_step_under_way() -> None:
    bench = ahead()
    bench.submit(1, [1], max_tokens=50)
    bench.step()
    bench.script.pending.append(Shutdown())
    bench.submit(2, [2], max_tokens=50)
    bench.executor.run()
    assert not bench.runner._launched
    assert bench.reasons[1] == [FinishReason.CANCELLED]


def test_blocks_of_a_cancelled_sequence_are_written_before_those_who_get_them_are() -> None:
    bench = ScriptedExecutor(AheadRunner(num_blocks=8, block_size=4, max_model_len=32), max_num_batched_tokens=32)
    bench.submit(1, [9] * 12, max_tokens=20)
    bench.step()
    bench.step()
    bench.script.pending.append(Cancel(1))
    bench.submit(2, [8] * 12, max_tokens=20)
    bench.finish()
    assert bench.tokens[2] == echo([8] * 12, 20)


class AdapterAheadRunner(AheadRunner):
    """Notes how many steps were under way when an adapter came into use."""

    def __init__(self) -> None:
        super().__init__(**LIMITS)  # type: ignore[arg-type]
        self.under_way: list[int] = []

    def read_adapter(self, number: int, name: str, folder: object) -> Callable[[], None]:
        return lambda: self.under_way.append(len(self._launched))

    def drop_adapters(self, numbers: object) -> Callable[[], None]:
        return lambda: self.under_way.append(len(self._launched))


def test_an_adapter_comes_into_use_between_steps(tmp_path: object) -> None:
    runner = AdapterAheadRunner()
    bench = ScriptedExecutor(runner)
    bench.submit(1, [1, 2, 3], max_tokens=40)
    bench.step()
    for name in ("a", "a"):
        bench.change_adapters(LoadAdapter(name, str(tmp_path)))
    bench.finish()
    assert runner.under_way == [0, 0, 0], "loaded, replaced and freed"
    assert bench.tokens[1] == echo([1, 2, 3], 40)


# -- its record


class TimedRunner(AheadRunner):
    """Takes 10 ms for a step, by the clock of its bench."""

    bench: ScriptedExecutor

    def compute(self, batch: StepBatch) -> FloatArray:
        self.bench.now += 0.01
        return super().compute(batch)


def test_a_step_lasts_from_the_end_of_the_last_one_to_its_own() -> None:
    runner = TimedRunner(**LIMITS)  # type: ignore[arg-type]
    bench = runner.bench = ScriptedExecutor(runner)
    bench.submit(1, [1, 2, 3], max_tokens=20)
    bench.finish()
    stats = bench.executor.stats()
    assert (stats.steps_total, stats.prompt_tokens_total, stats.generation_tokens_total) == (20, 3, 20)
    assert stats.runner_seconds_total == pytest.approx(0.2)
    assert stats.overhead_seconds_total == pytest.approx(0.0, abs=1e-9)


def test_time_in_which_the_device_waits_for_the_host_is_overhead() -> None:
    runner = TimedRunner(**LIMITS)  # type: ignore[arg-type]
    bench = runner.bench = ScriptedExecutor(runner)
    bench.submit(1, [1, 2, 3], max_tokens=20)
    original = runner.launch

    def launch_late(batch: StepBatch, draws: Draws | None) -> LaunchedStep:
        runner.work_until()  # the device is done before the host is
        bench.now += 0.005
        return original(batch, draws)

    runner.launch = launch_late  # type: ignore[method-assign]
    bench.finish()
    stats = bench.executor.stats()
    assert stats.overhead_seconds_total + stats.runner_seconds_total == pytest.approx(bench.now)
