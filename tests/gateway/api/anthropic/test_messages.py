"""Messages as Anthropic's own client sees them, and to the byte as HTTP carries them."""

import json
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from sluice.engine.types import FinishReason
from sluice.pipelines.text.stream import Generate, give
from sluice.pipelines.text.types import ChatMessage, Conversation, ImagePart, TemplateOptions, TextEvent
from tests.gateway.api.test_translators import OF_MESSAGES, translated
from tests.gateway.front.http.live import MODEL, LiveServer
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    import anthropic

PATH = "/v1/messages"
SYSTEM, QUESTION = "Be brief.", "What is a block table?"
TURNS: Any = [{"role": "user", "content": QUESTION}]
BODY: dict[str, Any] = {"model": MODEL, "messages": TURNS, "system": SYSTEM, "max_tokens": 24}
GREEDY: dict[str, Any] = {"temperature": 0}
SENT: dict[str, Any] = {**BODY, "extra_body": GREEDY}


@pytest.fixture(scope="module")
def client(live: LiveServer) -> "Iterator[anthropic.Anthropic]":
    """The stock client without retries, so that a test sees the first answer."""
    import anthropic  # takes seconds, which this file's worker alone is to spend

    with anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0, timeout=PATIENCE_S) as stock:
        yield stock


def prompt_ids(live: LiveServer, *turns: tuple[str, str]) -> list[int]:
    return live.run(live.model.prepare(Conversation(tuple(ChatMessage(*turn) for turn in turns))))


def expected(live: LiveServer) -> str:
    return live.echo(prompt_ids(live, ("system", SYSTEM), ("user", QUESTION)), 24)


def text_of(answer: "anthropic.types.Message | anthropic.types.ParsedMessage[Any]") -> str:
    [block] = answer.content
    assert block.type == "text"
    return block.text


def test_images_keep_their_places() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "12"}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, image, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "c"},
        {"role": "user", "content": [image, result]},
    ]
    body = {**BODY, "system": None, "messages": turns}
    conversation = translated(*OF_MESSAGES, body)[0].prompt
    assert isinstance(conversation, Conversation)
    paths = ("messages[0].content[1].source.data", "messages[2].content[0].source.data")
    first, last = (ImagePart("data:;base64,aGk=", path) for path in paths)
    assert conversation.messages == (
        ChatMessage("user", "ab\n\nc", parts=("a", first, "b", "\n\n", "c", "\n\n", last)),
        ChatMessage("tool", "12", tool_call_id="t"),
    )


def test_streamed_is_what_is_not_streamed(live: LiveServer, client: "anthropic.Anthropic") -> None:
    with client.messages.stream(**SENT) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert len(pieces) > 10 or not live.is_paced, "the tokens did not come one by one"
    assert "".join(pieces) == expected(live)
    num_prompt = len(prompt_ids(live, ("system", SYSTEM), ("user", QUESTION)))
    for answer in (final, client.messages.create(**SENT)):
        assert answer.id.startswith("msg_") and text_of(answer) == expected(live)
        assert (answer.type, answer.role, answer.model) == ("message", "assistant", MODEL)
        assert (answer.stop_reason, answer.stop_sequence, answer.usage.output_tokens) == ("max_tokens", None, 24)
        assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) == num_prompt


