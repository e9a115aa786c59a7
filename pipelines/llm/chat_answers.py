"""How an answer in a chat is generated: its grammar, so that calls match their schemas, and the tokens it shows."""

from collections.abc import Collection, Sequence
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from sluice.engine.guidance.closing import rewrite
from sluice.engine.guidance.schema import parse_schema
from sluice.engine.types import EngineInfo, Grammar, GrammarKind, SamplingParams, ThinkingBudget
from sluice.errors import invalid
from sluice.pipelines.chat.formats import ReasoningFormat, Tool, ToolFormat, parse_tools
from sluice.pipelines.chat.lark import LarkWriter
from sluice.pipelines.chat.registry import ChatFormats
from sluice.pipelines.chat.structural_tags import structural_tag_grammar
from sluice.pipelines.text.chat_template import names_in_template
from sluice.pipelines.text.stream import sent_prompt
from sluice.pipelines.text.tokenizer import Tokenizer
from sluice.pipelines.text.types import (
    BUDGET_ARGUMENT,
    EFFORT_ARGUMENT,
    THINKING_SWITCHES,
    Conversation,
    TemplateOptions,
    TextForm,
    TextRequest,
    ToolChoice,
)

_JSON_SCHEMAS = {GrammarKind.JSON_SCHEMA: "", GrammarKind.JSON_OBJECT: '{"type": "object"}'}
"""Kinds of grammars that a text beside tool calls may match, with the schemas of those that have no text."""

_NAMED_RELAXATIONS = 10
_EFFORT_SHARES = {"low": (0.2, 1 << 10), "medium": (0.5, 8 << 10), "high": (0.8, 24 << 10)}
"""The reasoning's share of the tokens of an answer, and the most tokens of it, where the template takes no effort."""
_BUDGET = "thinking_token_budget"
_ANY_TEXT = r"(.|\n)*"
_OPENING_TOKENS = 8
"""Tokens at the end of a prompt that no answer is taken to repeat."""
_PROMPT_END_TOKENS = 16
"""Tokens that have the tags of reasoning with which a prompt may end."""


def allowed_tools(conversation: Conversation, choice: ToolChoice) -> Sequence[dict[str, Any]]:
    """Return the tools that an answer may call. Raises INVALID for a choice of one that the conversation lacks."""
    tools = conversation.options.tools
    if not choice.names:
        return tools
    names = dict.fromkeys(tool["function"]["name"] for tool in tools)
    unknown = next((name for name in choice.names if name not in names), None)
    if unknown is not None:
        raise invalid("tool_choice", f"tool_choice names {unknown!r}; tools has {', '.join(names) or 'none'}")
    return [tool for tool in tools if tool["function"]["name"] in choice.names]


def conversation_tools(request: TextRequest) -> Sequence[dict[str, Any]]:
    """Return the tools of a request for an answer in a conversation, none of any other."""
    prompt = sent_prompt(request.prompt)
    return prompt.options.tools if isinstance(prompt, Conversation) else ()


def called_functions(conversation: Conversation) -> list[str]:
    """Return the names of the functions that were called earlier in a conversation."""
    return [call.name for message in conversation.messages for call in message.tool_calls]


def relaxed_tools(tools: Sequence[Tool], info: EngineInfo) -> list[str]:
    """Return the first of what the schemas of tools say and calls are not held to."""
    if tools and not _is_able(info):
        return [f"{info.runtime} does not hold calls to the schemas of tools"]
    found = (f"{what} in {tool.name}" for tool in tools for what in tool.relaxed)
    return list(islice(found, _NAMED_RELAXATIONS))


class AnswerSettings(NamedTuple):
    """How an answer is generated that a `ChatReader` reads."""

    sampling: SamplingParams
    form: TextForm
    prompt_end: str
    """The end of the prompt's text, which says whether the answer begins with reasoning; "" without a format of it."""
    num_thinking: int | None = None
    """The most tokens of the reasoning; None for any."""


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
    lark, budget, limit = _lark_writer(tokenizer, info), None, None
    sent = _sent_budget(request, conversation.options, sampling.max_tokens, tokenizer.template_names)
    if sent.num_tokens is not None and formats.reasoning is not None:
        budget = _budget(sent, prompt_token_ids, prompt_end, formats.reasoning, tokenizer)
    if budget is not None and _BUDGET in info.refused_sampling:
        limit = _grammar_limit(budget.num_tokens, prompt_end, formats, tokenizer, info)
        budget = budget if limit is None and sent.is_required else None
    preamble = _Preamble(formats.reasoning, prompt_end, limit)
    if tools and formats.tools is not None:
        grammar = _with_calls(sampling.grammar, request.tool_choice, tools, preamble, formats.tools, lark, info)
    else:
        grammar = _after_reasoning(sampling.grammar, preamble, lark, info)
        if not conversation.options.tools and called_functions(conversation):
            sampling = _without_calls(sampling, formats.tools, tokenizer)
    form = request.form
    if not tokenizer.special_tokens.isdisjoint(formats.markers):
        form = msgspec.structs.replace(form, skip_special_tokens=False, spaces_between_special_tokens=False)
    sampling = msgspec.structs.replace(sampling, grammar=grammar, thinking_token_budget=budget)
    return AnswerSettings(sampling, form, prompt_end, limit if budget is None else budget.num_tokens)


class _Preamble(NamedTuple):
    """What comes before an answer that a grammar constrains. `limit` is the most tokens of the reasoning; None for
    any."""

    format: ReasoningFormat | None
    prompt_end: str
    limit: int | None

    def write(self, lark: LarkWriter) -> str:
        """Return its Lark expression."""
        if self.format is None:
            return ""
        if self.limit is None:
            return self.format.preamble(self.prompt_end, lark)
        return self.format.limited_preamble(self.prompt_end, lark, self.limit)


