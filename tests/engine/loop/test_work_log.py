"""What an engine records while somebody watches: steps, waits and tokens of tenants."""

from pytest import MonkeyPatch

from engine.frames import AskView, TenantTokens
from engine.loop import work_log
from engine.loop.work_log import OTHERS, WorkLog


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_who_asks_again_gets_what_is_new() -> None:
    work = WorkLog(Clock(), lambda: 1000.0)
    assert not work.is_on, "nothing is recorded before somebody asks"
    assert work.view(AskView()).steps == [] and work.is_on
    work.record_step(0.01, 16, 0, 1)
    work.record_step(0.002, 0, 1, 1)
    work.record_wait(0.5)
    work.record_tokens("a", 16, 0)
    work.record_tokens("a", 0, 2)
    view = work.view(AskView(num_steps=1))
    assert (view.num_steps, view.num_waits) == (2, 1)
    [step] = view.steps
    assert (step.at_s, step.duration_ms, step.num_prefill, step.num_decode, step.num_seqs) == (1000.0, 2.0, 0, 1, 1)
    assert view.waits == [0.5] and view.tenants == {"a": TenantTokens(16, 2)}


def test_the_recording_ends_once_nobody_asks() -> None:
    clock = Clock()
    work = WorkLog(clock)
    work.view(AskView(keep_s=5.0))
    work.view(AskView(keep_s=1.0))
    work.record_step(0.01, 0, 1, 1)
    clock.now += 4.0
    work.record_step(0.01, 0, 1, 1)
    assert work.is_on, "the longest wish counts"
    clock.now += 1.0
    work.record_step(0.01, 0, 1, 1)
    assert not work.is_on
    assert work.view(AskView()).num_steps == 0, "it begins anew"


def test_further_tenants_count_together(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(work_log, "MAX_TENANTS", 2)
    work = WorkLog()
    for name in "abcd":
        work.record_tokens(name, 0, 1)
    assert work.view(AskView()).tenants == {
        "a": TenantTokens(0, 1),
        "b": TenantTokens(0, 1),
        OTHERS: TenantTokens(0, 2),
    }
