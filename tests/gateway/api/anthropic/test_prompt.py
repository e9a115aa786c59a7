"""The conversation that a body of messages becomes, and what of it the model does not get."""

import json
from base64 import b64encode
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.gateway.api.anthropic import pdfs
from sluice.gateway.api.anthropic.pdfs import PdfTexts
from sluice.gateway.api.anthropic.prompt import ParsedPrompt, find_pdfs, parse_conversation
from sluice.gateway.api.anthropic.schemas import MessagesRequest
from sluice.gateway.front.http.parsing import parse_body
from sluice.pipelines.text.types import ChatMessage, ImagePart
from tests.gateway.api.rag.parts import ScriptedPipeline
from tests.pipelines.rag.documents.pdf_writer import Pdf

USER: Any = {"role": "user", "content": "x"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
PDF = {"type": "base64", "media_type": "application/pdf", "data": "aGk="}
BILLING = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch=fa690;"


async def test_the_text_of_a_pdf_is_in_the_prompt_and_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = b64encode(Pdf([["Hello."], ["World."]]).to_bytes()).decode()
    document = {"type": "document", "title": "T", "source": PDF | {"data": sent}}
    content = [document, result(document), {"type": "document", "source": PDF}]
    body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": content}]}
    request, _ = parse_body(MessagesRequest, json.dumps(body).encode(), True)
    reader = PdfTexts()
    texts = await reader.read(find_pdfs(request))
    assert texts == {sent: "Hello.\n\nWorld."}
    prompt = parse_conversation(request, pdfs=texts)
    assert [content.split() for _, content in turns(prompt)] == [
        ["T", "Hello.", "World."],
        ["T", "Hello.", "World."],
        ["[application/pdf:", "left", "out]"],
    ]
    assert prompt.left_out == ["messages[0].content[2] (document)"]
    monkeypatch.setattr(pdfs, "parse_document", None)
    assert await reader.read([sent, PDF["data"]]) == texts


def parsed(messages: list[Any], max_images: int = 0, **fields: Any) -> ParsedPrompt:
    body = {"model": "m", "max_tokens": 1, "messages": messages, **fields}
    request, ignored = parse_body(MessagesRequest, json.dumps(body).encode(), False)
    assert not ignored
    return parse_conversation(request, ScriptedPipeline(max_images=max_images))


def turns(prompt: ParsedPrompt) -> list[tuple[str, str]]:
    return [(each.role, each.content) for each in prompt.conversation.messages]


def result(*content: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "a", "content": list(content)}


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ({"type": "document", "title": "T", "context": "C", "source": {"type": "text", "data": "D"}}, "T\nC\nD"),
        (
            {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "D"}]}},
            "D",
        ),
        ({"type": "document", "source": {"type": "content", "content": "D"}}, "D"),
        (
            {"type": "search_result", "title": "T", "source": "https://a", "content": [{"type": "text", "text": "D"}]},
            "T\nhttps://a\nD",
        ),
        ({"type": "tool_reference", "tool_name": "f"}, "f"),
        (
            {
                "type": "web_search_tool_result",
                "tool_use_id": "a",
                "content": [
                    {"type": "web_search_result", "title": "T", "url": "https://a", "encrypted_content": "zzz"},
                ],
            },
            "T\nhttps://a",
        ),
        (
            {
                "type": "web_fetch_tool_result",
                "content": {
                    "type": "web_fetch_result",
                    "url": "https://a",
                    "content": {"type": "document", "source": {"type": "text", "data": "D"}},
                },
            },
            "https://a\nD",
        ),
        (
            {"type": "code_execution_tool_result", "content": {"stdout": "1", "stderr": "2", "return_code": 0}},
            "1\n2",
        ),
        ({"type": "tool_search_tool_result", "content": {"tool_references": [{"tool_name": "f"}]}}, "f"),
        ({"type": "mcp_tool_result", "content": [{"type": "text", "text": "D"}]}, "D"),
        ({"type": "compaction", "content": "What was said."}, "What was said."),
    ],
)
@pytest.mark.parametrize("role", ["user", "assistant", "system", "result"])
def test_blocks_of_other_types_are_read_where_they_have_text(block: Any, text: str, role: str) -> None:
    turn = {"role": "user", "content": [result(block)]} if role == "result" else {"role": role, "content": [block]}
    prompt = parsed([USER, {"role": "assistant", "content": "y"}, turn, {"role": "assistant", "content": "z"}])
    assert text in "\n".join(content for _, content in turns(prompt)) and not prompt.left_out


@pytest.mark.parametrize(
    ("block", "kind"),
    [
        ({"type": "document", "title": "T", "source": PDF}, "document"),
        ({"type": "document", "source": {"type": "file", "file_id": "f"}}, "document"),
        ({"type": "container_upload", "file_id": "f"}, "container_upload"),
        ({"type": "server_tool_use", "id": "a", "name": "web_search", "input": {"query": "q"}}, "server_tool_use"),
        ({"type": "of_next_year", "x": [1, {"y": None}]}, "of_next_year"),
    ],
)
def test_what_has_no_text_is_left_out_and_named(block: Any, kind: str) -> None:
    prompt = parsed([{"role": "user", "content": [{"type": "text", "text": "x"}, block, result(block)]}])
    assert prompt.left_out == [f"messages[0].content[1] ({kind})", f"messages[0].content[2].content[0] ({kind})"]
    assert "aGk=" not in str(prompt.conversation)
    system = parsed([USER], system=[block])
    assert system.left_out == [f"system[0] ({kind})"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
)


