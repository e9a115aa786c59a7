"""Conversations in the chat templates of published models: rendered as by transformers, or with more of what was said.

The templates are not part of the repository. `SLUICE_TEMPLATE_CORPUS` names a folder with `*.jinja` files, at any
depth, such as those in the source distributions of llama-cpp-python (vendor/llama.cpp/models/templates) and vllm
(examples, vllm/transformers_utils/chat_templates):

    pip download --no-deps --no-binary :all: --no-build-isolation llama-cpp-python vllm

or by the addresses in https://pypi.org/pypi/llama-cpp-python/json and https://pypi.org/pypi/vllm/json.
"""

import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from sluice.errors import SluiceError
from sluice.gateway.api.openai.chat import parse_messages
from sluice.gateway.api.openai.schemas import ChatCompletionRequest
from sluice.pipelines.text.chat_template import ChatTemplate
from sluice.pipelines.text.tokenizer import _turns
from sluice.pipelines.text.transformers_tokenizer import load_tokenizer
from sluice.pipelines.text.types import TemplateOptions
from tests.paths import MODELS

CORPUS = os.environ.get("SLUICE_TEMPLATE_CORPUS", "")  # noqa: TID251 - whoever runs the tests has the templates
TEMPLATES = sorted(Path(CORPUS).rglob("*.jinja")) if CORPUS else []
needs_corpus = pytest.mark.skipif(not TEMPLATES, reason="SLUICE_TEMPLATE_CORPUS names no folder with *.jinja files")

PLACEHOLDER = "<image>"
Turns = list[dict[str, Any]]
SYSTEM, LATER = {"role": "system", "content": "Be brief."}, {"role": "system", "content": "Now in rhyme."}
USER, AGAIN = {"role": "user", "content": "How is the weather?"}, {"role": "user", "content": "And tomorrow?"}
ANSWER = {"role": "assistant", "content": "It rains."}
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "A city."}},
            "required": ["city"],
        },
    },
}


def call(number: int, city: str) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": json.dumps({"city": city})}
    return {"id": f"call0000{number}", "type": "function", "function": function}


def calling(*cities: str, **fields: Any) -> dict[str, Any]:
    calls = [call(number, city) for number, city in enumerate(cities, 1)]
    return {"role": "assistant", "content": "", **fields, "tool_calls": calls}


