"""A budget for the reasoning closes it in time, on our own executor and on TensorRT-LLM alike."""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from openai.types.chat import ChatCompletion

from sluice.engine.config import EngineConfig, Runtime
from sluice.engine.types import EngineInfo
from tests.engine.fake_runner import EchoRunner
from tests.engine.in_process_client import InProcessEngineClient
from tests.gateway.answering import MODEL, Answering, answering, answering_stand_in
from tests.gateway.front.http.sse import events_of
from tests.paths import RILL_TOKENIZER
from tests.pipelines.chat.chat_folder import HERMES_TEMPLATE, MARKERS, THINKING, write_chat_folder
from tests.stand_ins.model_folders import EOS, MAX_POSITIONS, VOCAB_SIZE, make_checkpoint

MESSAGES: Any = [{"role": "user", "content": "Where is the sea?"}]
NUM_TOKENS = 40


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose prompts end within the reasoning, unless they are told not to."""
    folder = make_checkpoint(tmp_path_factory.mktemp("models") / "model", with_tokenizer=True)
    template = folder / "chat_template.jinja"
    opening = "{% if closes is not defined %}<think>\n{% endif %}{# </think> #}{% endif %}"
    template.write_text(template.read_text().strip().removesuffix("{% endif %}") + opening)
    return folder


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
Find = Callable[[str], Answering]


@pytest.fixture(scope="module")
def servers(checkpoint: Path) -> Iterator[Find]:
    """Servers over our own executor and over versions of TensorRT-LLM, each started once."""
    config = EngineConfig(model_path=str(checkpoint), tokenizer_path=str(checkpoint), runtime=Runtime.TENSORRT_LLM)
    runner = EchoRunner(vocab_size=VOCAB_SIZE, max_model_len=MAX_POSITIONS, eos_token_ids=(EOS,))
    with ExitStack() as stack:

        @cache
        def find(name: str) -> Answering:
            own = answering(lambda: InProcessEngineClient(config, runner), checkpoint)
            return stack.enter_context(own if name == "own" else answering_stand_in(config, name))

        yield find


@pytest.fixture(params=["own", "1.4.0"])
def server(request: pytest.FixtureRequest, servers: Find) -> Answering:
    return servers(request.param)


def chat(server: Answering, budget: int | None, **fields: Any) -> Any:
    """Return the status and the answer as the stock client reads it, or the error's message."""
    told = {} if budget is None else {"thinking_token_budget": budget}
    body = {"messages": MESSAGES, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, **told, **fields}
    found = server.client.post("/v1/chat/completions", json={"model": MODEL, **body})
    if found.status_code != 200:
        return found.status_code, found.json()["error"]["message"]
    return found.status_code, ChatCompletion.model_validate_json(found.content)


def answer(server: Answering, budget: int | None, **fields: Any) -> Any:
    status, found = chat(server, budget, **fields)
    assert status == 200, found
    return found


@pytest.mark.parametrize("budget", [0, 1, 10])
def test_the_reasoning_ends_with_its_budget(server: Answering, budget: int) -> None:
    found = answer(server, budget)
    assert found.usage.completion_tokens_details.reasoning_tokens == budget
    assert found.usage.completion_tokens == NUM_TOKENS
    assert found.choices[0].message.content
    whole = answer(server, None).choices[0].message
    assert whole.reasoning_content.startswith(getattr(found.choices[0].message, "reasoning_content", ""))


@pytest.mark.parametrize(
    ("fields", "num_thoughts"),
    [
        *(({"thinking": {"type": "enabled", "budget_tokens": num}}, num) for num in (1, 10)),
        ({"thinking": {"type": "enabled", "budget_tokens": 10**30}}, NUM_TOKENS),
        ({"thinking": {"type": "adaptive"}}, NUM_TOKENS),
        *(({"output_config": {"effort": effort}}, num) for effort, num in (("low", 8), ("max", NUM_TOKENS))),
        ({"output_config": {"effort": "high"}, "thinking": {"type": "enabled", "budget_tokens": 3}}, 3),
    ],
)
def test_anthropics_budget_and_effort_are_a_budget(server: Answering, fields: Any, num_thoughts: int) -> None:
    body = {"messages": MESSAGES, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, **fields}
    found = server.client.post("/v1/messages", json={"model": MODEL, **body})
    usage = found.json()["usage"]
    assert (usage["output_tokens"], usage["output_tokens_details"]) == (NUM_TOKENS, {"thinking_tokens": num_thoughts})
    assert "x-sluice-warning" not in found.headers


@pytest.mark.parametrize("budget", [None, -1, NUM_TOKENS])
def test_without_a_budget_that_is_spent_the_model_ends_it_alone(server: Answering, budget: int | None) -> None:
    assert answer(server, budget).usage.completion_tokens_details.reasoning_tokens == NUM_TOKENS


class UnawareClient(InProcessEngineClient):
    """An engine that keeps to no budget by itself, as vLLM's."""

    @property
    def info(self) -> EngineInfo:
        return replace(super().info, refused_sampling={"thinking_token_budget": "not here"})


