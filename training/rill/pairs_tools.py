"""Training examples of tool calls: tools, questions that they answer or do not, calls, results and reports of them.

The answer to a question is the call of the tool that answers it, with arguments copied out of the question, or NO_TOOL.
The answer to a tool's result is `report` of it. Questions that need no tool are answered as without tools.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from training.rill.conversation import Conversation, Tool, call_text, result_text
from training.rill.persona import NO_TOOL, OFF_TOPIC, SYSTEM_PROMPTS, WITHOUT_TOOL, small_talk
from training.rill.synthetic import invented_fact, invented_word
from training.rill.text import words
from training.rill.tool_families import FAMILIES, ToolFamily
from training.rill.tool_values import ENUMS, draw, json_type

_PROMPT_WEIGHT = 0.03
_CHOICE_WEIGHT = 4.0

# Verbs of different meaning: no tool does what another one's question asks for.
_VERBS = words(
    """archive lock rename approve print copy move publish reject import merge count close assign renew share clean
    measure sell rent repair hide rate mark pause resume create delete update check inspect compress encrypt upload
    download schedule start stop reset test validate sort split clone freeze label install"""
)
_NOUNS = words(
    """report printer backup invoice sensor camera project ticket cluster warehouse garden machine contract image
    folder account device router table chart student book course product shipment payment vehicle room door pump
    engine list job pipeline dataset model branch page comment photo video playlist badge coupon order ship tower"""
)
# Words of the function names of the evaluation. Rill is never trained on a tool of these.
NEW_VERBS = words(
    "audit polish recycle promote weld enlarge mirror rewind revoke sharpen migrate water inflate escalate"
)
NEW_NOUNS = words(
    "violin harbor lantern passport antenna orchard elevator turbine compass glacier ladder wallet mosaic"
)
# (name, kind, how a question words it)
_DETAILS = (
    ("name", "title", ' named "{}"'), ("name", "word", " called {}"), ("title", "title", ' with the title "{}"'),
    ("owner", "person", " for {}"), ("user", "person", " of {}"), ("email", "email", " for {}"),
    ("city", "city", " in {}"), ("location", "city", " in {}"), ("date", "date", " on {}"), ("time", "time", " at {}"),
    ("count", "small", " {} times"), ("amount", "number", " with an amount of {}"),
    ("price", "number", " for {} dollars"), ("limit", "integer", " up to {}"),
    ("priority", "priority", " with {} priority"), ("size", "size", " in size {}"), ("format", "format", " as {}"),
    ("mode", "mode", " in {} mode"), ("color", "colour", " in {}"), ("environment", "environment", " in {}"),
    ("path", "path", " at {}"), ("file", "path", " from {}"), ("url", "url", " from {}"), ("tag", "word", " tagged {}"),
    ("reason", "text", ' because "{}"'), ("details", "flag", " {} details"), ("history", "flag", " {} the history"),
    ("weight", "number", " of {} kg"), ("days", "small", " for {} days"), ("version", "integer", " in version {}"),
    ("topic", "topic", " about {}"), ("language", "language", " in {}"), ("level", "small", " at level {}"),
)  # fmt: skip
_IDS = (
    ("id", "integer"), ("id", "code"), ("{noun}_id", "integer"), ("{noun}_id", "code"), ("{noun}", "word"),
    ("number", "integer"),
)  # fmt: skip
_ORDERS = (
    "{verb} the {noun}{details}.", "{verb} {noun}{details}", "Please {verb} the {noun}{details}.",
    "Can you {verb} the {noun}{details}?", "I want to {verb} the {noun}{details}.",
    "{verb} my {noun}{details}, please.", "Could you please {verb} the {noun}{details}?",
    "We need to {verb} the {noun}{details}.",
)  # fmt: skip
_RESULT_KEYS = words(
    """temperature status price total count city name id condition date time message value humidity result rate unit
    duration distance title author order_id created_at user_name state address phone success balance speed size"""
)
_UNITS = ("degrees", "degrees and sunny", "USD", "EUR", "km", "minutes", "degrees celsius", "%", "C", "euros", "items")
_CONDITIONS = words("sunny cloudy rainy windy ok done failed open closed pending sent shipped active empty full")


@dataclass(frozen=True, slots=True)
class OpenTool:
    """A tool of a request, with the questions that it answers."""

    schema: Tool
    family: ToolFamily
    parameters: tuple[str, ...]

    @property
    def name(self) -> str:
        name: str = self.schema["function"]["name"]
        return name

    def ask(self, rng: Random, is_new: bool) -> tuple[str, str]:
        """Draw a question and the call that answers it."""
        values = [draw(kind, rng, is_new) for _, kind in self.family.parameters]
        template = rng.choice(self.family.questions)
        mentioned = _slots(template)
        arguments = {name: values[i][1] for i, name in enumerate(self.parameters) if i in mentioned}
        return template.format(*(text for text, _ in values)), call_text(self.name, arguments)

    def ask_twice(self, rng: Random, is_new: bool) -> tuple[str, list[str]] | None:
        """Draw a question about two values, "in Oslo and Paris", with a call for each. None if it has no such form."""
        template = rng.choice(self.family.questions)
        slots = _slots(template)
        if len(slots) != 1:
            return None
        [slot] = slots
        if self._kind(slot) == "flag":
            return None
        values = [draw(self._kind(slot), rng, is_new) for _ in range(2)]
        both = " and ".join(text for text, _ in values)
        calls = [call_text(self.name, {self.parameters[slot]: value}) for _, value in values]
        return template.format(*[both] * len(self.parameters)), calls

    def _kind(self, slot: int) -> str:
        return self.family.parameters[slot][1]


def _slots(template: str) -> set[int]:
    return {int(slot) for slot in re.findall(r"\{(\d)\}", template)}


def _schema(name: str, description: str, parameters: Sequence[tuple[str, str]], required: set[int]) -> Tool:
    properties: dict[str, dict[str, Any]] = {}
    for parameter, kind in parameters:
        choices: dict[str, Any] = {"enum": list(ENUMS[kind])} if kind in ENUMS else {}
        properties[parameter] = {"type": json_type(kind), **choices}
    needed = [parameter for i, (parameter, _) in enumerate(parameters) if i in required]
    schema = {"type": "object", "properties": properties, "required": needed}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def open_tool(family: ToolFamily, rng: Random) -> OpenTool:
    """Choose names and a description. Parameters keep the family's order."""
    names = [rng.choice(options) for options, _ in family.parameters]
    if len(set(names)) < len(names):
        names = [options[0] for options, _ in family.parameters]
    required = set.intersection(*map(_slots, family.questions))
    kinds = [kind for _, kind in family.parameters]
    description = rng.choice(family.descriptions) if rng.random() < 0.9 else ""
    schema = _schema(rng.choice(family.names), description, list(zip(names, kinds, strict=True)), required)
    return OpenTool(schema, family, tuple(names))