@given(
    fields=st.dictionaries(st.sampled_from(["content", "source", "title", "data", "tabs", "x"]), JSON),
    kind=st.text(max_size=9).filter(lambda kind: kind not in ("image", "text", "thinking")),
)
def test_no_block_of_an_unknown_type_refuses_a_session(fields: dict[str, Any], kind: str) -> None:
    block = {**fields, "type": kind}
    prompt = parsed([{"role": "user", "content": [block, result(block)]}, {"role": "system", "content": [block]}])
    assert [role for role, _ in turns(prompt)][-2:] == ["tool", "system"]


@pytest.mark.parametrize(
    ("system", "kept"),
    [
        (f"{BILLING}\nBe brief.", "Be brief."),
        ([{"type": "text", "text": BILLING}, {"type": "text", "text": "Be brief."}], "Be brief."),
        ([{"type": "text", "text": f"{BILLING}\nBe brief."}], "Be brief."),
        (f"Never say {BILLING}", f"Never say {BILLING}"),
        ([{"type": "text", "text": "A"}, {"type": "text", "text": BILLING}], f"A{BILLING}"),
    ],
)
def test_the_line_of_billing_at_the_beginning_is_not_in_the_prompt(system: Any, kept: str) -> None:
    assert turns(parsed([USER], system=system)) == [("system", kept), ("user", "x")]


def test_nothing_is_left_of_a_system_that_is_the_line_of_billing() -> None:
    assert turns(parsed([USER], system=BILLING)) == [("user", "x")]


def test_a_turn_of_the_system_is_cleared_at_the_next_turn_of_the_user() -> None:
    system = {"role": "system", "content": "5 left.", "clear_at": "next_user_message"}
    assert turns(parsed([USER, system])) == [("user", "x"), ("system", "5 left.")]
    assert turns(parsed([USER, system, {"role": "assistant", "content": "y"}, USER])) == [
        ("user", "x"),
        ("assistant", "y"),
        ("user", "x"),
    ]


def test_images_of_results_follow_the_results() -> None:
    content = [result({"type": "text", "text": "seen: "}, IMAGE), {**result(), "tool_use_id": "b"}]
    prompt = parsed([{"role": "user", "content": [*content, {"type": "text", "text": "And?"}]}], max_images=2)
    image = ImagePart("data:;base64,aGk=", "messages[0].content[0].content[1].source.data")
    assert prompt.conversation.messages == (
        ChatMessage("tool", "seen: [image]", tool_call_id="a"),
        ChatMessage("tool", "", tool_call_id="b"),
        ChatMessage("user", "And?", parts=(image, "And?")),
    )
    assert not prompt.left_out


def test_a_model_of_text_alone_is_told_of_images_in_results_and_earlier_turns() -> None:
    earlier = {"role": "user", "content": [IMAGE, {"type": "text", "text": "this"}]}
    prompt = parsed([earlier, {"role": "assistant", "content": "y"}, {"role": "user", "content": [result(IMAGE)]}])
    assert turns(prompt) == [("user", "[image: left out]this"), ("assistant", "y"), ("tool", "[image: left out]")]
    assert prompt.left_out == ["messages[0].content[0] (image)", "messages[2].content[0].content[0] (image)"]
    assert parsed([earlier]).conversation.images, "the model itself refuses those of the last turn"


def test_the_newest_images_are_kept_where_there_are_more_than_the_model_takes() -> None:
    shown = {"role": "user", "content": [IMAGE, {"type": "text", "text": "a"}]}
    prompt = parsed([shown, {"role": "assistant", "content": "y"}, shown, shown], max_images=2)
    first, _, last = prompt.conversation.messages
    assert (first.content, first.parts) == ("[image: left out]a", ())
    assert [part.path[:11] for part in last.parts if isinstance(part, ImagePart)] == ["messages[2]", "messages[3]"]
    assert prompt.left_out == ["messages[0].content[0] (image)"]


@pytest.mark.parametrize("empty", ["", [], [{"type": "thinking", "thinking": "hm", "signature": None}]])
def test_a_last_turn_of_the_assistant_without_text_begins_no_answer(empty: Any) -> None:
    prompt = parsed([USER, {"role": "assistant", "content": empty}])
    assert turns(prompt) == [("user", "x")] and prompt.conversation.options.adds_generation_prompt


def test_tools_that_clients_run_are_functions_and_the_others_are_named() -> None:
    kinds = ["bash_20250124", "web_search_20250305", "text_editor_20250728", "memory_20250818", "mcp_toolset"]
    prompt = parsed([USER], tools=[{"type": kind, "max_characters": 9} for kind in kinds])
    functions = {tool["function"]["name"]: tool["function"] for tool in prompt.conversation.options.tools}
    assert list(functions) == ["bash", "str_replace_based_edit_tool", "memory"]
    assert "insert_text" in functions["str_replace_based_edit_tool"]["parameters"]["properties"]
    commands = functions["str_replace_based_edit_tool"]["parameters"]["properties"]["command"]["enum"]
    assert commands == ["view", "create", "str_replace", "insert"]
    assert prompt.left_out == ["tools[1] (web_search_20250305)", "tools[4] (mcp_toolset)"]


def test_an_effort_is_an_argument_in_a_word_that_templates_have() -> None:
    request, _ = parse_body(
        MessagesRequest,
        json.dumps({"model": "m", "max_tokens": 1, "messages": [USER], "output_config": {"effort": "max"}}).encode(),
        True,
    )
    with_word = ScriptedPipeline(template_names=frozenset({"reasoning_effort"}))
    assert parse_conversation(request, with_word).conversation.options.arguments == {"reasoning_effort": "high"}
    without = parse_conversation(request, ScriptedPipeline())
    assert without.conversation.options.arguments == {"reasoning_effort": "max"}, "for the server"
