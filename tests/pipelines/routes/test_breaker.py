"""The circuit breaker alone: its states by example, and what holds in whatever order things happen."""

from collections import deque

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sluice.pipelines.routes.settings import BreakerSettings
from sluice.pipelines.routes.target import BreakerState, CircuitBreaker, Pass
from tests.clock import ManualClock

SETTINGS = BreakerSettings(failures=3, failure_rate=0.5, window=6, open_s=10.0, max_open_s=35.0)


def breaker_and_clock() -> tuple[CircuitBreaker, ManualClock[float]]:
    clock = ManualClock(1000.0)
    return CircuitBreaker(SETTINGS, clock), clock


def state_of(breaker: CircuitBreaker) -> BreakerState:
    return breaker.state


def fail(breaker: CircuitBreaker, times: int = 1) -> None:
    for _ in range(times):
        breaker.fail(breaker.enter())


def test_failures_in_a_row_open_it() -> None:
    breaker, _ = breaker_and_clock()
    fail(breaker, 2)
    breaker.succeed(breaker.enter())
    fail(breaker, 2)
    assert state_of(breaker) is BreakerState.CLOSED
    fail(breaker)
    assert (state_of(breaker), breaker.admits, breaker.closes_in_s) == (BreakerState.OPEN, False, 10.0)


def test_a_rate_of_failures_opens_it() -> None:
    breaker, _ = breaker_and_clock()
    for _ in range(2):
        fail(breaker)
        breaker.succeed(breaker.enter())
    assert state_of(breaker) is BreakerState.CLOSED
    breaker.succeed(breaker.enter())
    assert state_of(breaker) is BreakerState.CLOSED, "two of five, and the window is not full"
    fail(breaker)
    assert state_of(breaker) is BreakerState.OPEN, "three of six"


def test_fewer_failures_than_the_rate_leave_it_closed_however_long_it_goes_on() -> None:
    breaker, _ = breaker_and_clock()
    for _ in range(2 * SETTINGS.window):
        fail(breaker)
        for _ in range(2):
            breaker.succeed(breaker.enter())
    assert state_of(breaker) is BreakerState.CLOSED, "two of any six"


def test_one_probe_at_a_time_closes_it() -> None:
    breaker, clock = breaker_and_clock()
    fail(breaker, 3)
    clock.now += 10.0
    assert (state_of(breaker), breaker.admits) == (BreakerState.HALF_OPEN, True)
    probe = breaker.enter()
    assert probe.is_probe and not breaker.admits
    breaker.succeed(probe)
    assert state_of(breaker) is BreakerState.CLOSED


def test_each_failing_probe_doubles_the_time() -> None:
    breaker, clock = breaker_and_clock()
    fail(breaker, 3)
    for open_s in (10.0, 20.0, 35.0, 35.0):
        assert breaker.closes_in_s == open_s
        clock.now += open_s
        fail(breaker)
    clock.now += 35.0
    breaker.succeed(breaker.enter())
    fail(breaker, 3)
    assert breaker.closes_in_s == 10.0


def test_a_probe_that_nobody_waits_for_leaves_its_place() -> None:
    breaker, clock = breaker_and_clock()
    fail(breaker, 3)
    clock.now += 10.0
    breaker.abandon(breaker.enter())
    assert (state_of(breaker), breaker.admits) == (BreakerState.HALF_OPEN, True)


def test_what_began_before_a_change_says_nothing_of_the_time_after_it() -> None:
    breaker, clock = breaker_and_clock()
    early = breaker.enter()
    fail(breaker, 3)
    breaker.succeed(early)
    assert state_of(breaker) is BreakerState.OPEN
    clock.now += 10.0
    late = breaker.enter()
    breaker.succeed(late)
    breaker.fail(early)
    breaker.fail(late)
    fail(breaker, 2)
    assert state_of(breaker) is BreakerState.CLOSED


