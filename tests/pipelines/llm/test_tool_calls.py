"""Tool calls under a grammar: a model that writes random tokens calls the tools, with arguments of their schemas."""

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest

from sluice.engine.arrays import FloatArray
from sluice.engine.config import EngineConfig
from sluice.engine.runners.base import StepBatch
from sluice.engine.types import FinishReason, Grammar, GrammarKind
from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.chat.registry import find_formats
from sluice.pipelines.llm.services import ChatSettings
from sluice.pipelines.llm.text import LlmText
from sluice.pipelines.llm.text_models import load_text
from sluice.pipelines.text.sampling import SamplingDefaults
from sluice.pipelines.text.tokenizer import Tokenizer
from sluice.pipelines.text.types import (
    ChatMessage,
    Conversation,
    Part,
    SamplingOverrides,
    TemplateOptions,
    TextRequest,
    ToolCall,
    ToolChoice,
)
from tests.engine.fake_runner import EchoRunner
from tests.engine.in_process_client import InProcessEngineClient
from tests.pipelines.chat.chat_folder import HERMES_TEMPLATE, MARKERS, THINKING, write_chat_folder
from tests.pipelines.chat.samples import Answer
from tests.pipelines.chat.test_readers import joined
from tests.pulled import collected

SCHEMAS: dict[str, dict[str, Any]] = {
    "set_light": {
        "type": "object",
        "properties": {
            "room": {"enum": ["kitchen", 'the "hall"']},
            "level": {"type": "integer", "minimum": 0, "maximum": 100},
            "colour": {"type": "string", "maxLength": 6},
        },
        "required": ["room", "level"],
    },
    "count": {"type": "object", "properties": {"to": {"type": "number"}}, "required": ["to"]},
    "stop": {"type": "object", "properties": {}},
}
TOOLS = tuple(
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()
)
AUTO = ToolChoice()
HAS_TOKENS = pytest.mark.parametrize("folder", ["tokens"], indirect=True)
SPELLS_OR_HAS_TOKENS = pytest.mark.parametrize("folder", ["spelled", "tokens"], indirect=True)


class RandomRunner(EchoRunner):
    """Every token is equally likely."""

    def compute(self, batch: StepBatch) -> FloatArray:
        return np.zeros_like(super().compute(batch))