def _grammar_limit(
    num_tokens: int, prompt_end: str, formats: ChatFormats, tokenizer: Tokenizer, info: EngineInfo
) -> int | None:
    """Return a budget that a grammar keeps to, for a runtime that does not by itself; None where no grammar can."""
    assert formats.reasoning is not None
    is_possible = formats.reasoning.limited_preamble(prompt_end, _lark_writer(tokenizer, info), num_tokens)
    return num_tokens if is_possible and _is_able(info) else None


class _SentBudget(NamedTuple):
    """The most tokens of the reasoning that a client asks for. One that is not required is left out where the model
    cannot keep to it."""

    num_tokens: int | None
    is_required: bool = False


def _sent_budget(
    request: TextRequest, options: TemplateOptions, max_tokens: int, known: Collection[str]
) -> _SentBudget:
    """Return the budget of a request: the one in its field, or what its template's arguments come to where the template
    does not know them, which are the `known` ones of the model's own. Raises INVALID for a budget that is none."""
    arguments, sent = options.arguments, request.thinking_token_budget
    if not arguments:
        return _SentBudget(sent, request.requires_budget)
    if options.template is not None:
        known = names_in_template(options.template)
    switches = [name for name in THINKING_SWITCHES if name in known]
    is_off = any(arguments.get(name) is False for name in switches or THINKING_SWITCHES)
    if is_off:
        return _SentBudget(None if switches else 0)
    if sent is None and BUDGET_ARGUMENT in arguments and BUDGET_ARGUMENT not in known:
        sent = _checked_budget(arguments[BUDGET_ARGUMENT])
    if sent is not None:
        return _SentBudget(sent, request.requires_budget)
    effort = arguments.get(EFFORT_ARGUMENT)
    if EFFORT_ARGUMENT in known or not isinstance(effort, str) or effort not in _EFFORT_SHARES:
        return _SentBudget(None)
    share, most = _EFFORT_SHARES[effort]
    return _SentBudget(min(int(share * max_tokens), most))


def _checked_budget(value: object) -> int | None:
    """Return a budget among a template's arguments; None for -1, which is any."""
    if not isinstance(value, int) or isinstance(value, bool) or not -1 <= value < 1 << 31:
        path = f"chat_template_kwargs.{BUDGET_ARGUMENT}"
        raise invalid(path, f"{path} must be an integer from -1, which is any, to {(1 << 31) - 1}, got {value!r:.60}")
    return None if value == -1 else value


def _budget(
    sent: _SentBudget,
    prompt: list[int],
    prompt_end: str,
    format: ReasoningFormat,
    tokenizer: Tokenizer,
) -> ThinkingBudget | None:
    """Return the budget in tokens of the model; None where no reasoning can come. A prompt that ends within the
    reasoning ends with what opens it, in whatever tokens. Raises INVALID for a required one of a model whose reasoning
    cannot be found, or closed, by its tokens."""
    num_tokens, is_required = sent
    is_open = format.is_open(prompt_end)
    if num_tokens is None or not (is_open or format.preamble(prompt_end, LarkWriter(tokenizer.added_token_ids))):
        return None
    reason = ""
    if format.marks is None:
        reason = f"whose reasoning ({format.name}) has no mark that closes it anywhere"
    elif not is_open and format.marks[0] not in tokenizer.added_token_ids:
        reason = f"which may write {format.marks[0]} in any tokens"
    if reason and is_required:
        raise invalid(_BUDGET, f"{_BUDGET} must be left out with this model, {reason}, got {num_tokens}")
    if reason or format.marks is None:
        return None
    opening, closing = format.marks
    start = tuple(prompt[-_OPENING_TOKENS:]) if is_open else (tokenizer.added_token_ids[opening],)
    return ThinkingBudget(num_tokens, start, tuple(tokenizer.encode_words(closing, _BUDGET)))


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
    tools: Sequence[dict[str, Any]],
    preamble: _Preamble,
    format: ToolFormat,
    lark: LarkWriter,
    info: EngineInfo,
) -> Grammar | None:
    if not _is_able(info):
        _refuse_promises(choice, sent, info)
        return None
    answer = _answer(format, tools, choice, sent, lark)
    return Grammar(GrammarKind.TOOL_CALLS, lark.grammar(f"{preamble.write(lark)} {answer}".lstrip()))


def _after_reasoning(sent: Grammar | None, preamble: _Preamble, lark: LarkWriter, info: EngineInfo) -> Grammar | None:
    reasoning = preamble.format
    if reasoning is None or (sent is None and preamble.limit is None):
        return sent
    if sent is None:
        text = f"{preamble.write(lark)} {lark.pattern(_ANY_TEXT)}"
        return Grammar(GrammarKind.TOOL_CALLS, lark.grammar(text))
    if _is_able(info):
        written = preamble.write(lark)
        start = " ".join([written, reasoning.text_head(lark), "@answer"])
        return msgspec.structs.replace(sent, preamble=lark.grammar(start.lstrip())) if written else sent
    if reasoning.is_open(preamble.prompt_end):
        reason = f"{info.runtime}, which runs this model, keeps to no grammar after the reasoning; switch that off"
        raise invalid("grammar", f"the answer cannot be made to match a grammar: {reason}")
    return sent


def _is_able(info: EngineInfo) -> bool:
    return GrammarKind.TOOL_CALLS in info.grammar_kinds


def _answer(
    format: ToolFormat, tools: Sequence[dict[str, Any]], choice: ToolChoice, sent: Grammar | None, lark: LarkWriter
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
