"""All protocols share one way from a request for text to its answer."""

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, cast

import orjson
import pytest
from fastapi import Request

from sluice.engine.client.stream import Consumer
from sluice.engine.guidance.closing import Rewritten
from sluice.engine.types import FinishReason, GrammarKind
from sluice.gateway.api import translators
from sluice.gateway.api.anthropic.messages import MessagesTranslator
from sluice.gateway.api.anthropic.pdfs import PdfTexts
from sluice.gateway.api.anthropic.schemas import MessagesRequest
from sluice.gateway.api.ollama.requests import OllamaChatTranslator
from sluice.gateway.api.ollama.schemas import OllamaChatRequest
from sluice.gateway.api.openai.chat import ChatTranslator
from sluice.gateway.api.openai.completions import CompletionReply
from sluice.gateway.api.openai.reply import ReplyOptions
from sluice.gateway.api.openai.responses.create import ResponseTranslator
from sluice.gateway.api.openai.responses.schemas import CreateResponseRequest
from sluice.gateway.api.openai.schemas import ChatCompletionRequest
from sluice.gateway.api.translators import STARTS_PER_TURN, Answer, FieldsT, Translate, Translator, parse_with_schemas
from sluice.gateway.front.http.parsing import parse_body
from sluice.gateway.front.http.sse import DONE
from sluice.pipelines.chat import formats
from sluice.pipelines.chat.formats import parse_tools
from sluice.pipelines.text.stream import Generate, give
from sluice.pipelines.text.types import Conversation, TemplateOptions, TextEvent, TextRequest
from tests.gateway.front.http.live import LiveServer
from tests.pulled import collected, pulled

REQUEST = Request({"type": "http", "headers": [], "state": {"request_id": "r"}})
TURNS: list[dict[str, Any]] = [{"role": "user", "content": "x"}]
OLLAMA: Any = partial(OllamaChatTranslator, plane=cast(Any, None))  # asked for names with a tag alone
RESPONSES = partial(ResponseTranslator, archive=None, runs=None, summarizer=cast(Any, None))


def translated(
    schema: type[FieldsT], translate: Translate[FieldsT], body: dict[str, Any]
) -> tuple[TextRequest, Translator[Any]]:
    """Return the one request of a body whose fields are all known, and what translated it."""
    fields, ignored = parse_body(schema, json.dumps(body).encode(), True)
    assert not ignored
    translator = translate(fields, REQUEST)
    [request] = translator.parse(TextRequest(request_id="r", prompt=""))
    return request, translator


SCHEMA = {"type": "object", "properties": {"a": {"enum": ["é"]}}}
OF_RESPONSES = CreateResponseRequest, RESPONSES
OF_MESSAGES = MessagesRequest, partial(MessagesTranslator, pdfs=PdfTexts())
OF_OLLAMA = OllamaChatRequest, OLLAMA
OF_CHATS = ChatCompletionRequest, partial(ChatTranslator, trusts_templates=False)


@pytest.mark.parametrize(
    ("protocol", "body", "kind", "name"),
    [
        (OF_CHATS, {"response_format": {"type": "json_object"}}, GrammarKind.JSON_OBJECT, "response_format"),
        (
            OF_CHATS,
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
            GrammarKind.JSON_SCHEMA,
            "response_format.json_schema.schema",
        ),
        (
            OF_RESPONSES,
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}, "verbosity": None}},
            GrammarKind.JSON_SCHEMA,
            "text.format.schema",
        ),
        (OF_RESPONSES, {"text": {"format": {"type": "json_object"}}}, GrammarKind.JSON_OBJECT, "text.format"),
        (
            OF_MESSAGES,
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"}, "max_tokens": 4},
            GrammarKind.JSON_SCHEMA,
            "output_config.format.schema",
        ),
        (OF_OLLAMA, {"format": SCHEMA, "keep_alive": "5m"}, GrammarKind.JSON_SCHEMA, "grammar"),
        (OF_OLLAMA, {"format": "json"}, GrammarKind.JSON_OBJECT, "grammar"),
        (OF_OLLAMA, {"format": ""}, None, "grammar"),
    ],
)
def test_the_form_of_an_answer_is_a_grammar(
    protocol: tuple[Any, Any], body: dict[str, Any], kind: GrammarKind | None, name: str
) -> None:
    prompt = {"input": "x"} if protocol is OF_RESPONSES else {"messages": TURNS}
    request, translator = translated(*protocol, {"model": "m", **prompt, **body})
    grammar = request.sampling.get("grammar")
    assert (grammar and grammar.kind) == kind and translator.param_names.get("grammar", "grammar") == name
    assert kind is not GrammarKind.JSON_SCHEMA or (grammar and json.loads(grammar.text) == SCHEMA)


def event(text: str, reason: FinishReason | None = None) -> TextEvent:
    return TextEvent(text, 1, 1, 1, reason)


END = event("", FinishReason.STOP)