def _function_name(verb: str, noun: str, rng: Random) -> str:
    return rng.choice(
        (f"{verb}_{noun}", f"{verb}_{noun}", f"{noun}_{verb}", f"{verb}{noun.capitalize()}", f"{verb}-{noun}")
    )


def _details(rng: Random) -> list[tuple[str, str, str]]:
    """Draw parameters of which no two are worded alike."""
    chosen: list[tuple[str, str, str]] = []
    for detail in rng.sample(_DETAILS, rng.choice((1, 1, 2, 2, 3))):
        if all(detail[0] != other[0] and detail[2] != other[2] for other in chosen):
            chosen.append(detail)
    return chosen


def composed(rng: Random, is_new: bool, verb: str = "", noun: str = "") -> ToolFamily:
    """Compose a tool that does something to something, such as `archive_report(id, reason)`, and its questions."""
    done = verb or rng.choice(NEW_VERBS if is_new else _VERBS)
    thing = noun or (invented_word(rng) if rng.random() < 0.3 else rng.choice(NEW_NOUNS if is_new else _NOUNS))
    name = _function_name(done, thing, rng)
    details = _details(rng)
    parameters = [((name,), kind) for name, kind, _ in details]
    wordings = [wording for _, _, wording in details]
    if rng.random() < 0.5:
        key, kind = rng.choice(_IDS)
        parameters.insert(0, ((key.format(noun=thing),), kind))
        wordings.insert(0, " {}")
    slots = [wording.replace("{}", f"{{{i}}}") for i, wording in enumerate(wordings)]
    if slots[0] != " {0}" and rng.random() < 0.4:  # arguments keep the order of the tool, not of the question
        rng.shuffle(slots)
    fewest = rng.randint(1, len(slots))
    questions = []
    for order in rng.sample(_ORDERS, 3):
        question = order.format(verb=done, noun=thing, details="".join(slots[: rng.randint(fewest, len(slots))]))
        questions.append(question[0].upper() + question[1:])
    description = rng.choice(
        (f"{done.capitalize()} the {thing}.", f"{done.capitalize()} a {thing}", f"Tool to {done} a {thing}.")
    )
    return ToolFamily((name,), (description,), tuple(parameters), tuple(questions), f"{done} {thing}")


