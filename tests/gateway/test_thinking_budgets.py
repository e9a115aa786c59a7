"""A budget for the reasoning closes it in time, on our own executor and on TensorRT-LLM alike."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from engine.client.base import EngineClient
from engine.client.process import ProcessEngineClient
from engine.config import EngineConfig, Runtime
from tests.engine.fake_runner import EchoRunner
from tests.engine.in_process_client import InProcessEngineClient
from tests.gateway.answering import Answering, answering
from tests.stand_ins.model_folders import EOS, MAX_POSITIONS, VOCAB_SIZE, make_checkpoint
from tests.stand_ins.paths import PYTHONPATH

MODULE = "engine.delegated.tensorrt_llm.process"
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


@pytest.fixture(scope="module", params=["own", "1.2.1", "1.4.0"])
def server(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[Answering]:
    config = EngineConfig(model_path=str(checkpoint), tokenizer_path=str(checkpoint), runtime=Runtime.TENSORRT_LLM)

    def engine() -> EngineClient:
        if request.param == "own":
            return InProcessEngineClient(
                config, EchoRunner(vocab_size=VOCAB_SIZE, max_model_len=MAX_POSITIONS, eos_token_ids=(EOS,))
            )
        return ProcessEngineClient(config, module=MODULE)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", PYTHONPATH)
        patch.setenv("STAND_IN_VERSION", request.param)
        with answering(engine, checkpoint) as running:
            yield running


def chat(server: Answering, budget: int | None, **fields: Any) -> Any:
    told = {} if budget is None else {"thinking_token_budget": budget}
    with openai.OpenAI(base_url=f"{server.client.base_url}/v1", api_key="none", max_retries=0) as client:
        return client.chat.completions.create(
            model="rill", messages=MESSAGES, max_tokens=NUM_TOKENS, temperature=0,
            extra_body={"ignore_eos": True, **told, **fields},
        )  # fmt: skip


ABLE = pytest.mark.parametrize("server", ["own", "1.4.0"], indirect=True)


@ABLE
@pytest.mark.parametrize("budget", [0, 1, 10])
def test_the_reasoning_ends_with_its_budget(server: Answering, budget: int) -> None:
    answer = chat(server, budget)
    assert answer.usage.completion_tokens_details.reasoning_tokens == budget
    assert answer.usage.completion_tokens == NUM_TOKENS
    assert answer.choices[0].message.content
    whole = chat(server, None).choices[0].message
    assert whole.reasoning_content.startswith(getattr(answer.choices[0].message, "reasoning_content", ""))


@ABLE
@pytest.mark.parametrize("budget", [None, -1, NUM_TOKENS])
def test_without_a_budget_that_is_spent_the_model_ends_it_alone(server: Answering, budget: int | None) -> None:
    assert chat(server, budget).usage.completion_tokens_details.reasoning_tokens == NUM_TOKENS


@ABLE
def test_both_executors_give_the_same_answers(server: Answering) -> None:
    _ANSWERS.append(chat(server, 7).choices[0].message.content)
    assert len(set(_ANSWERS)) == 1


_ANSWERS: list[str] = []


@pytest.mark.parametrize("server", ["own"], indirect=True)
def test_an_answer_matches_its_grammar_after_the_budget(server: Answering) -> None:
    answer = chat(server, 5, ignore_eos=False, response_format={"type": "json_object"})
    assert answer.choices[0].message.content.startswith("{")
    assert answer.usage.completion_tokens_details.reasoning_tokens == 5


@pytest.mark.parametrize(
    ("server", "fields", "words"),
    [
        ("1.2.1", {}, "thinking_token_budget must be left out: TensorRT-LLM 1.2.1 has none, later versions of 1.3 do"),
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
    with pytest.raises(openai.BadRequestError, match=words):
        chat(server, 5, **fields)
