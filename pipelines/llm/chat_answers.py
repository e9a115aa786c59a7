"""How an answer in a chat is generated: its grammar, so that calls match their schemas, and the tokens it shows."""

from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from sluice.engine.guidance.closing import rewrite
from sluice.engine.guidance.schema import parse_schema
from sluice.engine.types import EngineInfo, Grammar, GrammarKind, SamplingParams, ThinkingBudget
from sluice.errors import SluiceError, invalid
from sluice.pipelines.chat.formats import ReasoningFormat, ToolFormat, parse_tools
from sluice.pipelines.chat.lark import LarkWriter
from sluice.pipelines.chat.registry import ChatFormats
from sluice.pipelines.chat.structural_tags import structural_tag_grammar
from sluice.pipelines.text.stream import sent_prompt
from sluice.pipelines.text.tokenizer import Tokenizer
from sluice.pipelines.text.types import Conversation, TextForm, TextRequest, ToolChoice

_JSON_SCHEMAS = {GrammarKind.JSON_SCHEMA: "", GrammarKind.JSON_OBJECT: '{"type": "object"}'}
"""Kinds of grammars that a text beside tool calls may match, with the schemas of those that have no text."""

_NAMED_RELAXATIONS = 10
_OPENING_TOKENS = 8
"""Tokens at the end of a prompt that no answer is taken to repeat."""
_PROMPT_END_TOKENS = 16
"""Tokens that have the tags of reasoning with which a prompt may end."""


def allowed_tools(conversation: Conversation, choice: ToolChoice) -> list[dict[str, Any]]:
    """Return the tools that an answer may call. Raises INVALID for a choice of one that the conversation lacks."""
    tools = conversation.options.tools
    names = [tool["function"]["name"] for tool in tools]
    unknown = next((name for name in choice.names if name not in names), None)
    if unknown is not None:
        raise invalid("tool_choice", f"tool_choice names {unknown!r}; tools has {', '.join(names) or 'none'}")
    return [tool for tool in tools if not choice.names or tool["function"]["name"] in choice.names]


def called_functions(conversation: Conversation) -> list[str]:
    """Return the names of the functions that were called earlier in a conversation."""
    return [call.name for message in conversation.messages for call in message.tool_calls]


def relaxed_tools(tools: Sequence[dict[str, Any]], info: EngineInfo) -> list[str]:
    """Return the first of what the schemas of tools say and calls are not held to."""
    if tools and not _is_able(info):
        return [f"{info.runtime} does not hold calls to the schemas of tools"]
    found = (f"{what} in {tool.name}" for tool in parse_tools(tools) for what in tool.relaxed)
    return list(islice(found, _NAMED_RELAXATIONS))


class AnswerSettings(NamedTuple):
    """How an answer is generated that a `ChatReader` reads."""

    sampling: SamplingParams
    form: TextForm
    prompt_end: str
    """The end of the prompt's text, which says whether the answer begins with reasoning; "" without a format of it."""


def answer_settings(
    request: TextRequest,
    prompt_token_ids: list[int],
    sampling: SamplingParams,
    formats: ChatFormats,
    tokenizer: Tokenizer,
    info: EngineInfo,
) -> AnswerSettings:
    """Return the settings of the answer to a conversation: with the grammar of its calls, and with the special tokens
    in its text that mark its parts. A grammar of the client's holds for the answer's text, after the reasoning. Raises
    INVALID for what the model's runtime cannot keep to."""
    conversation, prompt_end = sent_prompt(request.prompt), ""
    assert isinstance(conversation, Conversation)
    if formats.reasoning is not None:
        prompt_end = tokenizer.decode(prompt_token_ids[-_PROMPT_END_TOKENS:], skip_special_tokens=False)
    tools = allowed_tools(conversation, request.tool_choice)
    lark = _lark_writer(tokenizer, info)
    if tools and formats.tools is not None:
        grammar = _with_calls(sampling.grammar, request.tool_choice, tools, prompt_end, formats, lark, info)
    else:
        grammar = _after_reasoning(sampling.grammar, prompt_end, formats.reasoning, lark, info)
        if not conversation.options.tools and called_functions(conversation):
            sampling = _without_calls(sampling, formats.tools, tokenizer)
    form = request.form
    if not tokenizer.special_tokens.isdisjoint(formats.markers):
        form = msgspec.structs.replace(form, skip_special_tokens=False, spaces_between_special_tokens=False)
    budget = None
    if request.thinking_token_budget is not None:
        budget = _budget(request.thinking_token_budget, prompt_token_ids, prompt_end, formats.reasoning, tokenizer)
    sampling = msgspec.structs.replace(sampling, grammar=grammar, thinking_token_budget=budget)
    return AnswerSettings(sampling, form, prompt_end)


def _budget(
    num_tokens: int, prompt: list[int], prompt_end: str, format: ReasoningFormat | None, tokenizer: Tokenizer
) -> ThinkingBudget:
    """Return the budget in tokens of the model. A prompt that ends within the reasoning ends with what opens it, in
    whatever tokens. Raises INVALID for a model whose reasoning cannot be found, or closed, by its tokens."""
    if format is None:
        raise no_budget(num_tokens, "which does not reason")
    if format.marks is None:
        raise no_budget(num_tokens, f"whose reasoning ({format.name}) has no mark that closes it anywhere")
    opening, closing = format.marks
    if format.is_open(prompt_end):
        start = tuple(prompt[-_OPENING_TOKENS:])
    elif opening in tokenizer.added_token_ids:
        start = (tokenizer.added_token_ids[opening],)
    else:
        raise no_budget(num_tokens, f"which may write {opening} in any tokens")
    return ThinkingBudget(num_tokens, start, tuple(tokenizer.encode_words(closing, "thinking_token_budget")))


