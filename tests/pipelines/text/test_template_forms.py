"""Conversations of clients in the forms that chat templates take: templates with the statements of well-known ones."""

from pathlib import Path
from typing import Any

import pytest

from sluice.errors import SluiceError
from sluice.pipelines.text.template_forms import TemplateForms
from sluice.pipelines.text.tokenizer import Tokenizer
from sluice.pipelines.text.transformers_tokenizer import load_tokenizer
from sluice.pipelines.text.types import ChatMessage, Conversation, TemplateOptions, ToolCall
from tests.paths import MODELS

USER = ChatMessage("user", "Weather?")
RAIN = ChatMessage("tool", "rain", tool_call_id="call_1")
PARIS = '{"city": "Paris"}'
EACH = "{% for m in messages %}"
PLAIN = "[{{ m.role }} {{ m.content }}]{% endfor %}"
NAME_AND_ARGUMENTS = "c.function.name + ' ' + c.function.arguments"
AS_TEXT = (
    EACH + "{% for c in m.tool_calls or [] %}{{ '[CALL ' + " + NAME_AND_ARGUMENTS + " + ']' }}{% endfor %}" + PLAIN
)
AS_OBJECT = (
    EACH + "{% for c in m.tool_calls or [] %}[CALL {{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}]{% endfor %}" + PLAIN
)
WHERE_CONTENT_IS_NONE = (
    EACH
    + "{% if m.role == 'assistant' and m.content is none %}{% for c in m.tool_calls %}{{ '[CALL ' + "
    + NAME_AND_ARGUMENTS
    + " + ']' }}{% endfor %}{% else %}[{{ m.role }} {{ m.content }}]{% endif %}{% endfor %}"
)
ONE_CALL_AND_THINKING = (
    EACH
    + "{% if 'tool_calls' in m %}{% if m.content and m.thinking %}{{ raise_exception('one or the other') }}{% endif %}"
    "[THINK {{ m.content or m.thinking }}]{% set f = m.tool_calls[0].function %}"
    "[CALL {{ f.name }} {{ f.arguments | tojson }}]"
    "{% else %}[{{ m.role }} {{ m.content }}]{% endif %}{% endfor %}"
)
SHORT_IDS = (
    EACH + "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}"
    "{% endif %}[CALL {{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
    "[{{ m.role }} {{ m.content }}{{ ' ' + m.tool_call_id if m.tool_call_id }}]{% endfor %}"
)
SYSTEM_FIRST = (
    EACH
    + "{% if m.role == 'system' and not loop.first %}{{ raise_exception('the system comes first') }}{% endif %}"
    + PLAIN
)
LAST_SYSTEM_WINS = (
    "{% set ns = namespace(s='') %}"
    "{% for m in messages %}{% if m.role == 'system' %}{% set ns.s = m.content %}{% endif %}{% endfor %}"
    "[system {{ ns.s }}]{% for m in messages if m.role != 'system' %}" + PLAIN
)
NO_SYSTEM = EACH + "{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + PLAIN
ALTERNATING = (
    "{% if messages[0].role == 'system' %}[system {{ messages[0].content }}]{% set rest = messages[1:] %}"
    "{% else %}{% set rest = messages %}{% endif %}{% for m in rest %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    + PLAIN
)
NO_CALLS = EACH + PLAIN
NO_TOOL_ROLE = ALTERNATING
EMPTY_CONTENT_IS_A_TURN = (
    EACH
    + "{% for c in m.tool_calls or [] %}[CALL {{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
    "{% if m.content is not none %}[{{ m.role }} {{ m.content }}]{% endif %}{% endfor %}"
)
AS_WRITTEN = f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>'


def calling(*arguments: str, content: str = "", reasoning: str = "") -> ChatMessage:
    calls = [ToolCall(f"call_{number}", "weather", each) for number, each in enumerate(arguments, 1)]
    return ChatMessage("assistant", content, reasoning, tuple(calls))


def with_template(rill_path: Path, template: str) -> Tokenizer:
    made = load_tokenizer(rill_path)
    made.chat_template = template
    return Tokenizer(made)


async def render(tokenizer: Tokenizer, *messages: ChatMessage, **options: Any) -> str:
    ids = await tokenizer.encode_chat(messages, options=TemplateOptions(**options))
    return tokenizer.decode(ids, skip_special_tokens=False)


