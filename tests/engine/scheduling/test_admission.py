import msgspec
import pytest

from sluice.engine.config import EngineConfig
from sluice.engine.forecast.wait import WaitPrediction
from sluice.engine.frames import request_failed
from sluice.engine.scheduling.admission import (
    LATE_S,
    MAX_COLD_RETRY_AFTER_S,
    MAX_RETRY_AFTER_S,
    SLOW_SHARE,
    AdmissionController,
    Backlog,
    PromisedPlaces,
    WaitingLoad,
    check_deadlines,
    check_reported_queue,
    find_excess,
)
from sluice.engine.sequence import Sequence
from sluice.engine.statistics import NO_STATS
from sluice.engine.types import GenerateRequest, SamplingParams
from sluice.errors import ErrorCode, SluiceError
from tests.engine.test_validation import INFO
from tests.errors import error_of


def request(
    num_tokens: int = 10, *, timeout_s: float | None = None, queue_timeout_s: float | None = None, num_resumed: int = 0
) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        prompt_token_ids=[1] * num_tokens,
        sampling=SamplingParams(),
        timeout_s=timeout_s,
        queue_timeout_s=queue_timeout_s,
        resume_token_ids=[1] * num_resumed,
    )


def config(requests: int = 512, tokens: int | None = None) -> EngineConfig:
    return EngineConfig(model_path="", max_queued_requests=requests, max_queued_tokens=tokens)


def waiting(
    requests: int, tokens: int = 0, places: int = 0, *, num_started: int = 0, num_promised: int = 0
) -> WaitingLoad:
    """`num_started`: how many of them, and of the new one, the next step takes."""
    return WaitingLoad(requests, tokens, places, lambda: requests + 1 - num_started, num_promised)


def excess(load: WaitingLoad, limits: EngineConfig, num_tokens: int = 10, **fields: int) -> str | None:
    return find_excess(request(num_tokens, **fields), load, limits)


def test_as_many_may_wait_as_the_limit_says_and_no_more() -> None:
    assert excess(waiting(3), config(requests=4)) is None
    assert excess(waiting(4), config(requests=4)) == "4 requests wait and the limit is 4 (--max-queue-size)"


def test_those_that_the_next_step_takes_count_besides() -> None:
    assert excess(waiting(5, places=2, num_started=2), config(requests=4)) is None
    assert "4 requests wait" in (excess(waiting(6, places=2, num_started=2), config(requests=4)) or "")
    assert excess(waiting(1, places=2, num_started=2), config(requests=0)) is None


def test_places_without_blocks_for_them_are_no_room() -> None:
    assert excess(waiting(4, places=9, num_started=1), config(requests=4)) is None
    assert "4 requests wait" in (excess(waiting(4, places=9), config(requests=4)) or "")


def test_who_comes_back_soon_has_a_place() -> None:
    assert excess(waiting(2, num_promised=1), config(requests=4)) is None
    assert excess(waiting(2, num_promised=2), config(requests=4)) == (
        "2 requests wait, 2 that were refused come back before this one and the limit is 4 (--max-queue-size)"
    )
    starts_at_once = waiting(0, places=1, num_started=1, num_promised=9)
    assert excess(starts_at_once, config(requests=4)) is None


def test_prompt_tokens_are_bounded_with_the_newcomers_own() -> None:
    assert excess(waiting(3, tokens=90), config(tokens=100)) is None
    assert excess(waiting(3, tokens=91), config(tokens=100)) == (
        "91 prompt tokens wait, this request has 10 and the limit is 100 (--max-queue-tokens)"
    )
    assert excess(waiting(0), config(tokens=15), num_resumed=6)


def test_tokens_are_not_bounded_where_all_start_at_once() -> None:
    assert excess(waiting(3, 1000, places=4, num_started=4), config(tokens=100)) is None
    assert excess(waiting(3, 1000, places=3, num_started=3), config(tokens=100))
    assert excess(waiting(3, 1000, places=4, num_started=3), config(tokens=100))


def refusal(asked: GenerateRequest, *times_s: float) -> SluiceError:
    """The error of a request whose wait, its earliest start and its least service were predicted so."""
    wait_s, earliest_s, service_s = times_s
    return error_of(check_deadlines, asked, WaitPrediction(wait_s, 0.1, earliest_s, service_s, is_warm=True))


@pytest.mark.parametrize(("name", "may"), [("timeout_s", "may take"), ("queue_timeout_s", "may wait")])
def test_a_deadline_that_even_the_earliest_start_misses_is_refused_at_once(name: str, may: str) -> None:
    asked = request(**{name: 2.0})  # type: ignore[arg-type]
    error = refusal(asked, 3.01, 2.01, 0.0)
    assert (error.code, error.param, error.retry_after_s) == (ErrorCode.DEADLINE, name, 3.01)
    assert error.message == (
        f"the wait would be about 3.0 s, and the request {may} 2 s; try again in 4 s, or allow more time"
    )


def test_a_deadline_that_leaves_no_time_for_the_shortest_answer_says_so() -> None:
    error = refusal(request(timeout_s=4.0), 3.5, 3.0, 1.1)
    assert error.message == (
        "the wait would be about 3.5 s and the answer take 1.1 s more, and the request may take 4 s; "
        "try again in 4 s, or allow more time"
    )
    check_deadlines(request(queue_timeout_s=4.0), WaitPrediction(3.5, 0.1, 3.0, 1.1))


def test_a_wait_that_may_prove_shorter_is_not() -> None:
    check_deadlines(request(queue_timeout_s=2.0), WaitPrediction(30.0, 0.1, 2.0))
    check_deadlines(request(timeout_s=2.0), WaitPrediction(30.0, 0.1, 1.0, 1.0))
    check_deadlines(request(), WaitPrediction(1e9, 0.1, 1e9))