def no_budget(num_tokens: int, what: str) -> SluiceError:
    """Return the refusal of a budget for a model. `what` says why: "which ..."."""
    message = f"thinking_token_budget must be left out with this model, {what}, got {num_tokens}"
    return invalid("thinking_token_budget", message)


def _without_calls(sampling: SamplingParams, format: ToolFormat | None, tokenizer: Tokenizer) -> SamplingParams:
    """Return `sampling` without the token that begins a call, which nobody could take. A format whose calls begin with
    ordinary text keeps that: the reader leaves the calls out."""
    token_id = None if format is None else tokenizer.added_token_ids.get(format.opening)
    if token_id is None:
        return sampling
    return msgspec.structs.replace(sampling, bad_words=(*sampling.bad_words, (token_id,)))


def with_structural_tag(
    sampling: SamplingParams, structural_tag: str, tokenizer: Tokenizer, info: EngineInfo
) -> SamplingParams:
    """Return `sampling` with the grammar of a structural tag. Raises INVALID for a runtime that cannot keep to it."""
    if not _is_able(info):
        raise invalid("grammar", f"{info.runtime}, which runs this model, keeps to no structural tag as it is set up")
    lark = _lark_writer(tokenizer, info)
    return msgspec.structs.replace(sampling, grammar=structural_tag_grammar(structural_tag, lark))


def _lark_writer(tokenizer: Tokenizer, info: EngineInfo) -> LarkWriter:
    eos = tokenizer.eos_token_id
    return LarkWriter(tokenizer.added_token_ids, None if eos in info.eos_token_ids else eos)


def _with_calls(
    sent: Grammar | None,
    choice: ToolChoice,
    tools: list[dict[str, Any]],
    prompt_end: str,
    formats: ChatFormats,
    lark: LarkWriter,
    info: EngineInfo,
) -> Grammar | None:
    assert formats.tools is not None
    if not _is_able(info):
        _refuse_promises(choice, sent, info)
        return None
    answer = _answer(formats.tools, tools, choice, sent, lark)
    preamble = "" if formats.reasoning is None else formats.reasoning.preamble(prompt_end, lark)
    return Grammar(GrammarKind.TOOL_CALLS, lark.grammar(f"{preamble} {answer}".lstrip()))


def _after_reasoning(
    sent: Grammar | None, prompt_end: str, reasoning: ReasoningFormat | None, lark: LarkWriter, info: EngineInfo
) -> Grammar | None:
    if sent is None or reasoning is None:
        return sent
    if _is_able(info):
        preamble = reasoning.preamble(prompt_end, lark)
        start = " ".join([preamble, reasoning.text_head(lark), "@answer"])
        return msgspec.structs.replace(sent, preamble=lark.grammar(start.lstrip())) if preamble else sent
    if reasoning.is_open(prompt_end):
        reason = f"{info.runtime}, which runs this model, keeps to no grammar after the reasoning; switch that off"
        raise invalid("grammar", f"the answer cannot be made to match a grammar: {reason}")
    return sent


def _is_able(info: EngineInfo) -> bool:
    return GrammarKind.TOOL_CALLS in info.grammar_kinds


def _answer(
    format: ToolFormat, tools: list[dict[str, Any]], choice: ToolChoice, sent: Grammar | None, lark: LarkWriter
) -> str:
    """Return the Lark expression of calls, or of a text or calls where none is required."""
    parsed = parse_tools(tools)
    if choice.is_required:
        return format.required_calls(parsed, lark, is_parallel=choice.is_parallel)
    if sent is None:
        return format.optional_calls(parsed, lark, is_parallel=choice.is_parallel)
    if sent.whitespace is not None:
        raise invalid("grammar", "with tools the white space of the answer's JSON is as the server writes it")
    if sent.kind not in _JSON_SCHEMAS:
        kinds = " or ".join(_JSON_SCHEMAS)
        message = f"with tools the answer's text can be made to match {kinds}, got {sent.kind.value}"
        raise invalid("grammar", message)
    schema = rewrite(parse_schema(sent.text or _JSON_SCHEMAS[sent.kind])).schema
    text = lark.json(schema)
    return f"({text} | {format.required_calls(parsed, lark, is_parallel=choice.is_parallel)})"


def _refuse_promises(choice: ToolChoice, sent: Grammar | None, info: EngineInfo) -> None:
    """Raise INVALID where the client relies on a grammar of tool calls, which the runtime does not keep to."""
    reason = f"{info.runtime}, which runs this model, keeps to no grammar of tool calls as it is set up"
    if choice.is_required or choice.names:
        raise invalid("tool_choice", f"tool_choice must be 'auto' or 'none': {reason}")
    if sent is not None:
        raise invalid("grammar", f"an answer with tools cannot be made to match a grammar: {reason}")