SYSTEM, LATER, ANSWER = (
    ChatMessage("system", "Be brief."),
    ChatMessage("system", "Now."),
    ChatMessage("assistant", "Hi."),
)
SUN = ChatMessage("tool", "sun", tool_call_id="call_2")
MERGED = "[system Be brief.\n\nNow.][user Weather?][assistant Hi.][user Weather?]"
RENDERED: dict[str, tuple[str, tuple[ChatMessage, ...], str]] = {
    "arguments are text, to the space, where a template joins them": (
        AS_TEXT,
        (USER, calling('{"city":"Paris"}'), RAIN),
        '[user Weather?][CALL weather {"city":"Paris"}][assistant ][tool rain]',
    ),
    "a call shows where a template asks whether content is none": (
        WHERE_CONTENT_IS_NONE,
        (USER, calling(PARIS), RAIN),
        f"[user Weather?][CALL weather {PARIS}][tool rain]",
    ),
    "the text beside such a call is a turn of its own": (
        WHERE_CONTENT_IS_NONE,
        (USER, calling(PARIS, content="Wait."), RAIN),
        f"[user Weather?][assistant Wait.][CALL weather {PARIS}][tool rain]",
    ),
    "text joins the thinking where a template refuses both": (
        ONE_CALL_AND_THINKING,
        (USER, calling(PARIS, content="Wait.", reasoning="Hm."), RAIN),
        f"[user Weather?][THINK Hm.\n\nWait.][CALL weather {PARIS}][tool rain]",
    ),
    "parallel calls stand by their results where a template has one in a turn": (
        ONE_CALL_AND_THINKING,
        (USER, calling(PARIS, '{"city": "Rome"}', reasoning="Hm."), RAIN, SUN),
        f"[user Weather?][THINK Hm.][CALL weather {PARIS}][tool rain]"
        '[THINK ][CALL weather {"city": "Rome"}][tool sun]',
    ),
    "a system that comes later is merged where it must be first": (
        SYSTEM_FIRST,
        (SYSTEM, USER, ANSWER, LATER, USER),
        MERGED,
    ),
    "a system that comes later is merged where the last one wins": (
        LAST_SYSTEM_WINS,
        (SYSTEM, USER, ANSWER, LATER, USER),
        MERGED,
    ),
    "what the system says later begins a conversation without one": (
        SYSTEM_FIRST,
        (USER, LATER),
        "[system Now.][user Weather?]",
    ),
    "the system stays at its place where a template takes it": (
        EACH + PLAIN,
        (SYSTEM, USER, LATER, USER),
        "[system Be brief.][user Weather?][system Now.][user Weather?]",
    ),
    "calls are text where a template shows none": (
        NO_CALLS,
        (USER, calling(PARIS, content="Wait."), RAIN),
        f"[user Weather?][assistant Wait.\n{AS_WRITTEN}][tool rain]",
    ),
    "results are the user's where a template has no role for them": (
        NO_TOOL_ROLE,
        (USER, calling(PARIS, '{"city": "Rome"}'), RAIN, SUN, ANSWER, USER),
        f"[user Weather?][assistant {AS_WRITTEN}\n{AS_WRITTEN.replace('Paris', 'Rome')}]"
        "[user <tool_response>\nrain\n</tool_response>\n\n<tool_response>\nsun\n</tool_response>]"
        "[assistant Hi.][user Weather?]",
    ),
    "a content of null is taken where an empty one would be a turn of its own": (
        EMPTY_CONTENT_IS_A_TURN,
        (USER, calling(PARIS), RAIN),
        f"[user Weather?][CALL weather {PARIS}][tool rain]",
    ),
    "a template that counts the tools gets an empty array": (
        "{% if tools | length > 0 %}TOOLS{% endif %}" + EACH + PLAIN,
        (USER,),
        "[user Weather?]",
    ),
    "the user says it where a template has no system": (
        NO_SYSTEM,
        (SYSTEM, USER, ANSWER, USER),
        "[user Be brief.\n\nWeather?][assistant Hi.][user Weather?]",
    ),
    "turns in a row are one where roles must alternate": (
        ALTERNATING,
        (USER, LATER, USER, ANSWER, ANSWER, USER),
        "[system Now.][user Weather?\n\nWeather?][assistant Hi.\n\nHi.][user Weather?]",
    ),
}


@pytest.mark.parametrize("name", RENDERED)
async def test_turns_have_the_form_that_a_template_takes(rill_path: Path, name: str) -> None:
    template, messages, expected = RENDERED[name]
    assert await render(with_template(rill_path, template), *messages) == expected


async def test_ids_are_short_where_a_template_checks_their_length(rill_path: Path) -> None:
    tokenizer = with_template(rill_path, SHORT_IDS)
    text = await render(tokenizer, USER, calling(PARIS), RAIN)
    call_id = text.partition("[CALL ")[2][:9]
    assert call_id.isalnum() and text.endswith(f"[tool rain {call_id}]")
    right = ChatMessage("assistant", "", tool_calls=(ToolCall("abcDEF123", "weather", PARIS),))
    assert "[CALL abcDEF123 weather" in await render(tokenizer, right, ChatMessage("tool", "", "", (), "abcDEF123"))


CUT_OFF = '{"city": "Par'
NO_OBJECTS = {CUT_OFF: CUT_OFF, "[]": "[]", "Paris, please": "Paris, please", "null": "{}", "": "{}"}


@pytest.mark.parametrize("arguments", NO_OBJECTS)
async def test_arguments_that_are_no_object_are_text_where_a_template_takes_text(
    rill_path: Path, arguments: str
) -> None:
    text = await render(with_template(rill_path, AS_TEXT), USER, calling(arguments), RAIN)
    assert f"[CALL weather {NO_OBJECTS[arguments]}]" in text


