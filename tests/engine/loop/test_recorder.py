"""What an engine records: one record of each step, of which totals, distributions and what is shown are views."""

from pytest import MonkeyPatch

from sluice.engine.frames import AskView, TenantTokens
from sluice.engine.loop import recorder
from sluice.engine.loop.recorder import OTHERS, Step, StepRecorder, WorkRecorder
from sluice.engine.scheduling.planner import PrefillChunk, StepPlan
from sluice.engine.sequence import Sequence
from sluice.engine.statistics import unpack
from sluice.engine.types import EngineInfo
from tests.clock import ManualClock
from tests.engine.parts import make_request

INFO = EngineInfo(
    runtime="openvino",
    model_type="",
    dtype="",
    vocab_size=8,
    eos_token_ids=(),
    max_model_len=64,
    block_size=16,
    num_blocks=8,
    max_num_seqs=4,
    max_num_batched_tokens=8,
    load_seconds=0.0,
)


def step(seconds: float, num_prefill: int, num_decode: int) -> Step:
    return Step(1, num_decode, num_prefill, num_prefill + num_decode, seconds, seconds / 2)


def test_who_asks_again_gets_what_is_new() -> None:
    work = WorkRecorder(ManualClock(100.0), lambda: 1000.0)
    assert not work.is_watched, "nothing is kept before somebody asks"
    assert work.view(AskView()).steps == [] and work.is_watched
    work.record_step(step(0.01, 16, 0))
    work.record_step(step(0.002, 0, 1))
    work.record_wait(0.5)
    work.record_tokens("a", 16, 0)
    work.record_tokens("a", 0, 2)
    view = work.view(AskView(num_steps=1))
    assert (view.num_steps, view.num_waits) == (2, 1)
    [last] = view.steps
    assert (last.at_s, last.duration_ms, last.num_prefill, last.num_decode, last.num_seqs) == (1000.0, 2.0, 0, 1, 1)
    assert view.waits == [0.5] and view.tenants == {"a": TenantTokens(16, 2)}


def test_nothing_is_kept_once_nobody_asks() -> None:
    clock = ManualClock(100.0)
    work = WorkRecorder(clock)
    work.record_tokens("a", 16, 0)
    work.view(AskView(keep_s=5.0))
    work.view(AskView(keep_s=1.0))
    work.record_step(step(0.01, 0, 1))
    clock.now += 4.0
    work.record_step(step(0.01, 0, 1))
    assert work.is_watched, "the longest wish counts"
    clock.now += 1.0
    work.record_step(step(0.01, 0, 1))
    assert not work.is_watched
    view = work.view(AskView())
    assert view.num_steps == 0 and view.tenants == {}, "it begins anew"
    assert sum(unpack(work.histograms())["step_seconds"].counts) == 3, "the distributions have all"


def test_further_tenants_count_together(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MAX_TENANTS", 2)
    work = WorkRecorder()
    work.view(AskView())
    for name in "abcd":
        work.record_tokens(name, 0, 1)
    assert work.view(AskView()).tenants == {
        "a": TenantTokens(0, 1),
        "b": TenantTokens(0, 1),
        OTHERS: TenantTokens(0, 2),
    }


def run_step(work: StepRecorder, clock: ManualClock[float]) -> Step:
    """Run a step of half a second with two decoding sequences, a draft, and a chunk of 7 tokens."""
    one, other, third = (Sequence(n, make_request([1], max_tokens=8), INFO, 0.0) for n in range(3))
    plan = StepPlan((), (), (one, other), (1, 0), (PrefillChunk(third, 7),))
    work.begin(clock.now)
    clock.now += 0.1
    work.mark("plan")
    work.record_run(clock.now, clock.now + 0.25)
    clock.now += 0.25
    work.mark("run")
    clock.now += 0.15
    return work.end(plan, 3, 4)


def test_all_views_are_of_the_same_step() -> None:
    clock = ManualClock(100.0)
    work = StepRecorder(clock)
    work.view(AskView())
    work.profile(10.0)
    ran = run_step(work, clock)
    assert ran[:4] == (3, 2, 7, 10) and abs(ran.seconds - 0.5) < 1e-9 and abs(ran.runner_seconds - 0.25) < 1e-9
    counters = work.counters
    assert (counters.steps, round(counters.runner_seconds, 9), round(counters.overhead_seconds, 9)) == (1, 0.25, 0.25)
    found = unpack(work.histograms())
    assert (found["step_seconds"].total, found["step_tokens"].total) == (ran.seconds, 10)
    [shown] = work.view(AskView()).steps
    assert (shown.num_prefill, shown.num_decode, shown.num_seqs, shown.duration_ms) == (7, 2, 3, 500.0)
    profile = work.take_profile()
    assert profile is not None and work.take_profile() is None, "each step is told once"
    [told] = profile.steps
    assert (told.num_prefill_tokens, told.num_decode, told.num_running, told.num_waiting) == (7, 2, 3, 4)
    assert [(name, round(seconds, 9)) for name, seconds in told.parts] == [("plan", 0.1), ("run", 0.25)]


def test_a_profile_that_is_asked_for_within_a_step_begins_with_the_next() -> None:
    clock = ManualClock(100.0)
    work = StepRecorder(clock)
    work.begin(clock.now)
    work.profile(10.0)
    work.mark("intake")
    work.end(StepPlan((), (), (), (), ()), 0, 0)
    assert work.take_profile() is None
    run_step(work, clock)
    profile = work.take_profile()
    assert profile is not None and len(profile.steps) == 1


def test_a_profile_ends_by_itself() -> None:
    clock = ManualClock(100.0)
    work = StepRecorder(clock)
    work.profile(0.75)
    for _ in range(3):
        run_step(work, clock)
    profile = work.take_profile()
    assert profile is not None and len(profile.steps) == 2, "those that began within the time"


def test_a_step_without_a_run_is_all_overhead() -> None:
    clock = ManualClock(100.0)
    work = StepRecorder(clock)
    run_step(work, clock)
    work.begin(clock.now)
    clock.now += 1.0
    assert work.end(StepPlan((), (), (), (), ()), 0, 0).runner_seconds == 0.0
    assert round(work.counters.overhead_seconds, 9) == 1.25 and work.counters.steps == 1
