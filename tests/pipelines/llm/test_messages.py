"""Conversations as a tensor, and what came with them: cache salts, counts, configurations from two sides."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.llm.model import LlmModel
from sluice.pipelines.text.types import ChatMessage, Conversation
from tests.pipelines.llm.calls import Record, ask, echo, request
from tests.serving.backends.ensemble.parts import config_of

Make = Callable[[ModelConfig], LlmModel]
TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a tensor?"}]
MESSAGES = json.dumps(TURNS)
CHAT = Conversation(tuple(ChatMessage(turn["role"], turn["content"]) for turn in TURNS))


async def expected(model: LlmModel, count: int) -> str:
    token_ids = echo(await model.text.prepare(CHAT), count)
    detokenizer = model.text.tokenizer.detokenizer()
    return detokenizer.feed(token_ids) + detokenizer.flush()


async def test_the_chat_template_renders_them(model: LlmModel) -> None:
    answer = await ask(model, {"messages": MESSAGES, "max_tokens": 9, "return_num_input_tokens": True})
    assert answer["text_output"] == await expected(model, 9)
    assert answer["num_input_tokens"] == len(await model.text.prepare(CHAT))


async def test_they_may_be_a_parameter_and_have_content_parts(model: LlmModel) -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "a tensor?"}]
    messages = json.dumps([TURNS[0], {"role": "user", "content": parts, "name": "ada"}])
    answer = await ask(model, {}, parameters={"messages": messages, "max_tokens": 9})
    assert answer["text_output"] == await expected(model, 9)


async def test_they_are_answered_to_the_end_by_default(model: LlmModel) -> None:
    answer = await ask(model, {"messages": MESSAGES, "return_num_output_tokens": True})
    assert answer["finish_reason"] == "length"
    assert answer["num_output_tokens"] == model.text.max_model_len - len(await model.text.prepare(CHAT))


async def test_rows_of_a_batch_are_conversations(batched: LlmModel) -> None:
    rows = np.array([[MESSAGES], [json.dumps(TURNS[1:])]], object)
    answer = await ask(batched, {"messages": rows, "max_tokens": np.array([[4], [4]], np.int32)})
    assert answer["text_output"][0] == await expected(batched, 4)
    assert answer["text_output"][1] != answer["text_output"][0]


async def test_the_cached_part_of_the_prompt_is_counted_on_request(model: LlmModel) -> None:
    fields = {"messages": MESSAGES, "max_tokens": 2, "return_num_input_tokens": True}
    assert (await ask(model, fields))["num_cached_tokens"] == 0
    assert (await ask(model, fields))["num_cached_tokens"] > 0
    assert (await ask(model, fields | {"cache_salt": "ada"}))["num_cached_tokens"] == 0
    assert (await ask(model, fields, parameters={"cache_salt": "ada"}))["num_cached_tokens"] > 0
    assert "num_cached_tokens" not in await ask(model, {"messages": MESSAGES, "max_tokens": 2})


async def test_empty_texts_ask_for_nothing(model: LlmModel) -> None:
    fields = {"messages": MESSAGES, "max_tokens": 9, "sampling_config": "", "cache_salt": ""}
    parameters = {"sampling_config": '{"max_tokens": 9}', "cache_salt": "ada"}
    assert (await ask(model, fields, parameters=parameters))["text_output"] == await expected(model, 9)
    fields = {"messages": MESSAGES, "max_tokens": 9, "sampling_parameters": ""}
    assert (await ask(model, fields))["text_output"] == await expected(model, 9)


async def test_a_step_and_the_client_may_each_give_a_configuration(model: LlmModel) -> None:
    whole = await expected(model, 30)
    stop = whole[5:8]
    fields = {"messages": MESSAGES, "sampling_config": '{"max_tokens": 30}'}
    answer = await ask(model, fields, parameters={"sampling_config": json.dumps({"stop_words": [stop]})})
    assert answer["text_output"] == whole[: whole.index(stop)]
    with pytest.raises(SluiceError, match="input 'max_tokens' is given twice, with different values"):
        await ask(model, fields, parameters={"sampling_config": '{"max_tokens": 31}'})


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": MESSAGES, "text_input": "a"}, "messages", "give text_input or messages, not both"),
    ({"messages": MESSAGES, "input_ids": [1]}, "messages", "give input_ids or messages, not both"),
    ({"messages": "{"}, "messages", "messages must be a JSON array of messages, "),
    ({"messages": '{"role": "user"}'}, "messages", "Expected `array`, got `object`"),
    ({"messages": '[{"role": "user"}]'}, "messages", r"missing required field `content` - at `\$\[0\]`"),
    ({"messages": '[{"role": "user", "content": [{"type": "image_url"}]}]'}, "messages", "Invalid enum value"),
    (
        {"messages": MESSAGES, "exclude_input_in_output": False},
        "exclude_input_in_output",
        "exclude_input_in_output must be true with messages",
    ),
    ({"messages": MESSAGES, "sampling_config": '{"messages": "[]"}'}, "sampling_config", "is no sampling parameter"),
]


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED)
async def test_refuses_before_it_begins(
    model: LlmModel, records: list[Record], fields: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(SluiceError, match=words) as caught:
        model.submit(request(model, fields), lambda response: None)
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID, param)
    assert (model.num_in_flight, records) == (0, [])


@pytest.mark.parametrize(
    ("messages", "words"),
    [("[]", "messages is empty"), ('[{"role": "robot", "content": "a"}]', r"messages\[0\].role is 'robot'")],
)
async def test_what_no_template_renders_is_refused(model: LlmModel, messages: str, words: str) -> None:
    with pytest.raises(SluiceError, match=words) as caught:
        await ask(model, {"messages": messages})
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID, "messages")


async def test_a_model_may_declare_nothing_else(make: Make) -> None:
    model = make(
        config_of(
            'name: "chat" backend: "llm" input { name: "messages" data_type: TYPE_STRING dims: 1 } '
            'output { name: "text_output" data_type: TYPE_STRING dims: 1 }'
        )
    )
    answer = await ask(model, {"messages": MESSAGES}, parameters={"max_tokens": 4})
    assert answer["text_output"] == await expected(model, 4)
    with pytest.raises(SluiceError, match=r"missing required input\(s\) \['messages'\]|expected 1 inputs but got 0"):
        await ask(model, {}, parameters={"max_tokens": 4})