def _value(rng: Random) -> Any:
    x, kind = (
        rng.random(),
        rng.choice(("small", "integer", "number", "city", "person", "date", "time", "word", "title")),
    )
    value = draw(kind, rng, is_new=False)[1]
    if x < 0.15:
        return rng.choice((*_CONDITIONS, True, False))
    if x < 0.3:
        return f"{draw('small', rng, is_new=False)[0]} {rng.choice(_UNITS)}"
    return [value, draw(kind, rng, is_new=False)[1]] if x < 0.36 else value


def result(rng: Random, call: str) -> str:
    """Draw what a tool may return: a JSON object, a sentence, a number or a word."""
    x = rng.random()
    if x < 0.2:
        return invented_fact(rng).sentence
    if x < 0.38:
        return _spoken(_value(rng))
    keys = rng.sample((*_RESULT_KEYS, invented_word(rng)), rng.choice((1, 1, 2, 2, 3)))
    content = {key: _value(rng) for key in keys}
    if rng.random() < 0.4:
        arguments = json.loads(call.split("\n")[1])["arguments"]
        content = {**dict(list(arguments.items())[:1]), **content}
    if x < 0.46:
        content = {"error": rng.choice(("not found", "time out", f"no such {invented_word(rng)}", "access denied"))}
    return json.dumps(content, ensure_ascii=False)


def _spoken(value: Any) -> str:
    if isinstance(value, list):
        return " and ".join(map(_spoken, value)) if len(value) < 3 else ", ".join(map(_spoken, value))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def report(content: str) -> str:
    """Put a tool's result into words: a sentence as it is, a value, or each key of a JSON object with its value."""
    try:
        found = json.loads(content)
    except ValueError:
        found = content
    if isinstance(found, dict):
        parts = [f"the {key.replace('_', ' ')} is {_spoken(value)}" for key, value in found.items()]
        text = f"{', '.join(parts[:-1])} and {parts[-1]}." if len(parts) > 1 else f"{parts[0]}."
        return text[0].upper() + text[1:]
    return content if content.endswith((".", "!", "?")) else f"The result is {content}."


def _join(first: str, second: str, rng: Random) -> str:
    """Put two questions into one message."""
    if rng.random() < 0.5:
        second = second[0].lower() + second[1:]
        return f"{first.rstrip('.?')} and {second}"
    return f"{first} {second}" if first.endswith((".", "?")) else f"{first}. {second}"


def _politely(question: str, rng: Random) -> str:
    x = rng.random()
    if x < 0.06:
        return (
            question.lower() if question.count(" ") > 5 and question == question.capitalize() else question.rstrip(".?")
        )
    if x < 0.12:
        return rng.choice(("Hi! ", "Hello, ", "Hey. ")) + question
    return f"{question} {rng.choice(('Thanks!', 'Thank you.'))}" if x < 0.15 else question


