"""A request with several generations counts as one, and each of its prompts once, as the answer's `usage` says."""

from collections.abc import Iterator
from contextvars import copy_context
from typing import Any

import pytest

from sluice.engine.types import FinishReason
from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.options.goodput import GoodputTargets
from sluice.gateway.telemetry.metrics import GatewayMetrics
from sluice.pipelines.text.stream import current_prompt, share_request
from sluice.pipelines.text.types import TextEvent
from tests.gateway.answering import MODEL, Answering
from tests.gateway.front.http.sse import events_of
from tests.gateway.tenancy.access import test_calls
from tests.gateway.tenancy.access.test_calls import Notes

SAMPLED = {"max_tokens": 4, "temperature": 1.0, "ignore_eos": True}
LONG = {"prompt": [7] * 40, **SAMPLED}
"""Two whole blocks that a prefix cache keeps, and more."""
COMPLETIONS = [
    {"prompt": [5, 6, 7], "n": 4, **SAMPLED},
    {"prompt": [[5, 6, 7], [8, 9]], "n": 2, **SAMPLED},
    {"prompt": [[5, 6], [5, 6]], **SAMPLED},
    {"prompt": [5, 6, 7], "n": 1, "best_of": 3, **SAMPLED},
    {**LONG, "n": 3},
]
Counted = tuple[Answering, Notes]


answers = test_calls.answers


@pytest.fixture
def counted(answers: Counted) -> Iterator[Counted]:
    answers[1].admitted.clear()
    yield answers
    answers[1].refuses = ""
    answers[1].runner.release()


