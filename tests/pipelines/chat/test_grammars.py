"""Grammars of tool calls: each allows the answers that its own format reads, and no others."""

import json
import random
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from sluice.engine.guidance.translate import translate
from sluice.engine.types import Grammar, GrammarKind
from sluice.pipelines.chat.formats import ToolFormat, parse_tools
from sluice.pipelines.chat.lark import LarkWriter
from sluice.pipelines.chat.registry import find_formats
from tests.pipelines.chat.samples import CANONICAL, CITY, ONE_CALL, TOOLS, tool
from tests.pipelines.chat.test_readers import joined, parsed

END = "<end>"
SAMPLES = {sample.tools: sample.text for sample in CANONICAL}
FORMATS = [(name, has_tokens) for name in SAMPLES for has_tokens in (False, True)]


@cache
def _tokenizer(markers: tuple[str, ...]) -> Tokenizer:
    """Return a tokenizer of bytes, and of markers as tokens of their own."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(each, special=False, normalized=False) for each in (END, *markers)])
    return tokenizer


class Grammars:
    """The grammars of one format, over a tokenizer with or without tokens for its marks."""

    def __init__(self, name: str, *, has_tokens: bool) -> None:
        format = find_formats("", name).tools
        assert format is not None
        self.format: ToolFormat = format
        self.tokenizer = _tokenizer(tuple(format.markers) if has_tokens else ())
        end = self.tokenizer.token_to_id(END)
        self._vocabulary = LLTokenizer(self.tokenizer.to_str(), eos_token=end)

    def allows(self, text: str, *, tools: Any = TOOLS, is_required: bool = True, is_parallel: bool = True) -> bool:
        tokens = self.tokenizer.encode(text + END).ids
        matcher = self._matcher(tools, is_required=is_required, is_parallel=is_parallel)
        return matcher.validate_tokens(tokens) == len(tokens)

    def write_at_random(self, tools: Any, seed: int) -> str:
        """Return calls that a model writes to which all tokens are alike."""
        matcher = self._matcher(tools, is_required=True, is_parallel=True)
        chosen, generator = list[int](), random.Random(seed)
        while not matcher.is_stopped():
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            chosen.append(generator.choice(np.flatnonzero(bits)))
            assert matcher.consume_token(int(chosen[-1]))
        return self._vocabulary.decode_bytes(chosen).decode().removesuffix(END)

    def _matcher(self, tools: Any, *, is_required: bool, is_parallel: bool) -> LLMatcher:
        ids = self.tokenizer.get_added_tokens_decoder()
        lark = LarkWriter({token.content: i for i, token in ids.items()})
        write = self.format.required_calls if is_required else self.format.optional_calls
        start = write(parse_tools(tools), lark, is_parallel=is_parallel)
        translation = translate(Grammar(GrammarKind.TOOL_CALLS, lark.grammar(start)))
        matcher = LLMatcher(self._vocabulary, translation.text, log_level=0)
        assert not matcher.get_error(), translation.text
        return matcher


@pytest.mark.parametrize(("name", "has_tokens"), FORMATS)
def test_a_format_allows_its_own_calls_alone(name: str, has_tokens: bool) -> None:
    grammars, text = Grammars(name, has_tokens=has_tokens), SAMPLES[name]
    assert grammars.allows(text)
    assert grammars.allows(text, is_parallel=False) == (name == "openai")
    one = ONE_CALL[name]
    assert grammars.allows(one, is_parallel=False) and grammars.allows(one, tools=TOOLS[1:])
    assert not grammars.allows(one, tools=TOOLS[:1])
    assert not grammars.allows(text + "x")
    assert not grammars.allows("Let me see.")
    for right, wrong in (("2", "two"), ("2", "2.5"), ("city", "town")):
        assert right in text
        assert not grammars.allows(text.replace(right, wrong)), wrong
    if "rail" in text:
        assert not grammars.allows(text.replace("rail", "sail"))
        assert not grammars.allows(text.replace("7.5", "'7'"))


RANDOM_TOOLS = (
    tool("f", {"a": {"enum": ['x "y"', 1]}, "b": {"type": "integer"}, "c": {"maxLength": 4, "type": "string"}}),
    tool("g", {"a": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}}, required=["a"]),
)


@pytest.mark.parametrize(("name", "has_tokens"), FORMATS)
def test_whatever_the_grammar_allows_is_read_as_calls_that_match(name: str, has_tokens: bool) -> None:
    grammars, tools = Grammars(name, has_tokens=has_tokens), parse_tools(RANDOM_TOOLS)
    schemas = {each.name: each.parameters for each in tools}
    num_calls = 0
    for seed in range(10):
        text = grammars.write_at_random(RANDOM_TOOLS, seed)
        reader = grammars.format.reader(tools)
        answer = joined(reader.feed(text) + reader.finish())
        assert answer.calls and not answer.text, text
        num_calls += len(answer.calls)
        for called, arguments in answer.calls:
            jsonschema.validate(json.loads(arguments), schemas[called])
    assert (num_calls > 10) == (name != "openai")


VALUES: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    ({"type": "string", "pattern": "^[A-Z]{3}/$"}, ["OSL/"], ["osl/", "OSL/x", ""]),
    ({"type": "string", "pattern": "[0-9]"}, ["a1b"], ["ab"]),
    ({"type": "string", "maxLength": 3}, ["", "abc", "a<b"], ["abcd"]),
    ({"type": "string", "minLength": 2, "maxLength": 2}, ["ab"], ["a", "abc"]),
    ({"enum": ["a b", "a", 3, None]}, ["a b", "a", 3, None], ["b", 4]),
    ({"const": "a"}, ["a"], ["b"]),
    ({"type": "number", "title": "N"}, [-7, 0, 1.5, 2e-7, 10**18], ["x", 10**20]),
    ({"type": "integer", "maximum": 9}, [9, -20], [10, 1.5]),
    ({"type": "boolean"}, [True, False], ["yes", 2]),
    ({"type": ["integer", "null"]}, [7, None], ["x", 7.5]),
    ({"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/no"}]}, [7, None], ["x"]),
    ({"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}], "title": "T"}, ["ab", None], ["abc", 77777]),
    ({"type": "array", "items": {"enum": [1, "a"]}, "maxItems": 2}, [[], [1, "a"]], [[2], [1, 1, 1]]),
]


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "pythonic"])
@pytest.mark.parametrize("has_tokens", [False, True])
def test_values_that_are_not_written_as_json(name: str, has_tokens: bool) -> None:
    """Each value is allowed where its schema allows it, and is read as what it was."""
    grammars = Grammars(name, has_tokens=has_tokens)
    for schema, right, wrong in VALUES:
        tools = (tool("f", {"a": schema}, required=["a"], **{"$defs": {"no": {"type": "null"}}}),)
        for value in [*right, *wrong]:
            text = _write(name, value)
            assert grammars.allows(text, tools=tools) == (value in right), (schema, text)
        for value in right:
            reader = grammars.format.reader(parse_tools(tools))
            assert parsed(joined(reader.feed(_write(name, value)) + reader.finish())).calls == [("f", {"a": value})]


def _write(name: str, value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    if name == "qwen3_coder":
        return f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"
    if name == "glm45":
        return f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
    return f"[f(a={json.dumps(value) if isinstance(value, str | list) else value})]"


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "pythonic"])
def test_arguments_that_may_have_any_name_or_be_left_out(name: str) -> None:
    grammars, any_name = Grammars(name, has_tokens=False), ({"type": "function", "function": ANY},)
    assert grammars.allows(_write(name, "x"), tools=any_name)
    optional = (tool("f", {"z": {"type": "null"}, "a": CITY, "b": CITY, "c": CITY}, required=["b"]),)
    letters = {"a": "1", "b": "2", "c": "3"}
    for names in ("b", "ab", "bc", "abc"):
        assert grammars.allows(_write_all(name, {each: letters[each] for each in names}), tools=optional), names
    for names in ("", "a", "ac", "ba"):
        assert not grammars.allows(_write_all(name, {each: letters[each] for each in names}), tools=optional), names


ANY = {"name": "f", "parameters": {"type": "object"}}


def _write_all(name: str, arguments: dict[str, str]) -> str:
    if name == "qwen3_coder":
        values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
        return f"<tool_call>\n<function=f>\n{values}</function>\n</tool_call>"
    if name == "glm45":
        pairs = (f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments.items())
        return f"<tool_call>f\n{''.join(pairs)}</tool_call>"
    return f"[f({', '.join(f'{key}={json.dumps(value)}' for key, value in arguments.items())})]"


@pytest.mark.parametrize(("name", "has_tokens"), FORMATS)
def test_a_call_is_held_to_its_schema_where_it_may_be_left_out(name: str, has_tokens: bool) -> None:
    grammars, text = Grammars(name, has_tokens=has_tokens), SAMPLES[name]
    head = "<|channel|>final<|message|>" if name == "openai" else ""
    assert grammars.allows(text, is_required=False)
    assert grammars.allows(f'{head}[1] I "say" {{<>}} so: é\n', is_required=False)
    assert not grammars.allows(text.replace("2", "two"), is_required=False)
    is_text = grammars.allows(text.replace("get_weather", "get_whether"), is_required=False)
    assert is_text == (name in ("pythonic", "llama3_json"))
