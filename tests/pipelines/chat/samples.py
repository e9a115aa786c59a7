"""Answers of each family as its models write them, and the parts that they consist of."""

import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple

CITY = {"type": "string"}


def tool(name: str, properties: dict[str, Any], **schema: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, **schema}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


STOP = {"type": "object", "properties": {"city": CITY, "at": {"type": ["number", "null"]}}, "required": ["city"]}
TOOLS = (
    tool("get_weather", {"city": CITY, "days": {"type": "integer"}}, required=["city"]),
    tool("get_time", {}),
    tool(
        "plan",
        {
            "stops": {"type": "array", "items": {"$ref": "#/$defs/stop"}},
            "note": {"type": ["string", "null"]},
            "is_round": {"type": "boolean"},
            "mode": {"enum": ["rail", "road"]},
        },
        required=["stops"],
        **{"$defs": {"stop": STOP}},
    ),
)


@dataclass
class Answer:
    """The joined parts of an answer. Calls are (name, arguments)."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)


class Sample(NamedTuple):
    """`tools` and `reasoning` are names of formats."""

    tools: str
    text: str
    answer: Answer
    reasoning: str = "none"
    prompt_end: str = ""


WEATHER = ("get_weather", {"city": 'Ål "x" {]} \\ \n é😀', "days": 2})
TIME: tuple[str, dict[str, Any]] = ("get_time", {})
PLAN: tuple[str, dict[str, Any]] = (
    "plan",
    {"stops": [{"city": "Oslo", "at": 7.5}, {"city": "Ås", "at": None}], "is_round": True, "mode": "rail"},
)
CALLS = [WEATHER, TIME, PLAN]
NAMES = [name for name, _ in CALLS]
W, T, P = (json.dumps(arguments, ensure_ascii=False) for _, arguments in CALLS)
RAW_CITY = WEATHER[1]["city"]
STOPS = json.dumps(PLAN[1]["stops"], ensure_ascii=False)
LET = "Let me see."

_DS_BEGIN, _DS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DS_CALL, _DS_SEP, _DS_CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_KIMI, _KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"


def _in_json(name: str, arguments: object) -> str:
    return json.dumps({"name": name, "parameters": arguments}, ensure_ascii=False)


def _in_list(arguments: str = "arguments") -> str:
    calls = [{"name": name, arguments: values} for name, values in CALLS]
    return json.dumps(calls, ensure_ascii=False)


def _deepseek_v3(name: str, arguments: str) -> str:
    return f"{_DS_CALL}function{_DS_SEP}{name}\n```json\n{arguments}\n```{_DS_CALL_END}"


def _deepseek_v31(name: str, arguments: str) -> str:
    return f"{_DS_CALL}{name}{_DS_SEP}{arguments}{_DS_CALL_END}"


def _kimi(name: str, number: int, arguments: str) -> str:
    return f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


_QWEN_WEATHER = (
    f"<tool_call>\n<function=get_weather>\n<parameter=city>\n{RAW_CITY}\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
)
_QWEN_TIME = "<tool_call>\n<function=get_time>\n</function>\n</tool_call>"
_QWEN_PLAN = (
    f"<tool_call>\n<function=plan>\n<parameter=stops>\n{STOPS}\n</parameter>\n"
    "<parameter=is_round>\ntrue\n</parameter>\n<parameter=mode>\nrail\n</parameter>\n</function>\n</tool_call>"
)
_GLM_WEATHER = (
    f"<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>{RAW_CITY}</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
)
_GLM_PLAN = (
    f"<tool_call>plan\n<arg_key>stops</arg_key>\n<arg_value>{STOPS}</arg_value>\n"
    "<arg_key>is_round</arg_key>\n<arg_value>true</arg_value>\n"
    "<arg_key>mode</arg_key>\n<arg_value>rail</arg_value>\n</tool_call>"
)
_PYTHON = (
    r"""get_weather(city='Ål "x" {]} \\ \n \u00e9\U0001F600', days=2), get_time(), """
    """plan(stops=[{"city": "Oslo", 'at': 7.5}, {"city": "Ås", "at": None,},], is_round=True, mode="rail")"""
)
_JSON_IN_PYTHON = (
    f"get_weather(city={json.dumps(RAW_CITY, ensure_ascii=False)}, days=2), get_time(), "
    f'plan(stops={STOPS}, is_round=True, mode="rail")'
)
_ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"

CANONICAL = (
    Sample(
        "hermes",
        f'<tool_call>\n{{"name": "get_weather", "arguments": {W}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "get_time", "arguments": {T}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "plan", "arguments": {P}}}\n</tool_call>',
        Answer("", "", CALLS),
    ),
    Sample("qwen3_coder", f"{_QWEN_WEATHER}\n{_QWEN_TIME}\n{_QWEN_PLAN}", Answer("", "", CALLS)),
    Sample("glm45", f"{_GLM_WEATHER}\n<tool_call>get_time\n</tool_call>\n{_GLM_PLAN}", Answer("", "", CALLS)),
    Sample("granite", f"<|tool_call|>{_in_list()}", Answer("", "", CALLS)),
    Sample("phi4", f"<|tool_call|>{_in_list()}<|/tool_call|>", Answer("", "", CALLS)),
    Sample("phi4_mini_json", f"functools{_in_list()}", Answer("", "", CALLS)),
    Sample("llama3_json", "; ".join(_in_json(n, a) for n, a in CALLS), Answer("", "", CALLS)),
    Sample("pythonic", f"[{_JSON_IN_PYTHON}]", Answer("", "", CALLS)),
    Sample("mistral", f"[TOOL_CALLS]{_in_list()}", Answer("", "", CALLS)),
    Sample(
        "mistral_v11",
        f"[TOOL_CALLS]get_weather[CALL_ID]abcDEF123[ARGS]{W}[TOOL_CALLS]get_time[ARGS]{T}[TOOL_CALLS]plan[ARGS]{P}",
        Answer("", "", CALLS),
    ),
    Sample("deepseek_v3", _DS_BEGIN + "\n".join(map(_deepseek_v3, NAMES, (W, T, P))) + _DS_END, Answer("", "", CALLS)),
    Sample("deepseek_v31", _DS_BEGIN + "".join(map(_deepseek_v31, NAMES, (W, T, P))) + _DS_END, Answer("", "", CALLS)),
    Sample(
        "kimi_k2",
        _KIMI + "".join(map(_kimi, NAMES, range(3), (W, T, P))) + _KIMI_END,
        Answer("", "", CALLS),
    ),
    Sample(
        "openai",
        f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{W}",
        Answer("", "", [WEATHER]),
    ),
)
"""An answer of calls alone for each format of tool calls, one that its own grammar allows."""

ONE_CALL = {
    "hermes": '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>',
    "qwen3_coder": _QWEN_TIME,
    "glm45": "<tool_call>get_time\n</tool_call>",
    "granite": '<|tool_call|>[{"name": "get_time", "arguments": {}}]',
    "phi4": '<|tool_call|>[{"name": "get_time", "arguments": {}}]<|/tool_call|>',
    "phi4_mini_json": 'functools[{"name": "get_time", "arguments": {}}]',
    "llama3_json": '{"name": "get_time", "parameters": {}}',
    "pythonic": "[get_time()]",
    "mistral": '[TOOL_CALLS] [{"name": "get_time", "arguments": {}}]',
    "mistral_v11": "[TOOL_CALLS]get_time[ARGS]{}",
    "deepseek_v3": _DS_BEGIN + _deepseek_v3("get_time", "{}") + _DS_END,
    "deepseek_v31": _DS_BEGIN + _deepseek_v31("get_time", "{}") + _DS_END,
    "kimi_k2": _KIMI + _kimi("get_time", 0, "{}") + _KIMI_END,
    "openai": "<|channel|>commentary to=functions.get_time <|constrain|>json<|message|>{}",
}
"""A call of `get_time` in each format."""

OTHERS = (
    *(Sample(name, text, Answer("", "", [TIME])) for name, text in ONE_CALL.items()),
    # Text and reasoning before, and text after.
    Sample("hermes", f"{LET}\n\n{CANONICAL[0].text}\nDone.", Answer(f"{LET}Done.", "", CALLS)),
    Sample("hermes", f'<think>\nI <tool_call>{{"name": "x"}}\n</think>\n\n{LET}\n{CANONICAL[0].text}',
           Answer(LET, 'I <tool_call>{"name": "x"}\n', CALLS), "think"),
    Sample("qwen3_coder", f"why\n</think>\n\n{LET}\n{_QWEN_TIME}", Answer(LET, "why\n", [TIME]), "qwen3", "<think>\n"),
    Sample("deepseek_v31", f"so{CANONICAL[11].text}", Answer("so", "", CALLS), "deepseek_r1", "</think>"),
    Sample("mistral_v11", f"[THINK]Hm [[/THINK]{LET}{CANONICAL[9].text}", Answer(LET, "Hm [", CALLS), "magistral"),
    Sample("granite", f"Here's my thought process: Here is my\n\nHere is my response:\n{LET}\n{CANONICAL[3].text}",
           Answer(LET, "Here is my\n\n", CALLS), "granite"),
    Sample("openai", f"{_ANALYSIS}<|channel|>commentary<|message|>{LET}<|end|><|start|>assistant"
           f" to=functions.get_weather<|channel|>commentary json<|message|>{W}<|call|>",
           Answer(LET, "Hm.", [WEATHER]), "openai_gptoss"),
    Sample("openai", f"{_ANALYSIS}<|channel|>final<|message|>{LET}<|return|>", Answer(LET, "Hm."), "openai_gptoss"),
    Sample("openai", " to=functions.get_time<|channel|>commentary<|message|><|call|>", Answer("", "", [TIME])),
    Sample("none", f"{_ANALYSIS}<|channel|>final<|message|>{LET}", Answer(LET, "Hm."), "openai_gptoss"),
    Sample("none", "no<thin", Answer("no<thin"), "think"),
    Sample("none", "why</thin", Answer("", "why</thin"), "think", "<think>"),
    Sample("none", "  plain", Answer("  plain"), "granite"),
    # Other ways to write a call.
    Sample("qwen3_coder", "<function=get_weather><parameter=city>Oslo</parameter></function>",
           Answer("", "", [("get_weather", {"city": "Oslo"})])),
    Sample("qwen3_coder", "<tool_call><function=plan><parameter=stops>[]</parameter>"
           "<parameter=note>\nnull\n</parameter><parameter=is_round>True</parameter><parameter=x>{</parameter></function></tool_call>",
           Answer("", "", [("plan", {"stops": [], "note": None, "is_round": True, "x": "{"})])),
    Sample("glm45", "<tool_call>get_weather<arg_key>city</arg_key><arg_value>7</arg_value>"
           "<arg_key>days</arg_key><arg_value>NaN</arg_value></tool_call>",
           Answer("", "", [("get_weather", {"city": "7", "days": "NaN"})])),
    Sample("phi4", 'functools[{"arguments": {}, "name": "get_time"}]', Answer("", "", [TIME])),
    Sample("granite", f'<tool_call>[{{"name":"get_weather","arguments":{json.dumps(W)}}}]', Answer("", "", [WEATHER])),
    Sample("llama3_json", '\n<|python_tag|>{"type": "function", "name": "get_time", "parameters": {}}',
           Answer("", "", [TIME])),
    Sample("pythonic", f"[{_PYTHON}]", Answer("", "", CALLS)),
    Sample("hermes", CANONICAL[0].text.replace("é", "\\u00e9").replace(": ", ":"), Answer("", "", CALLS)),
    Sample("pythonic", "<|python_start|>[get_weather('a\\'b', -1_0)]<|python_end|>",
           Answer("", "", [("get_weather", {"city": "a'b", "days": -10})])),
    Sample("pythonic", r'[get_weather(city="""a"\x41\q""", days=date(1)), get_time()]',
           Answer("", "", [("get_weather", '{"city": "a\\"\\u0041\\\\q", "days": "date"[1]}'), TIME])),
    Sample("mistral", '[TOOL_CALLS] {"name": "get_time", "arguments": {}}', Answer("", "", [TIME])),
    Sample("mistral", "[TOOL_CALLS]get_time{}", Answer("", "", [TIME])),
    Sample("deepseek_v3", CANONICAL[11].text, Answer("", "", CALLS)),
    # Not calls, or not to their end.
    Sample("hermes", "a <tool_call> is a tag <tool", Answer("a <tool_call> is a tag <tool")),
    Sample("hermes", '<tool_call>{"name": 3}', Answer('<tool_call>{"name": 3}')),
    Sample("hermes", '<tool_call>{"name": "f", "arguments": {"a": ', Answer("", "", [("f", '{"a": ')])),
    Sample("hermes", '<tool_call>{"name": "f"}', Answer("", "", [("f", {})])),
    Sample("granite", '<|tool_call|>[{"name": "f", "arguments": {}}, {"x": 1}] y',
           Answer(' {"x": 1}] y', "", [("f", {})])),
    Sample("granite", "<|tool_call|> I cannot", Answer("<|tool_call|> I cannot")),
    Sample("phi4_mini_json", "functools is a module", Answer("functools is a module")),
    Sample("llama3_json", '{"name": "Bob", "parameters": {}}', Answer('{"name": "Bob", "parameters": {}}')),
    Sample("llama3_json", ' {"a": [1]} ok', Answer(' {"a": [1]} ok')),
    Sample("pythonic", "[1](x) [get_time(", Answer("[1](x) [get_time(")),
    Sample("pythonic", "[get_weather(city='Os", Answer("", "", [("get_weather", '{"city": "Os')])),
    Sample("mistral_v11", "[TOOL_CALLS]f[ARGS] x", Answer("[TOOL_CALLS]f[ARGS] x")),
    Sample("kimi_k2", f"{_KIMI}<|tool_call_begin|>??<|tool_call_argument_begin|>{{}}",
           Answer("<|tool_call_begin|>??<|tool_call_argument_begin|>{}")),
    Sample("deepseek_v31", f"{_DS_CALL}f", Answer(f"{_DS_CALL}f")),
    Sample("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n1", Answer("", "", [("f", '{"a": 1')])),
    Sample("qwen3_coder", "<tool_call> <function=f> g", Answer("<tool_call> <function=f> g")),
    Sample("glm45", "a <tool_call> is a tag", Answer("a <tool_call> is a tag")),
    Sample("openai", "plain <|channel|> x", Answer("plain <|channel|> x")),
    Sample("openai", '<|channel|>commentary to=functions.f<|message|>{"a": "', Answer("", "", [("f", '{"a": "')])),
)  # fmt: skip
"""Further answers. Arguments that are no JSON are in their text."""