class Counts:
    """What the counters of all protocols say, less what they said before."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics
        self._before = self._read()

    def _read(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for family in self._metrics.collect():
            for sample in family.samples:
                kind = sample.labels.get("kind") or sample.labels.get("outcome") or sample.labels.get("reason") or ""
                key = f"{sample.name}:{kind}".removesuffix(":")
                found[key] = found.get(key, 0.0) + sample.value
        return found

    def more(self, name: str) -> float:
        return self._read().get(name, 0.0) - self._before.get(name, 0.0)


def used(notes: Notes) -> tuple[int, int, int]:
    call = notes.take()
    return call.prompt_tokens, call.cached_tokens, call.generated_tokens


def usage_of(answer: Any) -> tuple[int, int, int]:
    usage = answer["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], usage["completion_tokens"]


def counters(counts: Counts) -> tuple[float, ...]:
    return tuple(counts.more(f"sluice_tokens_total:{each}") for each in ("prompt", "cached", "generation"))


def check_one_request(counts: Counts, outcome: str = "ok") -> None:
    assert counts.more(f"sluice_requests_total:{outcome}") == counts.more("sluice_request_duration_seconds_count") == 1
    assert counts.more("sluice_open_requests") == 0


@pytest.mark.parametrize("body", COMPLETIONS)
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_completions_are_counted_as_their_usage_says(counted: Counted, body: dict[str, Any], streams: bool) -> None:
    served, notes = counted
    counts = Counts(served.server.metrics)
    if streams and "best_of" in body:
        body = {**body, "n": body["best_of"]}
    sent = {"model": MODEL, **body, **({"stream": True, "stream_options": {"include_usage": True}} if streams else {})}
    answer = served.client.post("/v1/completions", json=sent)
    usage = usage_of(events_of(answer.content)[-2] if streams else answer.json())
    assert used(notes) == counters(counts) == usage
    check_one_request(counts)


def test_a_prompt_that_is_cached_is_counted_as_cached_once(counted: Counted) -> None:
    served, notes = counted
    served.openai("/v1/completions", LONG)
    notes.take()
    counts = Counts(served.server.metrics)
    answer = served.client.post("/v1/completions", json={"model": MODEL, **LONG, "n": 3}).json()
    assert usage_of(answer)[:2] == used(notes)[:2] == counters(counts)[:2] == (40, 32)


def test_sequences_of_v2_share_their_prompt(counted: Counted) -> None:
    served, notes = counted
    counts = Counts(served.server.metrics)
    body = {"text_input": "a b", "max_tokens": 4, "temperature": 1.0, "num_return_sequences": 3, "stream": True}
    status, *_ = served.generate_stream(body)
    assert status == 200
    prompt, _, generated = used(notes)
    [(admitted, _), *others] = notes.admitted
    assert (prompt, others) == (admitted, [(0, 4)] * 2)
    assert counters(counts) == (prompt, 0, generated)
    check_one_request(counts)


def test_a_prompt_is_admitted_once(counted: Counted) -> None:
    served, notes = counted
    served.openai("/v1/completions", COMPLETIONS[1])
    assert notes.admitted == [(3, 4), (0, 4), (2, 4), (0, 4)]
    notes.take()


def test_a_refused_request_counts_once(counted: Counted) -> None:
    served, notes = counted
    counts = Counts(served.server.metrics)
    notes.refuses = "admit"
    assert served.client.post("/v1/completions", json={"model": MODEL, **COMPLETIONS[0]}).status_code == 429
    call = notes.take()
    assert (call.prompt_tokens, call.generated_tokens, call.finish) == (0, 0, "overloaded")
    check_one_request(counts, "overloaded")


def test_a_request_whose_client_leaves_counts_its_prompt_once(counted: Counted) -> None:
    served, notes = counted
    counts = Counts(served.server.metrics)
    notes.runner.hold_after(3)
    body = {"model": MODEL, "prompt": [5, 6, 7], "n": 4, **SAMPLED, "max_tokens": 50, "stream": True}
    with served.client.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_bytes())
    call = notes.take()
    assert (call.prompt_tokens, call.finish) == (3, "cancelled")
    assert counts.more("sluice_tokens_total:prompt") == 3
    check_one_request(counts, "cancelled")


def test_a_stream_that_fails_counts_its_prompt_once_and_as_failed(counted: Counted) -> None:
    served, notes = counted
    counts = Counts(served.server.metrics)
    notes.runner.hold_after(3)
    body = {"model": MODEL, "prompt": [5, 6, 7], "n": 4, **SAMPLED, "max_tokens": 50, "stream": True}
    with served.client.stream("POST", "/v1/completions", json=body) as answer:
        pieces = answer.iter_bytes()
        next(pieces)
        served.server.live.cancel_here(served.server.live.list_here()[1].id)
        notes.runner.release()
        for _ in pieces:
            pass
    call = notes.take()
    assert (call.prompt_tokens, call.finish) == (3, ErrorCode.CANCELLED.value)
    check_one_request(counts, ErrorCode.CANCELLED.value)


def end_of(prompt_tokens: int, cached_tokens: int = 0) -> TextEvent:
    return TextEvent("", 1, prompt_tokens, 1, FinishReason.STOP, None, cached_tokens)


def counted_alone(function: Any, *arguments: Any) -> Any:
    """Call a function in a context of its own, as the tasks of generations have."""
    return copy_context().run(function, *arguments)


def test_the_first_failure_decides_how_a_request_ended_and_what_it_missed() -> None:
    metrics = GatewayMetrics(targets=GoodputTargets(e2e=1e9))

    def generate(begin: Any) -> None:
        begin(0)
        records = [metrics.open_request("m", "p") for _ in range(3)]
        records[0].observe(end_of(5))
        records[1].fail(SluiceError(ErrorCode.INTERNAL, "broken"))
        for each in records:
            each.close()

    with share_request(1, 3) as begin:
        counted_alone(generate, begin)
    tally = metrics.tallies["m", "p"]
    assert (dict(tally.outcomes), dict(tally.finishes)) == ({"internal": 1}, {"error": 1})
    assert dict(tally.goodput) == {"met": 0, "missed": 1}


def test_steps_of_a_pipeline_have_prompts_of_their_own() -> None:
    metrics = GatewayMetrics()

    def generate(begin: Any) -> None:
        begin(0)
        for prompt_tokens, cached_tokens in ((5, 4), (9, 0), (5, 5), (9, 8)):
            record = metrics.open_request("m", "p")
            record.observe(end_of(prompt_tokens, cached_tokens))
            record.close()

    with share_request(1, 2) as begin:
        counted_alone(generate, begin)
    tally = metrics.tallies["m", "p"]
    assert (tally.prompt_tokens, tally.cached_tokens, tally.outcomes["ok"]) == (14, 4, 1)


def test_a_choice_of_one_generation_shares_nothing() -> None:
    with share_request(1, 1) as begin:
        begin(0)
        assert current_prompt.get() is None