def test_events_have_anthropics_names_and_order(live: LiveServer) -> None:
    text = live.post(PATH, {**BODY, **GREEDY, "stream": True}).text
    events = [block.split("\n") for block in text.strip().split("\n\n")]
    names = [lines[0].removeprefix("event: ") for lines in events]
    assert [json.loads(lines[1].removeprefix("data: "))["type"] for lines in events] == names
    assert names[:2] == ["message_start", "content_block_start"]
    assert set(names[2:-3]) == {"content_block_delta"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_blocks_and_turns_of_one_role_are_joined_and_thoughts_left_out(
    live: LiveServer, client: "anthropic.Anthropic"
) -> None:
    turns: Any = [
        {"role": "user", "content": "Hello"},
        {"role": "user", "content": [{"type": "text", "text": "there", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "Hi"}],
        },
        {"role": "user", "content": [{"type": "text", "text": "How "}, {"type": "text", "text": "so?"}]},
    ]
    settings: Any = {"model": MODEL, "messages": turns, "max_tokens": 8, "extra_body": GREEDY}
    answer = client.messages.create(**settings, system=[{"type": "text", "text": SYSTEM}])
    ids = prompt_ids(live, ("system", SYSTEM), ("user", "Hello\n\nthere"), ("assistant", "Hi"), ("user", "How so?"))
    assert text_of(answer) == live.echo(ids, 8)
    count = client.messages.count_tokens(model=MODEL, messages=turns, system=SYSTEM)
    assert count.input_tokens == len(ids)


def test_the_answer_goes_on_with_a_last_turn_of_the_assistant(live: LiveServer, client: "anthropic.Anthropic") -> None:
    turns: Any = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "It is"}]
    conversation = Conversation(
        (ChatMessage("user", QUESTION), ChatMessage("assistant", "It is")),
        TemplateOptions(adds_generation_prompt=False, continues_final_message=True),
    )
    ids = live.run(live.model.prepare(conversation))
    assert live.model.tokenizer.decode(ids, skip_special_tokens=False).endswith("It is")
    settings: Any = {"model": MODEL, "messages": turns, "max_tokens": 8, "extra_body": GREEDY}
    assert text_of(client.messages.create(**settings)) == live.echo(ids, 8)
    assert client.messages.count_tokens(model=MODEL, messages=turns).input_tokens == len(ids)


def test_what_a_schema_says_and_answers_are_not_held_to_is_named(live: LiveServer, monkeypatch: Any) -> None:
    monkeypatch.setattr(live.server.plane, "generate", answer_in_one)
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": "phone"}}}
    output = {"format": {"type": "json_schema", "schema": schema}}
    response = live.post(PATH, {**BODY, "output_config": output, "made_up": 1})
    assert response.json()["content"] == [{"type": "text", "text": "{}"}]
    warning = response.headers["x-sluice-warning"]
    assert "made_up" in warning and "relaxed in the JSON schema" in warning and "phone" in warning


def answer_in_one(*_: Any) -> Generate:
    return partial(give, event=TextEvent("{}", 1, 1, 1, FinishReason.STOP))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"messages": []}, "messages must not be empty"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role must be 'user', 'assistant' or 'system'"),
        ({"messages": [*TURNS, {"role": "assistant", "content": "A "}]}, "messages[1].content of the assistant"),
        (
            {"messages": [{"role": "user", "content": [{"text": "x"}]}]},
            "messages[0].content[0] must be a block, an object",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "base64"}}]}]},
            "messages[0].content[0].source.data is required where its type is base64",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "u"}}]}]},
            "messages[0].content[0].source.url is not supported: model 'rill' takes text alone",
        ),
        ({"tools": [{"name": "t", "input_schema": {}}]}, "no tool calls in a known format; leave out the tools"),
        ({"thinking": {"type": "often"}}, "thinking.type must be 'disabled', 'adaptive', 'enabled' or 'between_tools'"),
        ({"stop_sequences": [""]}, "stop_sequences[0] must not be empty"),
        ({"stop_sequences": ["a" * 1025]}, "stop_sequences[0] has 1025 characters"),
        ({"stop_sequences": ["a"] * 65}, "stop_sequences has 65 strings"),
        ({"logprobs": True}, "logprobs is refused, unless it is false: chat completions have them"),
        ({"stop": ["a"]}, "stop is refused: send stop_sequences"),
        ({"beam_width": 2}, "beam_width needs the TensorRT-LLM runtime"),
    ],
)
def test_bad_input_is_refused_in_anthropics_shape(live: LiveServer, change: dict[str, Any], message: str) -> None:
    response = live.post(PATH, {**BODY, **change})
    answer = response.json()
    assert (response.status_code, answer["type"], answer["error"]["type"]) == (400, "error", "invalid_request_error")
    assert message in answer["error"]["message"]


