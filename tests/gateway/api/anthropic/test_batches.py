"""Batches and models as Anthropic's own client sees them."""

from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from tests.gateway.front.http.live import MODEL, LiveServer
from tests.waiting import PATIENCE_S, wait_for

if TYPE_CHECKING:
    import anthropic
    from anthropic.types.messages import MessageBatch

PATH = "/v1/messages/batches"
PARAMS: dict[str, Any] = {"model": MODEL, "max_tokens": 3, "messages": [{"role": "user", "content": "x"}]}
KEY = {"authorization": "Bearer none"}
LONG = {**PARAMS, "max_tokens": 900}


@pytest.fixture
def client(live: LiveServer) -> "Iterator[anthropic.Anthropic]":
    import anthropic

    with anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0, timeout=PATIENCE_S) as stock:
        yield stock


def items(*params: dict[str, Any]) -> Any:
    return [{"custom_id": f"r{number}", "params": each} for number, each in enumerate(params)]


def wait(client: "anthropic.Anthropic", batch: "MessageBatch") -> "MessageBatch":
    """Return the batch when it has ended."""
    return wait_for(
        lambda: client.messages.batches.retrieve(batch.id), lambda found: found.processing_status == "ended"
    )


def results(client: "anthropic.Anthropic", batch: "MessageBatch") -> dict[str, Any]:
    found = list(client.messages.batches.results(batch.id))
    by_id = {each.custom_id: each.result for each in found}
    assert len(by_id) == len(found)
    return by_id


def test_a_batch_gets_the_answers_of_live_requests(client: "anthropic.Anthropic") -> None:
    asked = {**PARAMS, "temperature": 0}
    batch = client.messages.batches.create(requests=items(*[asked] * 20, {**PARAMS, "temperature": 9}))
    assert (batch.type, batch.processing_status, batch.request_counts.processing) == (
        "message_batch",
        "in_progress",
        21,
    )
    assert batch.expires_at - batch.created_at == timedelta(days=1) and batch.results_url is None
    done = wait(client, batch)
    counts = done.request_counts
    assert (counts.succeeded, counts.errored, counts.processing, counts.canceled) == (20, 1, 0, 0)
    assert done.ended_at is not None and done.cancel_initiated_at is None
    found = results(client, done)
    live = client.messages.create(**PARAMS, extra_body={"temperature": 0})
    assert [found[f"r{n}"].message.content for n in range(20)] == [live.content] * 20
    error = found["r20"].error.error
    assert error.type == "invalid_request_error" and "temperature must be between" in error.message


def test_a_batch_that_is_cancelled_says_what_did_not_come(client: "anthropic.Anthropic") -> None:
    batch = client.messages.batches.create(requests=items(*[LONG] * 200))
    assert client.messages.batches.cancel(batch.id).processing_status in ("canceling", "ended")
    done = wait(client, batch)
    assert done.cancel_initiated_at is not None
    kinds = [result.type for result in results(client, done).values()]
    assert len(kinds) == 200 and kinds.count("canceled") == done.request_counts.canceled > 0
    assert client.messages.batches.cancel(batch.id).processing_status == "ended"


def test_batches_are_listed_and_deleted(client: "anthropic.Anthropic", live: LiveServer) -> None:
    made = [wait(client, client.messages.batches.create(requests=items(PARAMS))).id for _ in range(3)]
    newest = [each.id for each in client.messages.batches.list(limit=2).data]
    assert newest == [made[2], made[1]]
    assert made[0] in [each.id for each in client.messages.batches.list(limit=2, after_id=made[1]).data]
    assert [each.id for each in client.messages.batches.list(limit=1, before_id=made[0]).data] == [made[1]]
    assert client.messages.batches.delete(made[0]).type == "message_batch_deleted"
    for path in ("", "/results"):
        missing = live.client.get(f"{live.url}{PATH}/{made[0]}{path}", headers=KEY)
        assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
    assert made[0] not in [each.id for each in client.messages.batches.list()]


def test_a_batch_that_runs_has_no_results_and_is_not_deleted(client: "anthropic.Anthropic", live: LiveServer) -> None:
    batch = client.messages.batches.create(requests=items(*[LONG] * 200))
    url = f"{live.url}{PATH}/{batch.id}"
    refused = live.client.get(f"{url}/results", headers=KEY), live.client.delete(url, headers=KEY)
    assert [each.status_code for each in refused] == [400, 400], [each.text for each in refused]
    others = live.client.get(url, headers={"x-api-key": "another"})
    assert others.status_code == 404
    client.messages.batches.cancel(batch.id)
    wait(client, batch)


@pytest.mark.parametrize(
    ("requests", "status", "words"),
    [
        ([], 400, "requests must not be empty"),
        (items(PARAMS) * 2, 400, "requests[1].custom_id is that of requests[0]"),
        (items({**PARAMS, "stream": True}), 400, "requests[0].params.stream must be false"),
        (items({"messages": []}), 400, "requests[0].params.model is required"),
        (items({**PARAMS, "model": 5}), 400, "requests[0].params.model must be a string, got 5"),
        (items({**PARAMS, "model": "x"}), 404, "x"),
        ([{"custom_id": "", "params": PARAMS}], 400, "requests[0].custom_id must not be empty"),
    ],
)
def test_what_no_batch_can_have_is_named(live: LiveServer, requests: Any, status: int, words: str) -> None:
    response = live.post(PATH, {"requests": requests})
    error = response.json()
    assert (response.status_code, error["type"]) == (status, "error") and words in error["error"]["message"], error


def test_every_answer_has_anthropics_id(live: LiveServer, client: "anthropic.Anthropic") -> None:
    assert client.messages.create(**PARAMS)._request_id
    refused = live.post("/v1/messages", {"model": MODEL})
    assert refused.headers["request-id"] == refused.headers["x-request-id"]


def test_models_are_listed_as_anthropic_lists_them(client: "anthropic.Anthropic") -> None:
    page = client.models.list()
    assert MODEL in [each.id for each in page.data] and page.has_more is False
    found = client.models.retrieve(MODEL)
    assert (found.id, found.type, found.max_input_tokens) == (MODEL, "model", 1024) and found.created_at.year >= 2020
    assert [each.id for each in client.models.list(limit=1)] == [each.id for each in page]


def test_a_model_that_is_none_is_an_error_of_anthropics(client: "anthropic.Anthropic") -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError) as caught:
        client.models.retrieve("none")
    assert isinstance(caught.value.body, dict) and caught.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="limit must be a whole number from 1 to 1000, got '0'"):
        client.models.list(limit=0)
    with pytest.raises(anthropic.BadRequestError, match="after_id must be the id of a model"):
        client.models.list(after_id="none")
