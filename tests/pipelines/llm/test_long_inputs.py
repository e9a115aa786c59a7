"""Inputs that are too long to be read on the event loop are refused by their length."""

import json
import tracemalloc
from typing import Any

import numpy as np
import pytest

from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.llm import values
from sluice.pipelines.llm.model import LlmModel
from sluice.pipelines.text import tokenizer
from sluice.pipelines.text.tensor_model import MAX_MESSAGES
from sluice.serving.request import InferRequest
from sluice.serving.tensors import byte_strings
from sluice.serving.tensors.tensor import Tensor
from tests.pipelines.llm.calls import ask

TURN = {"role": "user", "content": "hi"}
TOO_LONG = 4 * tokenizer._FREE_CHARS + 1


async def refusal(model: LlmModel, fields: dict[str, Any], **settings: Any) -> SluiceError:
    with pytest.raises(SluiceError) as caught:
        await ask(model, fields, **settings)
    assert caught.value.code is ErrorCode.INVALID
    return caught.value


@pytest.mark.parametrize("name", ["text_input", "messages"])
async def test_a_text_of_megabytes_is_refused_before_it_is_read(model: LlmModel, name: str) -> None:
    # Bytes that are no UTF-8: reading them would be another error.
    error = await refusal(model, {name: np.array([b"\xff" * TOO_LONG], object)})
    assert error.param == name
    assert f"the prompt has {TOO_LONG} bytes" in error.message
    error = await refusal(model, {}, parameters={name: "x" * TOO_LONG})
    assert f"the prompt has {TOO_LONG} characters" in error.message


async def test_a_text_of_megabytes_in_raw_form_is_refused_without_a_copy(model: LlmModel) -> None:
    text = Tensor("text_input", "BYTES", (1,), memoryview(byte_strings.pack([b"x" * (20 << 20)])))
    tracemalloc.start()
    try:
        text.check_size()
        with pytest.raises(SluiceError, match="the prompt has 20971520 bytes"):
            values.refuse_long_prompts(InferRequest({"text_input": text}), model.text.tokenizer, 512)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


async def test_a_text_that_may_fit_is_tokenized_to_see(model: LlmModel) -> None:
    error = await refusal(model, {"text_input": "a b " * 100_000})
    assert "400000 characters, which are more tokens than this model's context: it is 512 tokens" in error.message


async def test_a_conversation_has_at_most_so_many_messages(model: LlmModel) -> None:
    error = await refusal(model, {"messages": json.dumps([TURN] * (MAX_MESSAGES + 1))})
    assert error.message == f"messages must have at most {MAX_MESSAGES} messages, got {MAX_MESSAGES + 1}"


@pytest.mark.parametrize(
    ("name", "shape", "most"),
    [
        ("input_ids", (values._MAX_PROMPT_TOKENS + 1,), values._MAX_PROMPT_TOKENS),
        ("stop_words_list", (2, values._MAX_ELEMENTS // 2 + 1), values._MAX_ELEMENTS),
    ],
)
async def test_a_list_has_at_most_so_many_elements(
    model: LlmModel, name: str, shape: tuple[int, ...], most: int
) -> None:
    sent = np.ones(shape, np.int32)
    error = await refusal(model, {"input_ids": np.ones(4, np.int32), name: sent})
    assert error.message == f"input '{name}' must have at most {most} elements, got {sent.size}"


async def test_a_grammar_of_megabytes_does_not_reach_the_engine(model: LlmModel) -> None:
    guide = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "a" * ((1 << 20) + 1)}
    error = await refusal(model, {"text_input": "hello", **guide})
    assert error.message == "the grammar must have at most 1048576 characters, got 1048577"
