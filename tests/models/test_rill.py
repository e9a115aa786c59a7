"""The files of the bundled model are as its card and the project promise."""

import json
import math
from typing import Any

from safetensors import safe_open
from transformers import AutoTokenizer

from tests import paths
from training.rill.conversation import CHAT_TEMPLATE, SPECIAL_TOKENS, Conversation, call_text, result_text

RILL = paths.MODELS / "rill"


def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(RILL / "1", local_files_only=True)


def test_the_weights_are_bf16_of_the_promised_size() -> None:
    file = RILL / "1" / "model.safetensors"
    with safe_open(file, "np") as weights:
        slices = [weights.get_slice(name) for name in weights.keys()]  # noqa: SIM118 - it is no mapping
    assert {piece.get_dtype() for piece in slices} == {"BF16"}
    assert 8e6 <= sum(math.prod(piece.get_shape()) for piece in slices) <= 15e6
    assert file.stat().st_size <= 30e6


def test_the_context_is_at_least_1024_and_decoding_is_greedy() -> None:
    assert json.loads((RILL / "1" / "config.json").read_text())["max_position_embeddings"] >= 1024
    assert json.loads((RILL / "1" / "generation_config.json").read_text())["do_sample"] is False


def test_special_tokens_have_the_ids_that_training_gave_them() -> None:
    assert tokenizer().convert_tokens_to_ids(list(SPECIAL_TOKENS)) == list(range(len(SPECIAL_TOKENS)))


def test_the_chat_template_writes_what_training_saw() -> None:
    conversation = Conversation((("What does len do?", "It counts."), ("And sum?", "It adds.")), system="Be brief.")
    whole = "".join(text for text, _ in conversation.segments())
    rendered = tokenizer().apply_chat_template(conversation.messages(), tokenize=False, add_generation_prompt=True)
    assert rendered == whole.removesuffix("It adds.<|end|>")
    assert (RILL / "1" / "chat_template.jinja").read_text() == CHAT_TEMPLATE


def test_the_chat_template_writes_tools_calls_and_results_as_training_saw_them() -> None:
    weather = {
        "name": "get_weather",
        "description": "Get the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}, "day": {}},
            "required": ["city"],
        },
    }
    tools = [{"type": "function", "function": weather}, {"type": "function", "function": {"name": "now"}}]
    calls = [
        {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "São Paulo"}}},
        {"id": "2", "type": "function", "function": {"name": "now", "arguments": "{}"}},
    ]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is the weather in São Paulo, and what time is it?"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "It rains."},
        {"role": "tool", "tool_call_id": "2", "content": "12:00"},
    ]
    rendered = tokenizer().apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    asked = Conversation(
        (
            (
                messages[1]["content"],
                call_text("get_weather", {"city": "São Paulo"}) + "\n" + call_text("now", {}),
            ),
            (result_text(["It rains.", "12:00"]), ""),
        ),
        system="Be brief.",
        tools=tuple(tools),
    )
    assert rendered == "".join(text for text, _ in asked.segments()).removesuffix("<|end|>")
    assert (
        "<|system|>Be brief.\n\nTools:\nget_weather(city: string, unit?: celsius|fahrenheit, day?: any): "
        "Get the weather.\nnow()<|end|><|user|>What"
    ) in rendered


def test_text_survives_the_tokenizer() -> None:
    text = "def f(x): return 'naïve 漢字 🙂' # 12345\n\tSELECT * FROM t;"
    one = tokenizer()
    assert one.decode(one.encode(text, add_special_tokens=False)) == text