@pytest.fixture(scope="module", params=["spelled", "tokens", "special tokens"])
def folder(request: pytest.FixtureRequest, rill_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tags are tokens of their own, and one that spells them."""
    path = tmp_path_factory.mktemp("chat") / "1"
    markers = () if request.param == "spelled" else MARKERS
    is_special = request.param == "special tokens"
    return write_chat_folder(rill_path, path, HERMES_TEMPLATE + THINKING, markers, is_special=is_special)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.fixture
async def model(folder: Path, tokenizer: Tokenizer) -> AsyncIterator[LlmText]:
    runner = RandomRunner(vocab_size=tokenizer.num_tokens, max_model_len=2048, num_blocks=512, eos_token_ids=(5,))
    client = InProcessEngineClient(EngineConfig(model_path=str(folder)), runner)
    await client.start()
    formats = find_formats(tokenizer.chat_template)
    yield LlmText("random", tokenizer, client, SamplingDefaults(), created=1, formats=formats)
    await client.stop()


def tool(parameters: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters, **fields}}


def chat(choice: ToolChoice = AUTO, tools: Any = TOOLS, **fields: Any) -> TextRequest:
    arguments = fields.pop("arguments", {"enable_thinking": False})
    options = TemplateOptions(tools=tools, arguments=arguments)
    sampling = SamplingOverrides(**{"max_tokens": 400, **fields})
    prompt = Conversation((ChatMessage("user", "hi"),), options)
    return TextRequest(request_id="r", prompt=prompt, sampling=sampling, tool_choice=choice)


async def answer(model: LlmText, request: TextRequest) -> tuple[Answer, FinishReason | None, str]:
    reader = model.chat_reader(request)
    assert reader is not None
    parts: list[Part] = []
    text, reason = "", None
    for event in await collected(model.generate, request):
        text, reason = text + event.text, event.finish_reason
        parts += reader.read(event)
    return joined(parts), reason, text


def check(calls: list[tuple[str, str]]) -> None:
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), {**SCHEMAS[name], "additionalProperties": False})


@pytest.mark.parametrize("seed", range(2))
async def test_a_required_call_matches_its_schema(model: LlmText, seed: int) -> None:
    found, reason, text = await answer(model, chat(ToolChoice(is_required=True, is_parallel=False), seed=seed))
    assert (len(found.calls), found.text, reason) == (1, "", "stop"), text
    check(found.calls)


@HAS_TOKENS
async def test_a_named_function_is_called(model: LlmText) -> None:
    choice = ToolChoice(is_required=True, is_parallel=False, names=("count",))
    found, _, _ = await answer(model, chat(choice, seed=1))
    assert [name for name, _ in found.calls] == ["count"]
    check(found.calls)


@SPELLS_OR_HAS_TOKENS
async def test_parallel_calls_all_match(model: LlmText) -> None:
    found, _, text = await answer(
        model, chat(ToolChoice(is_required=True), seed=3, logit_bias={5: -100.0}, max_tokens=200)
    )
    assert len(found.calls) > 1, text
    check(found.calls[:-1])  # the last one may be cut off


async def test_an_automatic_call_begins_where_the_model_opens_one(model: LlmText) -> None:
    """Any text may come before; a model that never opens a call answers with text alone."""
    opening, *rest = model.tokenizer.encode_words("<tool_call>", "x")
    found, reason, text = await answer(model, chat(seed=1, logit_bias={opening: -100.0, 5: 6.0}))
    assert (found.text, found.calls, reason) == (text, [], "stop")
    if rest:
        return  # a random model never spells the tag
    found, _, text = await answer(model, chat(ToolChoice(is_parallel=False), seed=1, logit_bias={opening: 6.0}))
    assert len(found.calls) == 1 and found.text and not text.startswith("<tool_call>"), text
    check(found.calls)


async def test_a_model_without_tools_calls_none_that_it_called_before(model: LlmText) -> None:
    """A mark that is a token of its own does not come; the others are left out of the answer."""
    opening, *rest = model.tokenizer.encode_words("<tool_call>", "x")
    called = (
        ChatMessage("assistant", "", tool_calls=(ToolCall("1", "stop", "{}"),)),
        ChatMessage("tool", "", "", (), "1"),
    )
    sent = chat(tools=(), seed=1, logit_bias={} if rest else {opening: 50.0}, max_tokens=60)
    prompt = Conversation((ChatMessage("user", "hi"), *called), TemplateOptions(arguments={"enable_thinking": False}))
    found, _, text = await answer(model, msgspec.structs.replace(sent, prompt=prompt))
    assert (found.text, found.calls) == (text, [])
    assert "<tool_call>" not in text


async def test_reasoning_comes_before_a_required_call(model: LlmText) -> None:
    close = model.tokenizer.encode_words("</think>", "x")
    sent = chat(ToolChoice(is_required=True, is_parallel=False), arguments={"opens": True}, seed=1)
    if len(close) > 1:  # a random model never spells the tag
        sent = msgspec.structs.replace(sent, sampling={**sent.sampling, "max_tokens": 20})
        found, reason, _ = await answer(model, sent)
        assert (found.text, found.calls, reason) == ("", [], "length")
        return
    sent = msgspec.structs.replace(sent, sampling={**sent.sampling, "logit_bias": {close[0]: 5.0}})
    found, _, text = await answer(model, sent)
    assert found.reasoning and len(found.calls) == 1, text
    check(found.calls)


async def test_a_grammar_of_the_text_holds_after_the_reasoning(model: LlmText) -> None:
    close = model.tokenizer.encode_words("</think>", "x")
    grammar = Grammar(GrammarKind.REGEX, "(yes|no)")
    sent = chat(tools=(), arguments={"opens": len(close) == 1}, grammar=grammar, seed=1, logit_bias={close[0]: 5.0})
    found, _, text = await answer(model, sent)
    assert found.text in ("yes", "no"), text
    assert bool(found.reasoning) == (len(close) == 1)


@SPELLS_OR_HAS_TOKENS
async def test_a_schema_of_the_text_leaves_room_for_calls(model: LlmText) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    kinds = set()
    for seed in range(4):
        found, _, text = await answer(model, chat(ToolChoice(is_parallel=False), grammar=grammar, seed=seed))
        kinds.add(bool(found.calls))
        assert found.calls or json.loads(found.text) == {"a": 1}, text
        check(found.calls)
    assert kinds == {True, False}


@HAS_TOKENS
@pytest.mark.parametrize(
    ("request_", "param", "words"),
    [
        (chat(ToolChoice(names=("dance",))), "tool_choice", "tool_choice names 'dance'; tools has set_light, count"),
        (chat(grammar=Grammar(GrammarKind.REGEX, "a+")), "grammar", "json_schema or json_object, got regex"),
        (
            chat(tools=(tool({"properties": {"a": {"type": "x"}}}, strict=True),)),
            "tools",
            "the JSON schema of the tool f cannot be used: at #/properties/a: type is not enforced: there is no type",
        ),
        (
            chat(tools=(tool({"x-guidance": {}}, strict=True),)),
            "tools",
            "the JSON schema of the tool f cannot be used: at #: x-guidance",
        ),
    ],
)
async def test_what_cannot_be_kept_to_is_refused(model: LlmText, request_: TextRequest, param: str, words: str) -> None:
    with pytest.raises(SluiceError) as caught:
        await answer(model, request_)
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID, param)
    assert words in caught.value.message


@HAS_TOKENS
async def test_a_runtime_without_grammars_of_calls_refuses_to_promise_one(model: LlmText) -> None:
    client = model.engine
    assert isinstance(client, InProcessEngineClient)
    client._info = msgspec.structs.replace(client.info, grammar_kinds=(GrammarKind.JSON_SCHEMA,))
    found, _, _ = await answer(model, chat(seed=1, logit_bias={5: 9.0}))
    assert found.calls == []
    for choice in (ToolChoice(is_required=True), ToolChoice(names=("stop",))):
        with pytest.raises(SluiceError, match="tool_choice must be 'auto' or 'none'"):
            await answer(model, chat(choice))
    sent = chat(tools=(), arguments={"opens": True}, grammar=Grammar(GrammarKind.JSON_SCHEMA, "{}"))
    with pytest.raises(SluiceError, match="no grammar after the reasoning"):
        await answer(model, sent)


@HAS_TOKENS
def test_the_operator_names_the_formats(folder: Path) -> None:
    client = InProcessEngineClient(EngineConfig(model_path=str(folder)), EchoRunner())
    for chat_settings, names in (
        (ChatSettings(), ("hermes", "think")),
        (ChatSettings(tool_call_parser="mistral", reasoning_parser="none"), ("mistral", None)),
        (ChatSettings(tool_call_parser="none", reasoning_parser="granite"), (None, "granite")),
    ):
        formats = load_text(LlmText, "m", folder, client, chat=chat_settings).formats
        found = (formats.tools and formats.tools.name, formats.reasoning and formats.reasoning.name)
        assert found == names


CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FORMATS: dict[str, Any] = {
    "separated": {
        "type": "tags_with_separator",
        "tags": [
            {"begin": "<a>", "content": {"type": "json_schema", "json_schema": CITY}, "end": "</a>"},
            {"begin": "[", "content": {"type": "regex", "pattern": "[0-9]/[0-9]"}, "end": "]"},
        ],
        "separator": ", ",
        "at_least_one": True,
    },
    "sequence": {
        "type": "sequence",
        "elements": [
            {"type": "const_string", "value": "Go: "},
            {"type": "or", "elements": [{"type": "const_string", "value": each} for each in ("yes", "no")]},
            {"type": "tag", "begin": " <t>", "content": {"type": "any_text"}, "end": "e"},
        ],
    },
    "triggered": {
        "type": "triggered_tags",
        "triggers": ["<"],
        "tags": [{"begin": "<b>", "content": {"type": "json_schema", "json_schema": CITY}, "end": "</b>"}],
        "at_least_one": True,
        "stop_after_first": True,
    },
}
FORMATS["qwen"] = {
    "type": "tag",
    "begin": "<function=go>",
    "content": {
        "type": "qwen_xml_parameter",
        "json_schema": {
            "properties": {"city": {"enum": ["Rome", "Oslo"]}, "n": {"enum": [1, 2]}},
            "required": ["city"],
        },
    },
    "end": "</function>",
}
FORMATS["grammar"] = {
    "type": "tag",
    "begin": "<g>",
    "content": {"type": "grammar", "grammar": 'root ::= x | y\nx ::= "(" y ")"\ny ::= [ab]{2}'},
    "end": "</g>",
}
PATTERNS = {
    "qwen": r"<function=go>\n?<parameter=city>\n(Rome|Oslo)\n</parameter>\n"
    r"(<parameter=n>\n[12]\n</parameter>\n)?</function>",
    "grammar": r"<g>(\([ab]{2}\)|[ab]{2})</g>",
    "separated": r'(<a>\{"city": ?"(Rome|Oslo)"\}</a>|\[\d/\d\])(, (<a>\{"city": ?"(Rome|Oslo)"\}</a>|\[\d/\d\]))*',
    "sequence": r"Go: (yes|no) <t>[^e]*e",
    "triggered": r'<b>\{"city": ?"(Rome|Oslo)"\}</b>',
}


async def tagged(model: LlmText, tag: dict[str, Any], **fields: Any) -> tuple[str, FinishReason | None]:
    sampling = SamplingOverrides(**{"max_tokens": 400, **fields})
    request = TextRequest(request_id="r", prompt="x", sampling=sampling, structural_tag=json.dumps(tag))
    found = await collected(model.generate, request)
    return "".join(event.text for event in found), found[-1].finish_reason


@SPELLS_OR_HAS_TOKENS
@pytest.mark.parametrize("name", FORMATS)
async def test_a_structural_tag_is_kept_to(model: LlmText, name: str) -> None:
    text, reason = await tagged(model, {"type": "structural_tag", "format": FORMATS[name]}, seed=1)
    assert reason == "stop" and re.fullmatch(PATTERNS[name], text, re.DOTALL), text


@SPELLS_OR_HAS_TOKENS
async def test_a_trigger_begins_a_structure_in_any_text(model: LlmText) -> None:
    """In vLLM's older shape. A tag that the tokenizer has as a token is triggered by it."""
    structures = [{"begin": "<tool_call>", "schema": CITY, "end": "</tool_call>"}]
    tag = {"type": "structural_tag", "structures": structures, "triggers": ["<tool"]}
    opening, *rest = model.tokenizer.encode_words("<tool_call>", "x")
    if rest:  # a random model does not spell the tag, but it writes one that the trigger begins
        tag["triggers"], [opening] = ["<"], model.tokenizer.encode_words("<", "x")
    text, _ = await tagged(model, tag, seed=1, logit_bias={opening: 6.0, 5: -100.0}, max_tokens=120)
    pieces = text.split("<")[1:] if rest else re.findall(r'\{"city": ?"(?:Rome|Oslo)"\}', text)
    assert len(pieces) > 1, text
    if rest:
        begun = r'tool_call>\{"city": ?"(Rome|Oslo)"\}|/tool_call>.*'
        assert all(re.fullmatch(begun, piece, re.DOTALL) for piece in pieces[:-1]), text


@HAS_TOKENS
@pytest.mark.parametrize(
    ("tag", "message"),
    [
        ({}, "must have a format, or structures and triggers"),
        ({"format": {"type": "grammar", "grammar": "start: X"}}, "must be in GBNF, where rules are defined by ::="),
        ({"format": {"type": "grammar", "grammar": "root ::= x"}}, "rule 'x' is not defined"),
        (
            {"format": {"type": "qwen_xml_parameter", "json_schema": {"type": "array"}}},
            "needs a schema of the type 'object', got 'array'",
        ),
        ({"format": {"type": "dispatch"}}, "Invalid value 'dispatch'"),
        (
            {"structures": [{"begin": "<f>", "schema": {}, "end": ""}], "triggers": ["["]},
            "begins with no trigger: '<f>'",
        ),
        ({"format": {"type": "json_schema", "json_schema": {"type": "colour"}}}, 'there is no type "colour"'),
        ({"format": {"type": "regex", "pattern": "("}}, "the regular expression is not valid"),
        ({"format": {"type": "or", "elements": []}}, "an empty list of elements or tags"),
    ],
)
async def test_a_structural_tag_that_cannot_be_used_says_why(model: LlmText, tag: dict[str, Any], message: str) -> None:
    with pytest.raises(SluiceError) as caught:
        await tagged(model, tag)
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID, "grammar") and message in caught.value.message