def test_by_the_last_report_the_queue_is_full_where_as_many_wait_as_may() -> None:
    full = msgspec.structs.replace(NO_STATS, num_running=4, num_waiting=3, predicted_wait_s=7.5)
    with pytest.raises(SluiceError, match=r"3 requests wait and the limit is 3 .*about 7\.5 s") as refused:
        check_reported_queue(full, 4, config(3))
    assert (refused.value.code, refused.value.retry_after_s) == (ErrorCode.OVERLOADED, 7.5)
    check_reported_queue(full, 4, config(4))
    check_reported_queue(full, 5, config(3))


def test_a_wait_over_what_the_client_takes_is_refused_with_the_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = AdmissionController[Sequence](INFO, config(), lambda: 0.0)
    monkeypatch.setattr(controller.forecast, "predict", lambda *_: WaitPrediction(2.5))
    sequence = Sequence(1, request(), INFO, 0.0, 0)
    backlog: Backlog[Sequence] = Backlog(0, 1, lambda queue: len(list(queue)))

    def admit(most_wait_s: float | None, *, was_accepted: bool = False) -> None:
        controller.admit_to_queue(
            sequence, (), 10, 0.0, backlog=backlog, was_accepted=was_accepted, most_wait_s=most_wait_s
        )

    with pytest.raises(SluiceError, match=r"the wait would be about 2\.5 s, and the client takes 2\.4 s") as refused:
        admit(2.4)
    error = refused.value
    assert (error.code, error.retry_after_s, error.predicted_wait_s) == (ErrorCode.OVERLOADED, 2.5, 2.5)
    assert request_failed(1, error).to_error().predicted_wait_s == 2.5
    for most_wait_s in (2.5, None):
        admit(most_wait_s)
    admit(0.0, was_accepted=True)


class Line:
    """A controller before which nobody can start. `predict_return` tells a second for each that is before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limit: int, *, is_warm: bool = True) -> None:
        self.controller = AdmissionController[Sequence](INFO, config(limit), lambda: self.now)
        forecast = self.controller.forecast
        monkeypatch.setattr(forecast, "predict_return", lambda num_before, *_: float(num_before))
        monkeypatch.setattr(type(forecast), "is_warm", is_warm)
        self.now, self.num_waiting = 0.0, limit

    def told_s(self, prompt: int, *, places: int = 0) -> float | None:
        """Submit a request. Returns when it is told to come back; None if it may wait."""
        sequence = Sequence(prompt, request_of(prompt), INFO, self.now, 0)
        backlog: Backlog[Sequence] = Backlog(self.num_waiting, places, lambda queue: min(places, len(list(queue))))
        try:
            self.controller.admit_to_queue(sequence, (), 10, self.now, backlog=backlog, was_accepted=False)
        except SluiceError as error:
            assert error.code is ErrorCode.OVERLOADED
            return error.retry_after_s
        self.num_waiting += 1
        return None


def request_of(prompt: int) -> GenerateRequest:
    return GenerateRequest(request_id="r", prompt_token_ids=[prompt, 1, 2], sampling=SamplingParams())


def test_each_refused_request_is_told_when_its_own_place_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line(monkeypatch, 10)
    told = [line.told_s(prompt) for prompt in range(1, 31)]
    assert told == [max(each - 5.0, 1.15 * (each - 9.0)) for each in range(10, 40)]


def test_it_is_told_an_hour_where_it_takes_an_hour_once_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line(monkeypatch, 0)
    line.num_waiting = 100_000
    assert line.told_s(1) == MAX_RETRY_AFTER_S == 3600.0
    cold = Line(monkeypatch, 0, is_warm=False)
    cold.num_waiting = 100_000
    assert cold.told_s(1) == MAX_COLD_RETRY_AFTER_S
    assert SLOW_SHARE > 1.0


def test_who_comes_back_early_is_told_the_same_time_again(monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line(monkeypatch, 10)
    told = [line.told_s(prompt) for prompt in range(1, 31)]
    line.now = 2.0
    assert line.told_s(30) == pytest.approx(told[29] - 2.0)  # type: ignore[operator]
    assert len(line.controller.promised) == 30


def test_a_place_is_kept_for_who_comes_back_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line(monkeypatch, 4)
    monkeypatch.setattr(line.controller.forecast, "predict", lambda *_: WaitPrediction(4.0))
    assert [line.told_s(prompt) for prompt in (1, 2)] == [2.0, 3.0]
    line.now, line.num_waiting = 2.0, 3
    assert line.told_s(99) is not None, "the place is the first one's"
    assert line.told_s(1) is None


def test_a_new_request_that_starts_at_once_takes_nobodys_place(monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line(monkeypatch, 4)
    assert line.told_s(1) is not None
    line.num_waiting = 0
    assert line.told_s(2, places=1) is None


def test_the_places_of_those_that_never_come_back_count_less_and_less() -> None:
    places = PromisedPlaces()
    for key in range(100):
        places.add(key, 0.0, 1.0)
    places.expire(1.0 + LATE_S)
    assert (len(places), places.due_of(5)) == (0, None)
    for key in range(100):
        places.add(key, 10.0, 1.0)
    assert places.num_expected() < 10


def test_copies_of_a_prompt_have_a_place_each() -> None:
    places = PromisedPlaces()
    for wait_s in (3.0, 1.0, 2.0):
        places.add(7, 0.0, wait_s)
    assert (places.due_of(7), places.num_expected(2.5)) == (1.0, 2)
    places.take(7)
    assert (places.due_of(7), places.num_expected(2.5), places.num_expected()) == (2.0, 1, 2)
