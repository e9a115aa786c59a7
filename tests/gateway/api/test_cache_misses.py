"""Why the beginning of a session's prompt was computed again: conversations that are changed at random, and what the
answers name as the cause."""

import json
import random
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from sluice.engine.config import EngineConfig
from sluice.gateway.api.anthropic.prompt import find_turn, parse_conversation
from sluice.gateway.api.anthropic.schemas import MessagesRequest
from sluice.gateway.options.config import ServeConfig
from sluice.pipelines.text.sessions import CHUNK_CHARS
from tests.engine.in_process_client import InProcessEngineClient
from tests.gateway.front.http.live import END, MODEL, LiveServer, SteppedRunner, live_server
from tests.gateway.repositories import llm_model
from tests.paths import RILL_TOKENIZER
from tests.pipelines.chat.chat_folder import HERMES_TEMPLATE, write_chat_folder
from tests.waiting import PATIENCE_S

WORDS = ("block", "queue", "token", "stream", "prefix", "shard", "replica", "router", "kernel", "tensor", "cache")
STYLED = "{% if style is defined %}<|system|>Write in the style of {{ style }}, and in no other one.<|end|>{% endif %}"
OTHER, ADAPTER = "other", "polite"
NUM_BLOCKS = 96
Body = dict[str, Any]
Expected = tuple[str, str] | None


@dataclass
class Chat:
    """A conversation of a session, as a body, with its random numbers."""

    rng: random.Random
    body: Body = field(default_factory=dict)

    def __post_init__(self) -> None:
        messages = [{"role": "system", "content": self.words(24)}]
        for _ in range(self.rng.randint(2, 3)):
            messages += self.turn()
        messages.append({"role": "user", "content": self.words(12)})
        self.body = {"model": MODEL, "messages": messages, "max_tokens": 1, "temperature": 0}
        if self.rng.random() < 0.6:
            self.body["tools"] = [self.tool(n) for n in range(self.rng.randint(2, 3))]

    def words(self, count: int) -> str:
        return " ".join(self.rng.choice(WORDS) for _ in range(count))

    def turn(self, *roles: str) -> list[Body]:
        return [{"role": role, "content": self.words(16)} for role in roles or ("user", "assistant")]

    def go_on(self) -> None:
        self.body["messages"] += self.turn("assistant", "user")

    def tool(self, number: int) -> Body:
        function = {"name": f"tool_{number}", "description": self.words(8), "parameters": {"type": "object"}}
        return {"type": "function", "function": function}

    @property
    def messages(self) -> list[Body]:
        messages: list[Body] = self.body["messages"]
        return messages

    @property
    def tools(self) -> list[Body]:
        """The tools, two of them where there were none."""
        tools: list[Body] = self.body.setdefault("tools", [self.tool(n) for n in range(2)])
        return tools

    def place(self, most: int = 4) -> int:
        """Return the index of a message that is no system message, and that others follow."""
        return self.rng.randint(1, most)


def nothing(chat: Chat) -> Expected:
    return None


def a_turn_is_added(chat: Chat) -> Expected:
    chat.go_on()
    return None


def a_message_is_changed(chat: Chat) -> Expected:
    place = chat.place()
    chat.messages[place]["content"] = chat.words(16)
    return "messages_changed", f"messages[{place}]"


def messages_are_inserted(chat: Chat) -> Expected:
    place = chat.place()
    chat.messages[place:place] = chat.turn()
    return "messages_changed", f"messages[{place}]"


def messages_are_deleted(chat: Chat) -> Expected:
    place = chat.place(2)
    del chat.messages[place : place + 2]
    return "messages_changed", f"messages[{place}]"


def the_conversation_is_cut_and_goes_on_otherwise(chat: Chat) -> Expected:
    place = chat.place(3)
    chat.messages[place:] = [*chat.turn(), *chat.turn(), *chat.turn()]
    return "messages_changed", f"messages[{place}]"


def messages_change_places(chat: Chat) -> Expected:
    place, messages = chat.place(2), chat.messages
    messages[place], messages[place + 2] = messages[place + 2], messages[place]
    return "messages_changed", f"messages[{place}]"