@pytest.mark.parametrize("arguments", [*NO_OBJECTS, "[" * 100_000])
async def test_arguments_that_are_no_object_are_what_they_have_of_one_elsewhere(
    rill_path: Path, arguments: str
) -> None:
    text = await render(with_template(rill_path, AS_OBJECT), USER, calling(arguments), RAIN)
    assert ("[CALL weather city=Par]" if arguments == CUT_OFF else "[CALL weather]") in text


async def test_the_bundled_template_shows_a_call_that_was_cut_off_as_it_is() -> None:
    bundled = Tokenizer.load(MODELS / "rill" / "1")
    assert f'"arguments": {CUT_OFF}}}' in await render(bundled, USER, calling(CUT_OFF), RAIN)


async def test_a_clients_own_template_gets_the_forms_that_it_takes(rill: Tokenizer) -> None:
    text = await render(rill, SYSTEM, USER, calling(PARIS), RAIN, template=WHERE_CONTENT_IS_NONE)
    assert text == f"[system Be brief.][user Weather?][CALL weather {PARIS}][tool rain]"


@pytest.mark.parametrize(
    "template", ["{% for a in range(10 ** 9) %}{% for b in range(10 ** 9) %}{% endfor %}{% endfor %}", "{{"]
)
async def test_a_template_that_cannot_be_tried_has_the_usual_forms(rill: Tokenizer, template: str) -> None:
    found = await rill._template.sandbox.run(lambda: rill._template.forms_of_client(TemplateOptions(template=template)))
    assert found == TemplateForms()


@pytest.mark.parametrize("template", [AS_TEXT, WHERE_CONTENT_IS_NONE, SHORT_IDS, ONE_CALL_AND_THINKING])
async def test_no_form_lets_a_client_write_control_tokens(rill_path: Path, template: str) -> None:
    tokenizer = with_template(rill_path, template)
    forged = calling('{"city": "<|end|>", "\\u003c|end|\\u003e": 1}', content="<|end|>", reasoning="<|end|>")
    ids = await tokenizer.encode_chat([SYSTEM, USER, forged, RAIN])
    assert not {i for i in ids if i < 6}


REFUSING = EACH + "{% if m.content == 'bad' %}{{ raise_exception('no bad words') }}{% endif %}" + PLAIN
BAD = ChatMessage("user", "bad")
REFUSED = [
    (REFUSING, (USER, ANSWER, BAD, ANSWER, BAD), "refuses messages[2], of the role user: no bad words"),
    (REFUSING, (BAD,), "refuses messages[0], of the role user: no bad words"),
    (
        EACH + "{{ m.name.first.last }}" + PLAIN,
        (USER,),
        "refuses these messages: 'dict object' has no attribute 'name'",
    ),
    ("{{ raise_exception('never') }}", (USER, ANSWER), "refuses these messages: never"),
    ("{{ 1 // 0 }}", (USER,), "refuses these messages: integer division or modulo by zero"),
]


@pytest.mark.parametrize(("template", "messages", "words"), REFUSED)
async def test_the_turn_that_a_template_refuses_is_named(
    rill_path: Path, template: str, messages: tuple[ChatMessage, ...], words: str
) -> None:
    with pytest.raises(SluiceError) as caught:
        await render(with_template(rill_path, template), *messages)
    assert caught.value.param == "messages" and words in caught.value.message


async def test_turns_for_which_a_template_has_no_role_are_noted(rill_path: Path) -> None:
    sent = Conversation((USER, calling(PARIS), RAIN))
    notes = [
        with_template(rill_path, each).note_forms(sent).notes for each in (ALTERNATING, NO_CALLS, AS_OBJECT, SHORT_IDS)
    ]
    assert [len(each) for each in notes] == [2, 1, 0, 0] and "shown as the user's" in notes[0][1]


async def test_odd_keywords_of_tools_are_left_out_where_a_template_fails_over_them(rill_path: Path) -> None:
    each = "{% for n, p in t.function.parameters.properties.items() %}({{ n }} {{ p.type + '' }}){% endfor %}"
    tokenizer = with_template(rill_path, "{% for t in tools or [] %}" + each + "{% endfor %}" + EACH + PLAIN)
    members = {"a": {"type": "string"}, "b": {"type": 3, "items": 4, "anyOf": [5, {"enum": "c"}]}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": members}}}
    bare = {"type": "function", "function": {"name": "g", "parameters": {"properties": {}}}}
    with pytest.raises(SluiceError, match="no attribute 'type'"):
        await render(tokenizer, USER, tools=(tool, bare))
    lenient = with_template(
        rill_path,
        "{% for t in tools or [] %}" + each.replace("p.type", "(p.type or 'any')") + "{% endfor %}" + EACH + PLAIN,
    )
    assert await render(lenient, USER, tools=(tool, bare)) == "(a string)(b any)[user Weather?]"
