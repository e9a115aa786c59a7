"""Measures calls of tools: on function names, tools and values that training never showed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any, Protocol

from training.rill.conversation import Conversation, Tool, call_text, result_text
from training.rill.pairs_rag import invented_example
from training.rill.pairs_tools import OpenTool, ToolRequests, report, result
from training.rill.persona import IDENTITY, NO_TOOL, WHO_HELD_OUT
from training.rill.tool_families import FAMILIES, HELD_OUT_FAMILIES

Ask = Callable[[list[OpenTool]], tuple[tuple[str, str], ...]]
_TOOLS = (1, 2, 2, 3, 3, 4)


class Replying(Protocol):
    """What answers: the text of each reply, in order."""

    def texts(self, conversations: Sequence[Conversation]) -> list[str]: ...


def _tool(name: str, description: str, required: int, **types: Any) -> Tool:
    """Describe a tool as the documentation of clients does, of whose parameters the first ones are required."""
    properties = {key: kind if isinstance(kind, dict) else {"type": kind} for key, kind in types.items()}
    schema = {"type": "object", "properties": properties, "required": list(properties)[:required]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


_DEGREES = {"type": "string", "enum": ["celsius", "fahrenheit"]}
_WEATHER = _tool(
    "get_current_weather", "Get the current weather in a given location", 1, location="string", unit=_DEGREES
)
_CITY_WEATHER = _tool("get_weather", "Get current temperature for a given location.", 1, location="string")
_TIME = _tool("get_time", "Get the current time in a city.", 1, city="string")
_STOCK = _tool("get_stock_price", "Get the current stock price", 1, symbol="string")
_ADD = _tool("add", "Add two numbers.", 2, a="integer", b="integer")
_MULTIPLY = _tool("multiply", "Multiply two integers together.", 2, a="integer", b="integer")
_SEARCH = _tool("search", "Search the web for a query.", 1, query="string")
_EMAIL = _tool("send_email", "Send an email to a recipient.", 2, to="string", subject="string", body="string")
_CURRENCY = _tool("convert_currency", "Convert an amount of money.", 3, amount="number", from_currency="string",
                  to_currency="string")  # fmt: skip
_EVENT = _tool("create_event", "Create a calendar event.", 2, title="string", date="string")

# (tools, question, the call: name and arguments), as tutorials of clients show them; no call where none is right.
HAND_WRITTEN: tuple[tuple[tuple[Tool, ...], str, tuple[str, dict[str, Any]] | None], ...] = (
    ((_WEATHER,), "What is the weather like in Boston today?", ("get_current_weather", {"location": "Boston"})),
    ((_WEATHER, _TIME), "What's the weather in San Francisco, CA in fahrenheit?",
     ("get_current_weather", {"location": "San Francisco, CA", "unit": "fahrenheit"})),
    ((_CITY_WEATHER,), "What is the weather like in Paris today?", ("get_weather", {"location": "Paris"})),
    ((_CITY_WEATHER, _STOCK), "How is the weather in Helsinki?", ("get_weather", {"location": "Helsinki"})),
    ((_WEATHER, _TIME), "What time is it in Nairobi?", ("get_time", {"city": "Nairobi"})),
    ((_TIME, _STOCK), "What is the stock price of NVDA?", ("get_stock_price", {"symbol": "NVDA"})),
    ((_ADD, _MULTIPLY), "What is 12 times 7?", ("multiply", {"a": 12, "b": 7})),
    ((_ADD, _MULTIPLY), "Add 3 and 4", ("add", {"a": 3, "b": 4})),
    ((_MULTIPLY, _SEARCH), "Search for the best pizza in Naples", ("search", {"query": "the best pizza in Naples"})),
    ((_EMAIL, _TIME), 'Send an email to bob@example.com with the subject "Lunch"',
     ("send_email", {"to": "bob@example.com", "subject": "Lunch"})),
    ((_CURRENCY, _STOCK), "Convert 100 USD to EUR", ("convert_currency", {"amount": 100, "from_currency": "USD",
                                                                        "to_currency": "EUR"})),
    ((_EVENT, _EMAIL, _WEATHER), "Create an event called Team lunch on 2025-03-14.",
     ("create_event", {"title": "Team lunch", "date": "2025-03-14"})),
    ((_WEATHER, _TIME), "Who are you?", None),
    ((_WEATHER,), "Hello!", None),
    ((_EMAIL, _TIME), "What is the weather in Oslo?", None),
    ((_ADD,), "Book a flight from Oslo to Rome.", None),
)  # fmt: skip


def _read(reply: str) -> tuple[str, Any] | None:
    """Return name and arguments of a reply that is one call."""
    try:
        call = json.loads(reply.removeprefix("<tool_call>").removesuffix("</tool_call>"))
        return call["name"], call["arguments"]
    except (ValueError, KeyError, TypeError):
        return None


def _rate(claims: Sequence[bool]) -> float:
    return round(sum(claims) / max(1, len(claims)), 4)


class ToolEvaluation:
    def __init__(self, speaker: Replying, samples: int, seed: int) -> None:
        self.speaker, self.samples, self.seed = speaker, samples, seed
        self.results: dict[str, float] = {}

    def _ask(
        self, requests: ToolRequests, ask: Callable[[list[OpenTool]], tuple[tuple[str, str], ...]]
    ) -> list[Conversation]:
        """Draw conversations about new tools, with the wanted answer as the last."""
        rng, drawn = requests.rng, []
        for _ in range(self.samples):
            tools = requests.tools(rng.choice(_TOOLS))
            schemas = tuple(tool.schema for tool in tools)
            rng.shuffle(tools)
            drawn.append(Conversation(ask(tools), tools=schemas))
        return drawn

    def _new_names(self) -> ToolRequests:
        return ToolRequests(Random(self.seed), composed_share=1.0, new=True)

    def _exact(self, conversations: Sequence[Conversation]) -> float:
        replies = self.speaker.texts(conversations)
        return _rate([r.split() == c.turns[-1][1].split() for r, c in zip(replies, conversations, strict=True)])

    def calls(self) -> None:
        """Measure calls of composed tools with new names, of hand-written tools and of tools with trained names."""
        kinds = {
            "new names": self._new_names(),
            "new hand-written tools": ToolRequests(Random(self.seed), HELD_OUT_FAMILIES, 0.0, new=True),
            "known tools, new values": ToolRequests(Random(self.seed), FAMILIES, 0.0, new=True),
        }
        for name, requests in kinds.items():

            def ask(tools: list[OpenTool], requests: ToolRequests = requests) -> tuple[tuple[str, str], ...]:
                question, [call] = requests.call(tools)
                return ((question, call),)

            self._calls(name, self._ask(requests, ask))

    def _calls(self, name: str, conversations: Sequence[Conversation]) -> None:
        pairs = [
            (_read(reply), _read(conversation.turns[-1][1]))
            for reply, conversation in zip(self.speaker.texts(conversations), conversations, strict=True)
        ]
        self.results[f"calls, {name}: right tool"] = _rate([bool(r and g and r[0] == g[0]) for r, g in pairs])
        self.results[f"calls, {name}: right arguments"] = _rate([bool(r and g and r[1] == g[1]) for r, g in pairs])
        self.results[f"calls, {name}: both"] = _rate([r == g for r, g in pairs])

    def two_calls(self) -> None:
        requests = self._new_names()

        def ask(tools: list[OpenTool]) -> tuple[tuple[str, str], ...]:
            question, calls = requests.call(tools, is_pair=True)
            return ((question, "\n".join(calls)),)

        self.results["two calls in one message, new names"] = self._exact(self._ask(requests, ask))

    def reports(self) -> None:
        requests = self._new_names()

        def ask(tools: list[OpenTool]) -> tuple[tuple[str, str], ...]:
            question, [call] = requests.call(tools)
            content = result(requests.rng, call)
            return ((question, call), (result_text([content]), report(content)))

        self.results["reports a result"] = self._exact(self._ask(requests, ask))

    def without_tool(self) -> None:
        for name, requests in (
            ("new names", self._new_names()),
            ("new hand-written tools", ToolRequests(Random(self.seed), HELD_OUT_FAMILIES, 0.0, new=True)),
        ):

            def ask(tools: list[OpenTool], requests: ToolRequests = requests) -> tuple[tuple[str, str], ...]:
                return ((requests.foreign(tools), NO_TOOL),)

            self.results[f"no tool fits, says so, {name}"] = self._exact(self._ask(requests, ask))

    def needless(self) -> None:
        """Measure questions that need no tool: from a context, and who the model is."""
        requests = self._new_names()

        def quote(_: list[OpenTool]) -> tuple[tuple[str, str], ...]:
            while not (found := partial(invented_example, requests.rng, 3, absent=0.0)()) or found.system:
                pass
            return found.turns

        self.results["needs no tool: exact quote, 3 statements"] = self._exact(self._ask(requests, quote))
        who = iter(WHO_HELD_OUT * self.samples)
        asked = self._ask(requests, lambda _: ((next(who), IDENTITY),))
        self.results["needs no tool: says who it is, new wordings"] = self._exact(asked)

    def hand_written(self) -> None:
        replies = self.speaker.texts(
            [Conversation(((question, ""),), tools=tools) for tools, question, _ in HAND_WRITTEN]
        )
        claims = []
        for (_, question, call), reply in zip(HAND_WRITTEN, replies, strict=True):
            claims.append(reply == call_text(*call) if call else "<tool_call>" not in reply)
            print(f"  {'ok ' if claims[-1] else 'BAD'} {question} -> {reply!r}")
        self.results["hand-written requests with tools"] = _rate(claims)

    def run(self) -> dict[str, float]:
        for part in (self.hand_written, self.calls, self.two_calls, self.reports, self.without_tool, self.needless):
            part()
        return self.results