def test_a_target_says_how_long_it_wants_to_be_left_alone() -> None:
    breaker, _ = breaker_and_clock()
    fail(breaker, 2)
    breaker.fail(breaker.enter(), retry_after_s=25.0)
    assert breaker.closes_in_s == 25.0


def test_one_that_is_asked_while_open_may_close_it_and_does_not_prolong_it() -> None:
    breaker, clock = breaker_and_clock()
    fail(breaker, 3)
    clock.now += 4.0
    fail(breaker)
    assert breaker.closes_in_s == 6.0
    breaker.succeed(breaker.enter())
    assert state_of(breaker) is BreakerState.CLOSED


class BreakerMachine(RuleBasedStateMachine):
    """Requests begin and end in any order, and time passes, beside a model of the breaker in other words."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock(1000.0)
        self.breaker = CircuitBreaker(SETTINGS, self.clock)
        self.passes: list[Pass] = []
        """Those that were not given back."""
        self.era = 0
        self.results: deque[bool] = deque(maxlen=SETTINGS.window)
        """Which results of this era were failures, in an era in which it is closed."""

    @rule(seconds=st.floats(0.01, 50.0))
    def wait(self, seconds: float) -> None:
        before = self.breaker.state
        self.clock.now += seconds
        after = self.breaker.state
        assert after is before or (before, after) == (BreakerState.OPEN, BreakerState.HALF_OPEN)

    @rule()
    def begin(self) -> None:
        is_admitted, is_half_open = self.breaker.admits, self.breaker.state is BreakerState.HALF_OPEN
        given = self.breaker.enter()
        assert given == Pass(self.era, is_probe=is_admitted and is_half_open)
        self.passes.append(given)

    @precondition(lambda self: self.passes)
    @rule(data=st.data(), is_failure=st.booleans())
    def end(self, data: st.DataObject, is_failure: bool) -> None:
        given = self._take(data)
        before = self._seen()
        (self.breaker.fail if is_failure else self.breaker.succeed)(given)
        if given.era != self.era:
            assert self._seen() == before
        elif before[0] is BreakerState.CLOSED:
            self.results.append(is_failure)
            self._expect(BreakerState.OPEN if is_failure and self._is_too_much() else BreakerState.CLOSED, before)
        elif is_failure:
            self._expect(BreakerState.OPEN if given.is_probe else before[0], before)
        else:
            self._expect(BreakerState.CLOSED, before)

    def _take(self, data: st.DataObject) -> Pass:
        return self.passes.pop(data.draw(st.integers(0, len(self.passes) - 1)))

    def _seen(self) -> tuple[BreakerState, bool, float]:
        return self.breaker.state, self.breaker.admits, self.breaker.closes_in_s

    def _is_too_much(self) -> bool:
        results = list(self.results)
        is_whole = len(results) == SETTINGS.window
        return results[-SETTINGS.failures :] == [True] * SETTINGS.failures or (
            is_whole and sum(results) >= SETTINGS.window * SETTINGS.failure_rate
        )

    def _expect(self, state: BreakerState, before: tuple[BreakerState, bool, float]) -> None:
        assert self.breaker.state is state
        if state is not before[0]:
            self.era += 1
            self.results.clear()

    @precondition(lambda self: self.passes)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        before = self.breaker.state
        self.breaker.abandon(self._take(data))
        assert self.breaker.state is before

    @invariant()
    def it_admits_all_or_one_or_none(self) -> None:
        state, is_admitted, closes_in_s = self._seen()
        num_probes = sum(each.is_probe and each.era == self.era for each in self.passes)
        assert num_probes <= 1
        assert (
            is_admitted
            == {
                BreakerState.CLOSED: True,
                BreakerState.HALF_OPEN: num_probes == 0,
                BreakerState.OPEN: False,
            }[state]
        )
        assert (closes_in_s > 0) == (state is BreakerState.OPEN)
        assert closes_in_s <= SETTINGS.max_open_s


TestBreakerMachine = BreakerMachine.TestCase
TestBreakerMachine.settings = hypothesis_settings(max_examples=30, stateful_step_count=50, deadline=None)
