"""What a client may do with responses and conversations after they were made."""

from typing import Any

import openai
import orjson
import pytest

from sluice.gateway.api.openai.responses import archive
from tests.gateway.api.openai.responses.test_create import PATH, SENT, prompt_ids
from tests.gateway.front.http.live import MODEL, LiveServer
from tests.waiting import PATIENCE_S, turns_of

LATER: dict[str, Any] = {"model": MODEL, "max_output_tokens": 8, "temperature": 0}


def other_client(live: LiveServer, **headers: str) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S, default_headers=headers
    )


def test_a_response_goes_on_from_another(live: LiveServer, client: openai.OpenAI) -> None:
    first = client.responses.create(**SENT)
    second = client.responses.create(**LATER, input="And then?", previous_response_id=first.id)
    third = client.responses.create(**LATER, input="At last?", previous_response_id=second.id)
    turns = [
        *(("user", SENT["input"]), ("assistant", first.output_text)),
        *(("user", "And then?"), ("assistant", second.output_text)),
        ("user", "At last?"),
    ]
    assert third.output_text == live.echo(prompt_ids(live, *turns), 8), "instructions are not inherited, turns are"
    assert third.previous_response_id == second.id
    items = client.responses.input_items.list(third.id).data
    assert [item.id for item in items][1:] == [second.output[0].id, *[i.id for i in items[2:]]], "newest first"
    assert len(items) == 5


def test_a_reference_is_an_item_of_a_stored_response(live: LiveServer, client: openai.OpenAI) -> None:
    first = client.responses.create(**SENT)
    item_id = first.output[0].id or ""
    sent: Any = [{"type": "item_reference", "id": item_id}, {"role": "user", "content": "Why?"}]
    answer = client.responses.create(**LATER, input=sent)
    ids = prompt_ids(live, ("assistant", first.output_text), ("user", "Why?"))
    assert answer.output_text == live.echo(ids, 8)
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match=item_id):
        client.responses.create(**LATER, input=sent)


def test_what_is_not_stored_or_deleted_is_not_found(live: LiveServer, client: openai.OpenAI) -> None:
    unstored = client.responses.create(**SENT, store=False)
    deleted = client.responses.create(**SENT)
    client.responses.delete(deleted.id)
    for response_id in (unstored.id, deleted.id, "resp_nobody", "conv_nobody"):
        with pytest.raises(openai.NotFoundError, match=response_id):
            client.responses.retrieve(response_id)
        with pytest.raises(openai.NotFoundError, match=response_id):
            client.responses.delete(response_id)
    with pytest.raises(openai.NotFoundError, match=deleted.id):
        client.responses.create(**LATER, input="x", previous_response_id=deleted.id)


@pytest.mark.parametrize("headers", [{"x-sluice-tenant": "other"}, {"authorization": "Bearer other"}])
def test_nobody_sees_what_others_store(live: LiveServer, client: openai.OpenAI, headers: dict[str, str]) -> None:
    mine = client.responses.create(**SENT)
    conversation = client.conversations.create()
    item: Any = [{"type": "item_reference", "id": mine.output[0].id}]
    with other_client(live, **headers) as other:
        for look in (
            lambda: other.responses.retrieve(mine.id),
            lambda: other.responses.delete(mine.id),
            lambda: other.responses.cancel(mine.id),
            lambda: other.responses.input_items.list(mine.id),
            lambda: other.responses.create(**LATER, input="x", previous_response_id=mine.id),
            lambda: other.responses.create(**LATER, input="x", conversation=conversation.id),
            lambda: other.responses.create(**LATER, input=item),
            lambda: other.conversations.retrieve(conversation.id),
            lambda: other.conversations.delete(conversation.id),
        ):
            with pytest.raises(openai.NotFoundError):
                look()
    assert client.responses.retrieve(mine.id).id == mine.id


def test_a_conversation_grows_with_its_responses(live: LiveServer, client: openai.OpenAI) -> None:
    conversation = client.conversations.create(items=[{"role": "user", "content": "Hi"}], metadata={"a": "1"})
    first = client.responses.create(**LATER, input="You?", conversation=conversation.id)
    second = client.responses.create(**LATER, input="So?", conversation={"id": conversation.id})
    assert second.conversation is not None and second.conversation.id == conversation.id
    turns = [("user", "Hi"), ("user", "You?"), ("assistant", first.output_text), ("user", "So?")]
    assert second.output_text == live.echo(prompt_ids(live, *turns), 8)
    items = list(client.conversations.items.list(conversation.id, order="asc", limit=2))
    assert [item.type for item in items] == ["message"] * 5