class Source:
    """Generates the events that the test puts in. It records that it ended."""

    def __init__(self) -> None:
        self.items: asyncio.Queue[TextEvent | Exception] = asyncio.Queue()
        self.is_closed = False

    async def generate(self, consumer: Consumer[TextEvent]) -> None:
        try:
            while (item := await self.items.get()) is not END:
                if isinstance(item, Exception):
                    raise item
                await give(consumer, item)
            await give(consumer, END)
        finally:
            self.is_closed = True


def answer_of(texts: Sequence[Generate]) -> Answer:
    options = ReplyOptions(len(texts))
    reply = CompletionReply(reply_id="r", created=1, model="m", fingerprint="f", options=options)
    return Answer(texts, reply, len(texts))


@pytest.mark.parametrize("num_texts", [1, 3])
async def test_each_text_has_all_its_events_in_order(num_texts: int) -> None:
    sources = [Source() for _ in range(num_texts)]
    for index, source in enumerate(sources):
        for item in (event(f"{index}a"), event(f"{index}b"), END):
            source.items.put_nowait(item)
    *frames, last = await collected(answer_of([source.generate for source in sources]).stream)
    choices = [orjson.loads(frame.removeprefix(b"data: "))["choices"][0] for frame in frames]
    for number in range(num_texts):
        assert [each["text"] for each in choices if each["index"] == number] == [f"{number}a", f"{number}b", ""]
    assert (len(choices), last) == (3 * num_texts, DONE)


@pytest.mark.parametrize("num_texts", [1, 3])
async def test_the_first_failure_ends_all(num_texts: int) -> None:
    sources = [Source() for _ in range(num_texts)]
    sources[0].items.put_nowait(ValueError("broken"))
    with pytest.raises(ValueError, match="broken"):
        await collected(answer_of([source.generate for source in sources]).stream)
    assert all(source.is_closed for source in sources)


@pytest.mark.parametrize("num_texts", [1, 3])
async def test_closing_closes_all(num_texts: int) -> None:
    sources = [Source() for _ in range(num_texts)]
    for source in sources:
        source.items.put_nowait(event("a"))
    async with aclosing(pulled(answer_of([source.generate for source in sources]).stream)) as frames:
        await anext(frames)
    assert all(source.is_closed for source in sources)


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_many_texts_of_a_request_start_over_several_turns_of_the_loop(is_streamed: bool) -> None:
    turns, started = 0, list[int]()

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def generate(consumer: Consumer[TextEvent]) -> None:
        started.append(turns)
        await give(consumer, END)

    counting = asyncio.create_task(count_turns())
    answer = answer_of([generate] * 512)
    await (collected(answer.stream) if is_streamed else answer.whole())
    counting.cancel()
    assert max(Counter(started).values()) <= 2 * STARTS_PER_TURN


async def test_tokens_that_complete_no_text_have_an_empty_piece_as_with_vllm() -> None:
    source = Source()
    for item in (event(""), event("a"), event(""), END):
        source.items.put_nowait(item)
    *frames, _ = await collected(answer_of([source.generate]).stream)
    choices = [orjson.loads(frame.removeprefix(b"data: "))["choices"][0] for frame in frames]
    assert [(each["text"], each["finish_reason"]) for each in choices] == [
        ("", None),
        ("a", None),
        ("", None),
        ("", "stop"),
    ]


PARAMETERS = {
    "type": "object",
    "properties": {
        "to": {"type": "string", "pattern": r"^(?!\.)[a-z.]+$"},
        "ids": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
        "on": {"type": "strng"},
        "off": {"$ref": "https://example.com/off.json"},
    },
    "if": {"required": ["to"]},
    "then": {"required": ["ids"]},
}
FUNCTION: dict[str, Any] = {"name": "send", "parameters": PARAMETERS}
FUNCTIONS: list[dict[str, Any]] = [{"name": "a b"}, {"name": "send"}, FUNCTION]
TOOLS = [{"type": "function", "function": each} for each in FUNCTIONS]
RESPONSE_TOOLS = [{"type": "function", "strict": None, "parameters": {}, **each} for each in FUNCTIONS]
CUSTOM_TOOLS = [{"name": each["name"], "input_schema": each.get("parameters", {})} for each in FUNCTIONS]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TURNS, "max_tokens": 40, "tools": TOOLS},
    "/v1/responses": {
        "input": "x",
        "max_output_tokens": 40,
        "tools": RESPONSE_TOOLS,
    },
    "/v1/messages": {"messages": TURNS, "max_tokens": 40, "tools": CUSTOM_TOOLS},
    "/api/chat": {"messages": TURNS, "stream": False, "options": {"num_predict": 40}, "tools": TOOLS},
}


@pytest.mark.usefixtures("random_answers")
@pytest.mark.parametrize("path", BODIES)
def test_what_calls_are_not_held_to_is_named_in_every_protocol(chat_live: LiveServer, path: str) -> None:
    chat_live.say("Done.")
    response = chat_live.post(path, {"model": "rill", **BODIES[path]})
    assert response.status_code == 200, response.text
    warning = response.headers["x-sluice-warning"]
    for words in (
        "if is not enforced at # in send",
        "look-around in the pattern",
        "uniqueItems is not enforced",
        'type is not enforced: there is no type "strng" at #/properties/on in send',
        '$ref is not enforced: "$ref": "https://example.com/off.json" is outside the schema',
        'name "a b" is left out: a call needs',
        'name "send" is left out: a later tool has the same name',
    ):
        assert words in warning, warning


