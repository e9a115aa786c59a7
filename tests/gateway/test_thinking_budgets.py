"""A budget for the reasoning closes it in time, on our own executor and on TensorRT-LLM alike."""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from sluice.engine.config import EngineConfig, Runtime
from tests.engine.fake_runner import EchoRunner
from tests.engine.in_process_client import InProcessEngineClient
from tests.gateway.answering import MODEL, Answering, answering, answering_stand_in
from tests.stand_ins.model_folders import EOS, MAX_POSITIONS, VOCAB_SIZE, make_checkpoint

MESSAGES: Any = [{"role": "user", "content": "Where is the sea?"}]
NUM_TOKENS = 40


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose prompts end within the reasoning, unless they are told not to."""
    folder = make_checkpoint(tmp_path_factory.mktemp("models") / "model", with_tokenizer=True)
    template = folder / "chat_template.jinja"
    opening = "{% if enable_thinking is not defined %}<think>\n{% endif %}{# </think> #}{% endif %}"
    template.write_text(template.read_text().strip().removesuffix("{% endif %}") + opening)
    return folder


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


@pytest.mark.parametrize("budget", [None, -1, NUM_TOKENS])
def test_without_a_budget_that_is_spent_the_model_ends_it_alone(server: Answering, budget: int | None) -> None:
    assert answer(server, budget).usage.completion_tokens_details.reasoning_tokens == NUM_TOKENS


def test_both_executors_give_the_same_answers(server: Answering) -> None:
    _ANSWERS.append(answer(server, 7).choices[0].message.content)
    assert len(set(_ANSWERS)) == 1


_ANSWERS: list[str] = []


@pytest.mark.parametrize("server", ["own"], indirect=True)
def test_an_answer_matches_its_grammar_after_the_budget(server: Answering) -> None:
    found = answer(server, 5, ignore_eos=False, response_format={"type": "json_object"})
    assert found.choices[0].message.content.startswith("{")
    assert found.usage.completion_tokens_details.reasoning_tokens == 5


@pytest.mark.parametrize(
    ("server", "fields", "words"),
    [
        ("own", {"chat_template_kwargs": {"enable_thinking": False}}, "which may write <think> in any tokens, got 5"),
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