def test_conversations_and_their_items(client: openai.OpenAI) -> None:
    conversation = client.conversations.create()
    changed = client.conversations.update(conversation.id, metadata={"topic": "x"})
    assert client.conversations.retrieve(conversation.id) == changed
    assert (changed.object, changed.metadata) == ("conversation", {"topic": "x"})
    turns: Any = [{"role": "user", "content": text} for text in "abc"]
    added = client.conversations.items.create(conversation.id, items=turns)
    ids = [item.id or "" for item in added.data]
    assert [item.id for item in client.conversations.items.list(conversation.id, after=ids[2])] == [ids[1], ids[0]]
    assert client.conversations.items.retrieve(ids[1], conversation_id=conversation.id) == added.data[1]
    client.conversations.items.delete(ids[1], conversation_id=conversation.id)
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.retrieve(ids[1], conversation_id=conversation.id)
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.list(conversation.id, after=ids[1])
    assert client.conversations.delete(conversation.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(conversation.id)


def test_a_background_response_goes_on_without_its_client(live: LiveServer, client: openai.OpenAI) -> None:
    live.runner.hold_after(3)
    try:
        begun = client.responses.create(**SENT, background=True)
        assert (begun.status, begun.output) == ("queued", [])
        live.runner.wait_held()
        assert client.responses.retrieve(begun.id).status == "in_progress"
        with pytest.raises(openai.BadRequestError, match="must be a response that is complete"):
            client.responses.create(**LATER, input="x", previous_response_id=begun.id)
    finally:
        live.runner.release()
    live.wait_idle()
    whole = client.responses.create(**SENT)
    done = client.responses.retrieve(begun.id)
    assert (done.status, done.output_text) == ("incomplete", whole.output_text)
    assert client.responses.cancel(begun.id) == done, "what has ended stays as it is"
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(whole.id)
    with pytest.raises(openai.BadRequestError, match="keep their events"):
        client.responses.retrieve(begun.id, stream=True)


def test_the_events_of_a_background_response_may_be_followed_again(live: LiveServer, client: openai.OpenAI) -> None:
    live.runner.hold_after(3)
    try:
        with client.responses.create(**SENT, background=True, stream=True) as stream:
            first = next(iter(stream))
        assert first.type == "response.created" and first.response.status == "queued"
        live.runner.wait_held()
        live.runner.release()
        live_events = list(client.responses.retrieve(first.response.id, stream=True))
        live.wait_idle()
        later_events = list(client.responses.retrieve(first.response.id, stream=True, starting_after=4))
    finally:
        live.runner.release()
    assert [event.sequence_number for event in live_events] == list(range(len(live_events)))
    assert [event.type for event in live_events][:3] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    assert live_events[-1].type == "response.incomplete"
    assert later_events == live_events[5:]


@pytest.mark.parametrize("end", ["cancel", "delete"])
def test_a_background_response_stops_when_its_client_wishes(live: LiveServer, client: openai.OpenAI, end: str) -> None:
    live.runner.hold_after(3)
    try:
        begun = client.responses.create(**{**SENT, "max_output_tokens": 400}, background=True)
        live.runner.wait_held()
        if end == "cancel":
            assert client.responses.cancel(begun.id).status == "cancelled"
            assert client.responses.retrieve(begun.id).status == "cancelled"
        else:
            client.responses.delete(begun.id)
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve(begun.id)
    finally:
        live.runner.release()
    live.wait_idle()
    assert live.blocks_used_after_step() == 0


def test_the_stream_of_a_cancelled_response_ends_as_cancelled(live: LiveServer, client: openai.OpenAI) -> None:
    live.runner.hold_after(3)
    try:
        stream = client.responses.create(**{**SENT, "max_output_tokens": 400}, background=True, stream=True)
        first = next(stream)
        assert first.type == "response.created"
        live.runner.wait_held()
        cancelled = client.responses.cancel(first.response.id)
    finally:
        live.runner.release()
    *_, last = stream
    with client.responses.stream(response_id=first.response.id) as later:
        *_, last_of_helper = later
    events: list[Any] = [last, last_of_helper]
    for event in events:
        assert (event.type, event.response.status, event.response.error) == ("response.failed", "cancelled", None)
    assert cancelled.status == "cancelled"


@pytest.mark.parametrize(
    ("method", "path", "param"),
    [
        ("GET", f"{PATH}/resp_x/input_items?limit=0", "limit"),
        ("GET", f"{PATH}/resp_x/input_items?order=up", "order"),
        ("GET", f"{PATH}/resp_x?starting_after=-2", "starting_after"),
    ],
)
def test_bad_queries_are_refused(live: LiveServer, method: str, path: str, param: str) -> None:
    response = live.request(method, path)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_others_have_their_turn_while_long_items_are_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "_TURN_BYTES", 100)
    items = [{"id": "a" * 60}] * 20
    encoded, num_turns = await turns_of(archive.encode_items(items))
    assert encoded == orjson.dumps(items) and num_turns > 10