def test_the_context_may_end_an_answer_before_max_tokens(live: LiveServer, client: "anthropic.Anthropic") -> None:
    words = {"role": "user", "content": "word " * 990}
    sent: Any = {**SENT, "messages": [words], "max_tokens": 32_000}
    with client.messages.stream(**sent) as stream:
        streamed = stream.get_final_message()
    for answer in (streamed, client.messages.create(**sent | {"max_tokens": 10**30})):
        assert answer.stop_reason == "model_context_window_exceeded"
        usage = answer.usage
        num_prompt = usage.input_tokens + (usage.cache_read_input_tokens or 0)
        assert num_prompt + usage.output_tokens == live.model.max_model_len
    assert client.messages.create(**{**sent, "max_tokens": 2}).stop_reason == "max_tokens"


@pytest.mark.parametrize("num_words", [1020, 1500])
def test_a_prompt_that_is_too_long_is_refused_in_anthropics_words(
    client: "anthropic.Anthropic", num_words: int
) -> None:
    import anthropic

    turns: Any = [{"role": "user", "content": "word " * num_words}]
    count = client.messages.count_tokens(model=MODEL, messages=turns, system=SYSTEM).input_tokens
    with pytest.raises(anthropic.BadRequestError, match=f"prompt is too long: {count} tokens > 1023 maximum") as raised:
        client.messages.create(**{**SENT, "messages": turns})
    assert raised.value.request_id and raised.value.request_id == raised.value.body["request_id"]  # type: ignore[index]


def test_a_stream_that_fails_ends_in_an_error_with_the_request_s_id(live: LiveServer) -> None:
    live.runner.hold_after(2)
    body = {**BODY, **GREEDY, "stream": True}
    with live.client.stream("POST", PATH, json=body) as answer:
        pieces = answer.iter_text()
        text = next(pieces)
        live.runner.wait_held()
        live.runner.error = RuntimeError("broken")
        live.runner.release()
        text += "".join(pieces)
    live.runner.error = None
    last = json.loads(text.strip().rpartition("data: ")[2])
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    assert last["request_id"] == answer.headers["request-id"]


def test_thinking_has_no_effect_on_a_model_without_it(live: LiveServer) -> None:
    for thinking in ({"type": "enabled", "budget_tokens": 1024, "display": "omitted"}, {"type": "adaptive"}):
        answer = live.post(PATH, {**BODY, **GREEDY, "thinking": thinking, "output_config": {"effort": "low"}})
        assert answer.json()["content"][0]["text"] == expected(live)
        assert answer.headers["x-sluice-warning"] == "fields without effect here: thinking, output_config.effort"
    assert "x-sluice-warning" not in live.post(PATH, {**BODY, "thinking": {"type": "disabled"}}).headers


def test_models_have_anthropics_shape(live: LiveServer, client: "anthropic.Anthropic") -> None:
    from anthropic.types import ModelInfo

    [listed] = client.models.list()
    found = ModelInfo.model_validate(client.models.retrieve(MODEL).model_dump())
    assert found == listed and found.capabilities is not None
    assert (found.max_input_tokens, found.max_tokens) == (live.model.max_model_len, live.model.max_model_len)
    assert not found.capabilities.thinking.supported and not found.capabilities.image_input.supported


def test_values_of_other_routes_that_change_nothing_are_taken(live: LiveServer) -> None:
    assert live.post(PATH, {**BODY, "n": 1, "logprobs": False}).status_code == 200


def test_clients_raise_their_own_errors(live: LiveServer, client: "anthropic.Anthropic") -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError, match="nobody"):
        client.messages.create(**{**SENT, "model": "nobody"})
    assert live.request("GET", PATH).json()["error"]["type"] == "invalid_request_error"
