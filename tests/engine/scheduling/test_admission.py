import msgspec
import pytest

from engine.client.counters import NO_STATS
from engine.config import EngineConfig
from engine.forecast.wait import WaitPrediction
from engine.frames import request_failed
from engine.scheduling.admission import (
    MAX_RETRY_AFTER_S,
    AdmissionController,
    Backlog,
    WaitingLoad,
    check_queue_limits,
    check_reported_queue,
)
from engine.sequence import Sequence
from engine.types import GenerateRequest, SamplingParams
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


def waiting(requests: int, tokens: int = 0, places: int = 0, *, num_started: int = 0) -> WaitingLoad:
    """`num_started`: how many of them, and of the new one, the next step takes."""
    return WaitingLoad(requests, tokens, places, lambda: requests + 1 - num_started)


def check(
    backlog: WaitingLoad, limits: EngineConfig, asked: GenerateRequest | None = None, wait_s: float = 0.0,
    *, earliest_s: float = 0.0, service_s: float = 0.0, is_warm: bool = True,
) -> None:  # fmt: skip
    prediction = WaitPrediction(wait_s, 0.1, earliest_s, service_s, is_warm)
    check_queue_limits(asked or request(), backlog, limits, prediction)


def refusal(*arguments: object, **named: object) -> SluiceError:
    return error_of(check, *arguments, **named)


def test_as_many_may_wait_as_the_limit_says_and_no_more() -> None:
    check(waiting(3), config(requests=4))
    error = refusal(waiting(4), config(requests=4), wait_s=12.3)
    assert (error.code, error.retry_after_s) == (ErrorCode.OVERLOADED, 12.3)
    assert error.message == (
        "the queue is full: 4 requests wait and the limit is 4 (--max-queue-size); "
        "the wait would be about 12 s, try again in 13 s"
    )


def test_those_that_the_next_step_takes_count_besides() -> None:
    check(waiting(5, places=2, num_started=2), config(requests=4))
    error = refusal(waiting(6, places=2, num_started=2), config(requests=4))
    assert "4 requests wait and the limit is 4" in error.message
    check(waiting(1, places=2, num_started=2), config(requests=0))


def test_places_without_blocks_for_them_are_no_room() -> None:
    check(waiting(4, places=9, num_started=1), config(requests=4))
    error = refusal(waiting(4, places=9), config(requests=4))
    assert "4 requests wait and the limit is 4" in error.message


def test_prompt_tokens_are_bounded_with_the_newcomers_own() -> None:
    check(waiting(3, tokens=90), config(tokens=100))
    error = refusal(waiting(3, tokens=91), config(tokens=100), wait_s=2.0)
    assert error.code == ErrorCode.OVERLOADED
    assert "91 prompt tokens wait, this request has 10 and the limit is 100 (--max-queue-tokens)" in error.message
    assert refusal(waiting(0), config(tokens=15), request(10, num_resumed=6)).code == ErrorCode.OVERLOADED


def test_tokens_are_not_bounded_where_all_start_at_once() -> None:
    check(waiting(3, 1000, places=4, num_started=4), config(tokens=100))
    assert refusal(waiting(3, 1000, places=3, num_started=3), config(tokens=100)).code == ErrorCode.OVERLOADED
    assert refusal(waiting(3, 1000, places=4, num_started=3), config(tokens=100)).code == ErrorCode.OVERLOADED


@pytest.mark.parametrize(("wait_s", "retry_after_s"), [(0.0, 1.0), (0.2, 1.0), (7.5, 7.5), (1e6, MAX_RETRY_AFTER_S)])
def test_when_to_come_back_has_bounds(wait_s: float, retry_after_s: float) -> None:
    assert refusal(waiting(9), config(requests=9), wait_s=wait_s).retry_after_s == retry_after_s


@pytest.mark.parametrize(("name", "may"), [("timeout_s", "may take"), ("queue_timeout_s", "may wait")])
def test_a_deadline_that_even_the_earliest_start_misses_is_refused_at_once(name: str, may: str) -> None:
    asked = request(**{name: 2.0})  # type: ignore[arg-type]
    error = refusal(waiting(1), config(), asked, wait_s=3.01, earliest_s=2.01)
    assert (error.code, error.param, error.retry_after_s) == (ErrorCode.DEADLINE, name, 3.01)
    assert error.message == (
        f"the wait would be about 3.0 s, and the request {may} 2 s; try again in 4 s, or allow more time"
    )


def test_a_deadline_that_leaves_no_time_for_the_shortest_answer_says_so() -> None:
    error = refusal(waiting(1), config(), request(timeout_s=4.0), wait_s=3.5, earliest_s=3.0, service_s=1.1)
    assert error.message == (
        "the wait would be about 3.5 s and the answer take 1.1 s more, and the request may take 4 s; "
        "try again in 4 s, or allow more time"
    )
    check(waiting(1), config(), request(queue_timeout_s=4.0), wait_s=3.5, earliest_s=3.0, service_s=1.1)


def test_a_wait_that_may_prove_shorter_is_not() -> None:
    check(waiting(1), config(), request(queue_timeout_s=2.0), wait_s=30.0, earliest_s=2.0)
    check(waiting(1), config(), request(timeout_s=2.0), wait_s=30.0, earliest_s=1.0, service_s=1.0)
    check(waiting(1), config(), request(queue_timeout_s=2.0), wait_s=100.0, earliest_s=50.0, is_warm=False)
    check(waiting(1), config(), wait_s=1e9, earliest_s=1e9)


def test_a_full_queue_is_said_before_a_deadline() -> None:
    assert (
        refusal(waiting(4), config(requests=4), request(timeout_s=1.0), wait_s=50.0, earliest_s=9.0).code
        == ErrorCode.OVERLOADED
    )


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