def the_system_message_is_changed(chat: Chat) -> Expected:
    text = chat.messages[0]["content"]
    place = chat.rng.randrange(len(text) // 2)
    chat.messages[0]["content"] = f"{text[:place]}#{text[place:]}"
    return "system_changed", str(place)


def the_system_message_is_gone(chat: Chat) -> Expected:
    del chat.messages[0]
    return "system_changed", "0"


def a_tool_is_changed(chat: Chat) -> Expected:
    place = chat.rng.randrange(len(chat.tools))
    chat.tools[place]["function"]["description"] = chat.words(8)
    return "tools_changed", f"tools[{place}]"


def a_tool_is_added(chat: Chat) -> Expected:
    place = chat.rng.randint(0, len(chat.tools))
    chat.tools.insert(place, chat.tool(9))
    return "tools_changed", f"tools[{place}]"


def tools_change_places(chat: Chat) -> Expected:
    chat.tools.reverse()
    return "tools_changed", "tools[0]"


def tools_are_gone(chat: Chat) -> Expected:
    del chat.body["tools"]
    return "tools_changed", "tools[0]"


def a_template_argument_is_changed(chat: Chat) -> Expected:
    chat.body["chat_template_kwargs"] = {"style": chat.words(3)}
    return "template_changed", "chat_template_kwargs.style"


def the_salt_is_changed(chat: Chat) -> Expected:
    chat.body["cache_salt"] = "salt"
    return "cache_salt_changed", ""


def the_model_is_changed(chat: Chat) -> Expected:
    chat.body["model"] = OTHER
    return "model_changed", ""


def the_adapter_is_changed(chat: Chat) -> Expected:
    chat.body["model"] = f"{MODEL}:{ADAPTER}"
    return "adapter_changed", ""


def others_take_the_cache(chat: Chat) -> Expected:
    return "evicted", ""


CHANGES: list[Callable[[Chat], Expected]] = [
    nothing,
    a_turn_is_added,
    a_message_is_changed,
    messages_are_inserted,
    messages_are_deleted,
    the_conversation_is_cut_and_goes_on_otherwise,
    messages_change_places,
    the_system_message_is_changed,
    the_system_message_is_gone,
    a_tool_is_changed,
    a_tool_is_added,
    tools_change_places,
    tools_are_gone,
    a_template_argument_is_changed,
    the_salt_is_changed,
    the_model_is_changed,
    the_adapter_is_changed,
    others_take_the_cache,
]
NEED_TOOLS = (a_tool_is_changed, a_tool_is_added, tools_change_places, tools_are_gone)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server with two models and an adapter, whose caches hold a few conversations."""
    folder = write_chat_folder(RILL_TOKENIZER, tmp_path_factory.mktemp("chat") / "1", STYLED + HERMES_TEMPLATE)
    config = EngineConfig(model_path=str(folder), lora_modules={ADAPTER: "/adapters/polite"})
    with live_server(ServeConfig(), config, NUM_BLOCKS, checkpoint=folder, on_port=True) as running:

        async def add_other() -> InProcessEngineClient:
            engine = InProcessEngineClient(EngineConfig(model_path=str(folder)), SteppedRunner(NUM_BLOCKS, (END,)))
            await engine.start()
            running.server.plane.repository.add(llm_model(OTHER, folder, engine, running.server.metrics))
            return engine

        other = running.run(add_other())
        yield running
        running.run(other.stop())


def ask(live: LiveServer, body: Body, session: str, tenant: str = "") -> httpx.Response:
    answer = live.post("/v1/chat/completions", body, headers={"x-session-id": session, "x-sluice-tenant": tenant})
    assert answer.status_code == 200, answer.text
    return answer


def miss_of(answer: httpx.Response) -> Body | None:
    found: Body | None = answer.json()["usage"]["prompt_tokens_details"].get("cache_miss")
    header = answer.headers.get("x-sluice-cache", "").split("; ")
    assert header[0] == ("" if found is None else found["reason"])
    return found


def fill_cache(live: LiveServer, rng: random.Random, session: str, tenant: str = "") -> None:
    for _ in range(8):
        text = " ".join(rng.choice(WORDS) for _ in range(300))
        ask(live, {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 1}, session, tenant)


def check(live: LiveServer, number: int) -> None:
    """Have a conversation changed at random, and check what its next answer names as the cause."""
    change, rng = CHANGES[number % len(CHANGES)], random.Random(number)
    chat, session = Chat(rng), f"session {number}"
    if change in NEED_TOOLS:
        assert chat.tools
    first = miss_of(ask(live, chat.body, session))
    assert first is not None
    assert first["reason"] == "first_request"
    for _ in range(rng.randint(0, 2)):  # turns in which nothing is wrong
        chat.go_on()
        assert miss_of(ask(live, chat.body, session)) is None
    before = deepcopy(chat.body)
    expected = change(chat)
    if change is others_take_the_cache:
        fill_cache(live, rng, f"thief {number}")
    found = miss_of(ask(live, chat.body, session))
    if expected is None:
        assert found is None, (change.__name__, found)
        return
    reason, place = expected
    assert found is not None, (change.__name__, before, chat.body)
    assert found["reason"] == reason, (change.__name__, found)
    assert found["missed_tokens"] > 0
    assert found["message"]
    if reason == "system_changed":
        assert found["character"] <= int(place) < found["character"] + CHUNK_CHARS
    elif reason == "evicted":
        assert found["evicted_for"] == f"thief {number}"
        assert found["evicted_s"] >= 0
    else:
        assert found.get("at", "") == place, (change.__name__, found)
    assert miss_of(ask(live, chat.body, session)) is None, "it is the session's last prompt now"


def test_the_cause_is_named_whatever_of_a_conversation_is_changed(live: LiveServer) -> None:
    for number in range(3 * len(CHANGES)):
        check(live, number)


@pytest.mark.long
def test_the_cause_of_500_changes_is_named(live: LiveServer) -> None:
    for number in range(100, 600):
        check(live, number)


def long_chat(number: int) -> Chat:
    return Chat(random.Random(f"long {number}"))


def test_a_prompt_without_messages_is_compared_by_its_characters_or_tokens(live: LiveServer) -> None:
    words = Chat(random.Random(1)).words(80)
    prompts: list[str | list[int]] = [words, f"{words[:200]}#{words[200:]}", list(range(100, 300))]
    prompts.append([*range(100, 170), 7, *range(171, 300)])
    found = []
    for prompt in prompts:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
        usage = live.post("/v1/completions", body, headers={"x-session-id": "texts"}).json()["usage"]
        miss = usage["prompt_tokens_details"]["cache_miss"]
        found.append((miss["reason"], miss.get("character"), miss["token"]))
    assert [each[0] for each in found] == ["first_request", *["prompt_changed"] * 3]
    assert found[1][1] == 192
    assert found[3][1:] == (None, 64)


def test_prompt_log_probabilities_and_others_tenants_are_named(live: LiveServer) -> None:
    chat = long_chat(2)
    for number in range(2):
        miss = miss_of(ask(live, chat.body | {"prompt_logprobs": 0}, "logprobs"))
        assert (miss or {})["reason"] == "not_looked_up", number
    ask(live, chat.body, "victim", "ada")
    fill_cache(live, chat.rng, "secret", "eve")
    found = miss_of(ask(live, chat.body, "victim", "ada"))
    assert found is not None
    assert (found["reason"], found["evicted_for"]) == ("evicted", "another tenant")
    fill_cache(live, chat.rng, "", "ada")
    found = miss_of(ask(live, chat.body, "victim", "ada"))
    assert (found or {})["evicted_for"] == "a request without a session"


def test_several_answers_to_one_prompt_are_one_turn(live: LiveServer) -> None:
    chat = long_chat(3)
    for _ in range(2):
        ask(live, chat.body | {"n": 3}, "several")
    assert miss_of(ask(live, chat.body, "several")) is None
    use = next(each for each in live.server.metrics.sessions.latest(10) if each.name == "several")
    assert (use.num_turns, use.generated_tokens) == (3, 7)
    assert use.prompt_tokens == 3 * ask(live, chat.body, "other").json()["usage"]["prompt_tokens"]
    assert 0 < use.cached_tokens < use.prompt_tokens
    assert use.missed_tokens == 0


def test_openai_s_client_reads_the_reason(live: LiveServer) -> None:
    import openai  # takes seconds, as anthropic does

    chat = long_chat(4)
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        headers = {"session-id": "root", "thread-id": "thread"}
        client.chat.completions.create(**chat.body, extra_headers=headers)
        a_message_is_changed(chat)
        chat.body["max_tokens"] = 3
        stream = client.chat.completions.create(
            **chat.body, stream=True, stream_options={"include_usage": True}, extra_headers=headers
        )
        details = next(each.usage for each in stream if each.usage is not None).prompt_tokens_details
        assert details is not None
        assert (details.model_extra or {})["cache_miss"]["reason"] == "messages_changed"
        kinds = []
        for text in (chat.words(60), chat.words(60)):
            response = client.responses.create(
                model=MODEL,
                input=text,
                max_output_tokens=1,
                extra_headers=headers | {"thread-id": "responses"},
                prompt_cache_options={"comparison_response_id": "resp_1"},
            )
            assert response.prompt_cache_diagnostics is not None
            kinds.append(response.prompt_cache_diagnostics.type)
        assert kinds == ["comparison_response_not_found", "cache_miss"]
        assert json.loads(response.to_json())["prompt_cache_diagnostics"]["reason"] == "input_changed"
        assert response.usage is not None
        assert "cache_miss" in response.usage.input_tokens_details.to_dict()


@pytest.mark.parametrize("is_streamed", [False, True])
def test_anthropic_s_client_reads_the_diagnostics(live: LiveServer, is_streamed: bool) -> None:
    import anthropic

    chat = long_chat(5 + is_streamed)
    session = {"metadata": {"user_id": json.dumps({"session_id": f"anthropic {is_streamed}"})}}
    with anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0, timeout=PATIENCE_S) as client:

        def send(previous: str | None) -> "anthropic.types.Message":
            system, *messages = chat.messages
            body: Any = {"model": MODEL, "max_tokens": 1, "system": system["content"], "messages": messages, **session}
            body["diagnostics"] = {"previous_message_id": previous}
            message: anthropic.types.Message
            if not is_streamed:
                message = client.messages.create(**body)
            else:
                with client.messages.stream(**body) as stream:
                    message = stream.get_final_message()
            return message

        first = send(None)
        assert first.diagnostics is None, "there is nothing to compare it with"
        assert send(first.id).diagnostics is None
        chat.messages[0]["content"] = chat.words(24)
        found = send(first.id)
        assert found.diagnostics is not None
        missed_tokens = json.loads(found.usage.to_json())["cache_miss"]["missed_tokens"]
        assert json.loads(found.usage.to_json())["cache_miss"]["at"] == "system"
        cause = {"type": "system_changed", "cache_missed_input_tokens": missed_tokens}
        assert found.diagnostics.to_dict()["cache_miss_reason"] == cause
        chat.messages[3]["content"] = chat.words(20)
        assert json.loads(send(found.id).usage.to_json())["cache_miss"]["at"] == "messages[2]"


@pytest.mark.parametrize(("system", "before"), [("s", ["system"]), ([{"type": "text", "text": ""}], []), (None, [])])
def test_the_place_of_a_message_is_that_of_anthropic_s_client(system: Any, before: list[str]) -> None:
    results = [{"type": "tool_result", "tool_use_id": f"t{n}", "content": "x"} for n in range(2)]
    calls = [{"type": "tool_use", "id": f"t{n}", "name": "f", "input": {}} for n in range(2)]
    turns = [("user", "a"), ("assistant", calls), ("user", [*results, {"type": "text", "text": "b"}]), ("user", "c")]
    messages = [{"role": role, "content": content} for role, content in [*turns, ("assistant", "d")]]
    body = {"model": MODEL, "max_tokens": 1, "messages": messages, "system": system}
    fields = MessagesRequest.model_validate({name: value for name, value in body.items() if value is not None})
    conversation = parse_conversation(fields).conversation
    places = [find_turn(fields, number) for number in range(len(conversation.messages) + 1)]
    roles = [each.role for each in conversation.messages]
    assert roles == [*(["system"] if before else []), "user", "assistant", "tool", "tool", "user", "assistant"]
    assert places == [*before, *(f"messages[{turn}]" for turn in (0, 1, 2, 2, 2, 4, 5))]


def test_a_header_has_no_text_that_a_client_chose_freely(live: LiveServer) -> None:
    chat = long_chat(7)
    ask(live, chat.body, "header")
    chat.body["chat_template_kwargs"] = {"\r\nx-own: é": 2**70, "style": "blunt"}
    answer = ask(live, chat.body, "header")
    miss = answer.json()["usage"]["prompt_tokens_details"]["cache_miss"]
    assert (miss["reason"], miss["at"]) == ("template_changed", "chat_template_kwargs.\r\nx-own: é")
    assert "x-own" not in answer.headers
    assert re.fullmatch(r"template_changed; token=0; missed=\d+", answer.headers["x-sluice-cache"])