def test_a_strict_tool_of_which_a_grammar_keeps_to_a_part_is_refused(chat_live: LiveServer) -> None:
    tools = [{"type": "function", "function": {**FUNCTION, "strict": True}}]
    response = chat_live.post(
        "/v1/chat/completions", {"model": "rill", **BODIES["/v1/chat/completions"], "tools": tools}
    )
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == "tools"
    assert "the JSON schema of the tool send cannot be used: at #" in error["message"]


def many_tools(num_tools: int) -> list[dict[str, Any]]:
    members = {f"p{number}": {"type": "string"} for number in range(50)}
    schemas = [{"type": "object", "properties": members | {f"q{index}": {}}} for index in range(num_tools)]
    return [
        {"type": "function", "function": {"name": f"f{index}", "parameters": schema}}
        for index, schema in enumerate(schemas)
    ]


def test_a_long_list_of_tools_is_rewritten_aside_and_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    tools, threads, pauses = many_tools(128), [], []
    fields = ChatCompletionRequest.model_validate({"model": "m", "messages": TURNS, "tools": tools})
    monkeypatch.setattr(translators, "breathe", lambda: pauses.append(threading.current_thread().name))

    def parse() -> TextRequest:
        threads.append(threading.current_thread().name)
        return TextRequest(request_id="", prompt=Conversation((), TemplateOptions(tools=tuple(tools))))

    asyncio.run(parse_with_schemas(fields, parse, lambda parsed: parsed))
    assert threads[0].startswith("long-work") and set(pauses) == set(threads)


def test_a_schema_that_has_to_be_compiled_is_compiled_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = list[str]()

    def relax(made: Rewritten) -> Rewritten:
        threads.append(threading.current_thread().name)
        return made

    monkeypatch.setattr(formats, "relax", relax)
    parameters = {"type": "object", "properties": {"here": {"type": "string", "pattern": "^once$"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    fields = ChatCompletionRequest.model_validate({"model": "m", "messages": TURNS, "tools": tools})
    request = TextRequest(request_id="", prompt=Conversation((), TemplateOptions(tools=tuple(tools))))
    asyncio.run(parse_with_schemas(fields, lambda: request, lambda parsed: parsed))
    assert len(threads) == 1 and threads[0].startswith("long-work")


def test_a_short_list_of_tools_is_parsed_at_once() -> None:
    fields = ChatCompletionRequest.model_validate({"model": "m", "messages": TURNS, "tools": TOOLS})
    request = TextRequest(request_id="", prompt="")
    found = asyncio.run(parse_with_schemas(fields, lambda: (request, threading.current_thread()), lambda each: each[0]))
    assert found[1] is threading.main_thread()


def test_tools_that_come_again_are_not_rewritten_again() -> None:
    first, again = parse_tools(many_tools(3)), parse_tools(many_tools(3))
    assert all(one.parameters is other.parameters for one, other in zip(first, again, strict=True))


def with_history(arguments: Any) -> dict[str, dict[str, Any]]:
    """Return what bodies have in place of their prompts where a call with such arguments was answered."""
    call, said, answer = {"name": "send", "arguments": arguments}, {"role": "assistant"}, {"role": "tool"}
    use = {"type": "tool_use", "id": "a", "name": "send", "input": arguments}
    item = {"type": "function_call", "call_id": "a", "status": "incomplete", **call}
    tool_calls = [{"id": "a", "type": "function", "function": call}]
    turns = [*TURNS, said | {"tool_calls": tool_calls}, answer | {"tool_call_id": "a", "content": "no"}]
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}
    output = {"type": "function_call_output", "call_id": "a", "output": "no"}
    return {
        "/v1/chat/completions": {"messages": turns},
        "/v1/messages": {"messages": [*TURNS, said | {"content": [use]}, result]},
        "/api/chat": {"messages": [*TURNS, said | {"tool_calls": [{"function": call}]}, answer | {"content": "no"}]},
        "/v1/responses": {"input": [*TURNS, item, output], "store": False},
    }


@pytest.mark.usefixtures("random_answers")
@pytest.mark.parametrize("arguments", ['{"to": "ha', "null", "", None, {"to": "a"}])
@pytest.mark.parametrize("path", BODIES)
def test_arguments_of_any_kind_are_taken_as_history(chat_live: LiveServer, path: str, arguments: Any) -> None:
    """As the server itself sent them, where an answer was cut off in a call."""
    if path == "/v1/responses" and not isinstance(arguments, str):
        return  # OpenAI's items have text alone
    chat_live.say("Done.")
    response = chat_live.post(path, {"model": "rill", **BODIES[path], **with_history(arguments)[path]})
    assert response.status_code == 200 and "Done." in response.text, response.text