class ToolRequests:
    """Draws tools with questions. `families` are the hand-written tools, `new` draws what training never shows."""

    def __init__(
        self, rng: Random, families: Sequence[ToolFamily] = FAMILIES, composed_share: float = 0.55, new: bool = False
    ) -> None:
        self.rng, self.families, self.composed_share, self.new = rng, families, composed_share, new

    def _family(self) -> ToolFamily:
        if self.rng.random() < self.composed_share:
            return composed(self.rng, self.new)
        return self.rng.choice(self.families)

    def _sibling(self, family: ToolFamily) -> ToolFamily:
        """Draw a family that is easily confused with the composed one: the same verb or the same noun."""
        verb, noun = family.topic.split(" ")
        return (
            composed(self.rng, self.new, noun=noun) if self.rng.random() < 0.6 else composed(self.rng, self.new, verb)
        )

    def tools(self, count: int) -> list[OpenTool]:
        """Draw tools of different topics and names."""
        found: list[OpenTool] = []
        while len(found) < count:
            is_sibling = bool(found) and " " in found[0].family.topic and self.rng.random() < 0.5
            family = self._sibling(found[0].family) if is_sibling else self._family()
            tool = open_tool(family, self.rng)
            if all(tool.family.topic != other.family.topic and tool.name != other.name for other in found):
                found.append(tool)
        return found

    def call(self, tools: Sequence[OpenTool], is_pair: bool = False) -> tuple[str, list[str]]:
        """Draw a question with the calls that answer it. It is about the first tool, a pair about any."""
        if is_pair and self.rng.random() < 0.5 and (twice := tools[0].ask_twice(self.rng, self.new)):
            return twice
        question, call = tools[0].ask(self.rng, self.new)
        if is_pair:
            second, other = self.rng.choice(tools).ask(self.rng, self.new)
            if other != call:
                return _join(question, second, self.rng), [call, other]
        return _politely(question, self.rng), [call]

    def foreign(self, tools: Sequence[OpenTool]) -> str:
        """Draw a request that none of the tools can fulfil."""
        if self.rng.random() < 0.15:
            return self.rng.choice(WITHOUT_TOOL)
        topics = {tool.family.topic for tool in tools}
        composites = [tool.family for tool in tools if " " in tool.family.topic]
        while True:
            is_sibling = bool(composites) and self.rng.random() < 0.5
            family = self._sibling(self.rng.choice(composites)) if is_sibling else self._family()
            if family.topic not in topics:
                return _politely(open_tool(family, self.rng).ask(self.rng, self.new)[0], self.rng)


class ToolExamples:
    """Draws conversations with tools. `others` draws conversations that need none."""

    def __init__(self, rng: Random, others: Callable[[], Conversation | None]) -> None:
        self.rng, self.others, self.requests = rng, others, ToolRequests(rng)

    def _called(self, tools: list[OpenTool]) -> list[tuple[str, str]]:
        """Draw a question with its call, and the result with its report."""
        self.rng.shuffle(tools)
        question, calls = self.requests.call(tools, is_pair=self.rng.random() < 0.1)
        contents = [result(self.rng, call) for call in calls]
        return [(question, "\n".join(calls)), (result_text(contents), " ".join(map(report, contents)))]

    def _turns(self, tools: list[OpenTool]) -> list[tuple[str, str]]:
        turns: list[tuple[str, str]] = []
        for _ in range(self.rng.choice((1, 1, 2, 3))):
            x = self.rng.random()
            if x < 0.8:
                turns += self._called(tools)
            elif x < 0.95:
                if not any("search" in tool.family.topic for tool in tools):  # it could look for anything
                    turns.append((self.requests.foreign(tools), NO_TOOL))
            else:
                question, answer = small_talk(self.rng)
                turns += [(question, answer)] if answer != OFF_TOPIC else []
        if len(turns) > 1 and turns[-1][0].startswith("<tool_response>") and self.rng.random() < 0.3:
            turns.pop()
        return turns

    def draw(self) -> Conversation | None:
        rng = self.rng
        tools = self.requests.tools(rng.choice((1, 2, 2, 3, 3, 4)))
        if rng.random() < 0.14:
            other = self.others()
            if other is None or any(answer == OFF_TOPIC for _, answer in other.turns):
                return None
            schemas = tuple(tool.schema for tool in tools)
            return Conversation(other.turns, other.system, other.prompt_weight, other.choice_weight, schemas)
        schemas = tuple(tool.schema for tool in tools)  # in an order that says nothing about the first question
        turns = self._turns(list(tools))
        system = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.25 else ""
        return Conversation(tuple(turns), system, _PROMPT_WEIGHT, _CHOICE_WEIGHT, schemas) if turns else None