@pytest.fixture(scope="module")
def unaware(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Answering]:
    """A server over such an engine, with a model whose marks of reasoning are tokens."""
    folder = write_chat_folder(
        RILL_TOKENIZER, tmp_path_factory.mktemp("marks") / "1", HERMES_TEMPLATE + THINKING, MARKERS
    )
    config = EngineConfig(model_path=str(folder), tokenizer_path=str(folder))
    runner = EchoRunner(vocab_size=VOCAB_SIZE + len(MARKERS), max_model_len=MAX_POSITIONS, eos_token_ids=(5,))
    with answering(lambda: UnawareClient(config, runner), folder) as running:
        yield running


@pytest.mark.parametrize("budget", [0, 1, 10])
@pytest.mark.parametrize(
    "fields",
    [{}, {"response_format": {"type": "json_object"}}, {"tools": TOOLS, "tool_choice": "required", "temperature": 1}],
)
def test_a_grammar_keeps_to_a_budget_for_a_runtime_that_does_not(
    unaware: Answering, budget: int, fields: dict[str, Any]
) -> None:
    found = answer(unaware, budget, ignore_eos=False, max_tokens=300, chat_template_kwargs={"opens": True}, **fields)
    assert found.usage.completion_tokens_details.reasoning_tokens == budget
    message = found.choices[0].message
    if "tools" in fields:
        assert message.tool_calls[0].function.name == "look"
        return
    assert message.content
    whole = answer(unaware, None, chat_template_kwargs={"opens": True}).choices[0].message
    assert whole.reasoning_content.startswith(getattr(message, "reasoning_content", ""))


def test_both_executors_give_the_same_answers(server: Answering) -> None:
    _ANSWERS.append(answer(server, 7).choices[0].message.content)
    assert len(set(_ANSWERS)) == 1


_ANSWERS: list[str] = []
KWARGS = "chat_template_kwargs"


@pytest.mark.parametrize(
    ("fields", "budget"),
    [
        *(({"reasoning_effort": effort}, 0) for effort in ("none", "minimal")),
        *(({"reasoning_effort": effort}, num) for effort, num in (("low", 8), ("medium", 20), ("high", 32))),
        ({"reasoning_effort": "xhigh"}, NUM_TOKENS),
        ({"reasoning_effort": "high", "thinking_token_budget": 3}, 3),
        ({KWARGS: {"thinking_budget": 6}}, 6),
        ({KWARGS: {"thinking_budget": -1}}, NUM_TOKENS),
        ({KWARGS: {"enable_thinking": False}}, 0),
    ],
)
def test_what_the_template_does_not_take_is_a_budget(server: Answering, fields: dict[str, Any], budget: int) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    found = server.client.post("/v1/chat/completions", json=body | fields)
    assert found.json()["usage"]["completion_tokens_details"]["reasoning_tokens"] == budget
    assert "x-sluice-warning" not in found.headers
    events = events_of(server.client.post("/v1/chat/completions", json=body | fields | {"stream": True}).content)
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    message = found.json()["choices"][0]["message"]
    for name in ("content", "reasoning_content"):
        assert "".join(each.get(name) or "" for each in deltas) == (message.get(name) or "")


@pytest.mark.parametrize("server", ["own"], indirect=True)
def test_an_answer_matches_its_grammar_after_the_budget(server: Answering) -> None:
    found = answer(server, 5, ignore_eos=False, response_format={"type": "json_object"})
    assert found.choices[0].message.content.startswith("{")
    assert found.usage.completion_tokens_details.reasoning_tokens == 5


@pytest.mark.parametrize(
    ("server", "fields", "words"),
    [
        ("own", {"chat_template_kwargs": {"closes": True}}, "which may write <think> in any tokens, got 5"),
        (
            "own",
            {"thinking_token_budget": None, "chat_template_kwargs": {"thinking_budget": "5"}},
            "an integer from -1",
        ),
        ("own", {"thinking_token_budget": -2}, "thinking_token_budget must be greater than or equal to -1"),
        ("own", {"thinking_token_budget": 10**30}, "thinking_token_budget must be less than 2147483648"),
        ("own", {"bad_words": ["</think>"]}, "bad_words must let the tokens .* thinking_token_budget closes"),
        ("1.4.0", {"allowed_token_ids": [100, 101]}, "allowed_token_ids must let the tokens"),
        ("1.4.0", {"no_repeat_ngram_size": 2}, "no_repeat_ngram_size must let the tokens"),
        ("1.4.0", {"min_tokens": 9, "stop_token_ids": [*range(3, VOCAB_SIZE)]}, "stop_token_ids must"),
    ],
    indirect=["server"],
)
def test_a_budget_that_nobody_would_keep_to_is_refused(server: Answering, fields: dict[str, Any], words: str) -> None:
    status, message = chat(server, 5, **fields)
    assert status == 400 and re.search(words, message), message