def result(number: int, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call0000{number}", "name": "get_weather", "content": text}


CONVERSATIONS: dict[str, tuple[Turns, dict[str, Any]]] = {
    "plain": ([USER], {}),
    "system": ([SYSTEM, USER, ANSWER, AGAIN], {}),
    "system in the middle": ([SYSTEM, USER, ANSWER, LATER, AGAIN], {}),
    "tools": ([SYSTEM, USER], {"tools": [TOOL]}),
    "a call and its result": ([USER, calling("Paris"), result(1, "rain")], {"tools": [TOOL]}),
    "parallel calls": ([USER, calling("Paris", "Rome"), result(1, "rain"), result(2, "sun")], {"tools": [TOOL]}),
    "an answer after a result": ([USER, calling("Paris"), result(1, "rain"), ANSWER, AGAIN], {"tools": [TOOL]}),
    "reasoning": ([USER, {**ANSWER, "reasoning_content": "It is autumn."}, AGAIN], {}),
    "null content": ([USER, calling("Paris", content=None), result(1, "rain")], {"tools": [TOOL]}),
    "two questions in a row": ([USER, AGAIN], {}),
    "a begun answer": ([USER, {"role": "assistant", "content": "It is"}], {"continue_final_message": True}),
    "no generation prompt": ([USER, ANSWER], {"add_generation_prompt": False}),
    "unicode": ([{"role": "user", "content": "Wie ist's? 天気 🌦 \u0301"}], {}),
    "empty": ([{"role": "user", "content": ""}], {}),
    "an image": ([{"role": "user", "content": [IMAGE, {"type": "text", "text": "What is this?"}]}, ANSWER, AGAIN], {}),
}


@cache
def rendering(path: Path) -> ChatTemplate:
    tokenizer = load_tokenizer(MODELS / "rill" / "1")
    tokenizer.chat_template = path.read_text()
    return ChatTemplate(tokenizer)


def ours(path: Path, name: str) -> str:
    """Return the text that a request makes, or "" where it is refused."""
    turns, more = CONVERSATIONS[name]
    fields = ChatCompletionRequest.model_validate({"model": "m", "messages": turns, **more})
    continues = bool(fields.continue_final_message)
    options = TemplateOptions(
        tools=tuple(more.get("tools", ())),
        image_placeholders=(PLACEHOLDER,),
        adds_generation_prompt=fields.add_generation_prompt is not False and not continues,
        continues_final_message=continues,
    )
    template = rendering(path)
    try:
        messages, _ = parse_messages(fields.messages)
        return template.render(_turns(messages, options, template.forms)[0], options, template.forms)
    except SluiceError as error:
        assert "refuses" in error.message
        return ""


def theirs(path: Path, name: str, content: str | None, tools: list[Any] | None = None) -> str:
    """Return the text of transformers, or "" where the template refuses the turns. Turns of calls alone have this
    content, and a conversation without tools has `tools`."""
    turns, more = CONVERSATIONS[name]
    tokenizer = rendering(path)._tokenizer
    continues = more.get("continue_final_message", False)
    try:
        [text], _ = render_jinja_template(
            conversations=[[_with_objects(turn, content) for turn in turns]],
            tools=more.get("tools", tools),
            chat_template=tokenizer.chat_template,
            add_generation_prompt=more.get("add_generation_prompt", not continues),
            continue_final_message=continues,
            **tokenizer.special_tokens_map,
        )
    except Exception:  # a template can raise anything
        return ""
    return str(text)


def _with_objects(turn: dict[str, Any], content: str | None) -> dict[str, Any]:
    """Return a turn with arguments as objects, and images without their addresses, as transformers' documentation has
    them."""
    if isinstance(turn["content"], list):
        return {**turn, "content": [{"type": "image"} if part is IMAGE else part for part in turn["content"]]}
    calls = [
        {**each, "function": {**each["function"], "arguments": json.loads(each["function"]["arguments"])}}
        for each in turn.get("tool_calls", ())
    ]
    return {**turn, "content": content, "tool_calls": calls} if calls else turn


def said(turns: Turns) -> Iterator[str]:
    """Yield what a rendered conversation has to have: contents, arguments and results."""
    for turn in turns:
        content = turn["content"] or ""
        yield from [content] if isinstance(content, str) else [content[1]["text"]]
        yield from (json.loads(each["function"]["arguments"])["city"] for each in turn.get("tool_calls", ()))


def outcome(path: Path, name: str) -> str:
    """Return how our text of a conversation compares to transformers'."""
    text, needles = ours(path, name), list(said(CONVERSATIONS[name][0]))
    expected = [theirs(path, name, ""), theirs(path, name, None), theirs(path, name, "", [])]
    if text in expected[:2]:
        return "equal" if text else "both refuse"
    if not text:
        return "refused by us alone"
    are_good = [all(needle in each for needle in needles) and not _is_odd(each) for each in (text, *expected)]
    return "more than theirs" if are_good[0] and (not any(are_good[1:3]) or text in expected) else "different"


def _is_odd(text: str) -> bool:
    """Whether a text has Python's own form of a value where a model expects JSON or text."""
    return "{'" in text or "None" in text


@needs_corpus
@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_published_template_renders_as_with_transformers(path: Path) -> None:
    names = [name for name in CONVERSATIONS if name != "an image" or rendering(path).forms.takes_images]
    outcomes = {name: outcome(path, name) for name in names}
    assert not {name: each for name, each in outcomes.items() if each in ("different", "refused by us alone")}
