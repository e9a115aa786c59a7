"""Assembles a prompt that fits: instructions, earlier turns, the best passages and the question.

Sizes are in the language model's tokens.
"""

import asyncio
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec

from sluice.errors import ErrorCode, SluiceError, invalid, named
from sluice.pipelines.rag.rag_prompt.templates import NO_ANSWER_PLACE, NumberedPassage, PromptTemplate, build_messages
from sluice.pipelines.text.citations import Source
from sluice.pipelines.text.tokenizer import INLINE_CHARS, ROLES, Tokenizer
from sluice.pipelines.text.types import ChatMessage

_TOKENS_PER_MESSAGE = 8
"""Most tokens that chat templates put around a message; most of them put 3 to 5."""
_NUM_CACHED = 2048
"""Texts whose counts are cached, a few megabytes: popular chunks come up often, and nothing else here takes as long."""
_MARKUP = re.compile(r"<.+>|\[.+\]", re.DOTALL)
"""Matches added tokens like <think> and [TOOL_CALLS], which steer a model even if they are not marked as special."""
COMMON_CONTROL_TOKENS = re.compile(
    r"<\|[^|<>\n]{1,40}\|>|</?s>|\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS)\]|<</?SYS>>"
    r"|<(?:start|end)_of_turn>|<(?:bos|eos|pad)>|</?(?:think|tool_call|tool_response)>"
)
"""Matches control tokens of well-known chat models, for a model whose tokenizer is not available."""
_TOKENS_PER_JOINT = 4
"""Most tokens by which two texts can grow when they are joined. Tokenizers split at white space, which is between all
of them, so a joint costs a token or two at most. Where that could matter, the whole prompt is counted."""


class PromptTokens(ABC):
    """Counts the tokens of one language model."""

    def __init__(self, control_tokens: "ControlTokens") -> None:
        self._control_tokens = control_tokens

    def escape(self, text: str) -> str:
        """Return the text without the model's control tokens."""
        return self._control_tokens.escape(text)

    @abstractmethod
    async def count_chat(self, messages: Sequence[ChatMessage]) -> int:
        """Count the tokens of a rendered conversation. Raises SluiceError INVALID if the chat template rejects it."""

    @abstractmethod
    async def count_texts(self, texts: Sequence[str]) -> list[int]:
        """Count the tokens of each text by itself."""

    async def count_turns(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Return the most tokens that each message adds to a conversation."""
        counts = await self.count_texts([message.content for message in messages])
        return [count + _TOKENS_PER_MESSAGE for count in counts]


class TokenizerTokens(PromptTokens):
    """Counts exactly, with the model's tokenizer and chat template. Without a template it counts what one would add."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(ControlTokens.of(tokenizer))
        self._tokenizer = tokenizer
        self._count_text = lru_cache(_NUM_CACHED)(lambda text: len(tokenizer.encode_words(text, "context")))
        self._has_template: bool | None = None

    async def count_chat(self, messages: Sequence[ChatMessage]) -> int:
        if self._has_template is None:
            self._has_template = await self._renders(ChatMessage("user", "?"))
        if not self._has_template:
            return sum(await self.count_turns(messages))
        return len(await self._tokenizer.encode_chat(messages))

    async def count_texts(self, texts: Sequence[str]) -> list[int]:
        def count() -> list[int]:
            return [self._count_text(text) for text in texts]

        return count() if sum(map(len, texts)) <= INLINE_CHARS else await asyncio.to_thread(count)

    async def _renders(self, *messages: ChatMessage) -> bool:
        try:
            await self._tokenizer.encode_chat(messages)
        except SluiceError as error:
            if error.code is not ErrorCode.INVALID:
                raise
            return False
        return True


class EstimatedTokens(PromptTokens):
    """Estimates counts for a model whose tokenizer is not available.

    One token stands for `chars_per_token` ASCII characters, or for one other character.
    """

    def __init__(self, chars_per_token: float) -> None:
        super().__init__(ControlTokens(COMMON_CONTROL_TOKENS))
        self._chars_per_token = chars_per_token

    async def count_chat(self, messages: Sequence[ChatMessage]) -> int:
        return sum(await self.count_turns(messages))

    async def count_texts(self, texts: Sequence[str]) -> list[int]:
        return [self._count(text) for text in texts]

    def _count(self, text: str) -> int:
        num_ascii = len(text.encode("ascii", "ignore"))
        return math.ceil(num_ascii / self._chars_per_token) + len(text) - num_ascii


class ControlTokens:
    """Finds and breaks a model's control tokens (`<|end|>`) in texts. Cheap for a text without any, as nearly all are.

    A document that could end its own turn and begin another one would speak with the voice of the user or the system.
    """

    def __init__(self, pattern: re.Pattern[str] | None, normalizer: Any = None) -> None:
        """`normalizer` is the tokenizer's, given if the tokenizer looks for control tokens in normalized text."""
        self._pattern = pattern
        self._normalizer = normalizer

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "ControlTokens":
        """Build the control tokens that `tokenizer` would find in a text."""
        added = [token for token in tokenizer.added_tokens if _steers(token)]
        is_normalized = any(token.normalized for token in added)
        return cls(
            _any_of(token.content for token in added), tokenizer.library_tokenizer.normalizer if is_normalized else None
        )

    def escape(self, text: str) -> str:
        """Put a space after the first character of each control token: it reads the same, and is no token any more."""
        if self._pattern is None:
            return text
        if self._normalizer is not None:
            normal = self._normalizer.normalize_str(text)
            text = normal if self._pattern.search(normal) else text
        # Repeated, since a token may stand between the halves of another one.
        while self._pattern.search(text):
            text = self._pattern.sub(_break, text)
        return text


def _steers(token: Any) -> bool:
    return bool(token.content.strip()) and (token.special or _MARKUP.fullmatch(token.content) is not None)


def _any_of(contents: Iterable[str]) -> re.Pattern[str] | None:
    ordered = sorted(contents, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def _break(match: re.Match[str]) -> str:
    token = match.group()
    return f"{token[0]} {token[1:]}" if len(token) > 1 else ""


@dataclass(frozen=True, slots=True)
class PromptStyle:
    """Style of a model's prompts. `instructions` None stands for the template's own.

    `no_answer` is the sentence that answers a question to which the sources have no answer.
    """

    template: PromptTemplate
    instructions: str | None
    no_answer: str
    max_sources: int


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """Tokens of a prompt and its answer. `max_context` is the context of the model `llm`, `for_answer` its reserve."""

    llm: str
    max_context: int
    for_answer: int

    @property
    def for_prompt(self) -> int:
        return self.max_context - self.for_answer


@dataclass(frozen=True, slots=True)
class RetrievedPassage:
    """A source and the text that stands for it in the prompt."""

    source: Source
    text: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """An assembled prompt.

    `kept` are the sources in it, in its order and with the ids by which it calls them; `dropped` are the others, by
    rank. `answers` are the only texts that the template allows the model to say; none if it may say anything.
    """

    messages: tuple[ChatMessage, ...]
    kept: tuple[Source, ...]
    dropped: tuple[Source, ...]
    answers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptSelection:
    """Contents of a prompt: the indices of its passages, in order of rank, and how many of the latest exchanges."""

    passages: tuple[int, ...]
    num_exchanges: int


async def assemble_prompt(
    question: str,
    retrieved: Sequence[RetrievedPassage],
    history: Sequence[ChatMessage],
    style: PromptStyle,
    budget: TokenBudget,
    tokens: PromptTokens,
) -> Prompt:
    """Assemble a prompt from as many of the best passages, which come best first, and of the latest exchanges as fit.

    Raises SluiceError INVALID for a question that does not fit by itself.
    """
    draft = _Draft(tokens.escape(question), retrieved, history, style, tokens)
    room = budget.for_prompt - await draft.count_frame()
    if room < 0:
        raise _too_long(budget, -room)
    sizes = await draft.count_parts(min(len(retrieved), style.max_sources))
    selection = select_contents(sizes.passages, sizes.exchanges, room)
    # The frame does not include what a prompt without passages says in their place, or one sentence of them.
    is_sure = selection.passages and style.template.holds_passages
    if sizes.upper_bound(selection) > room or not is_sure:
        selection = await _shrink(selection, draft, budget)
    return draft.build(selection)


async def _shrink(selection: PromptSelection, draft: "_Draft", budget: TokenBudget) -> PromptSelection:
    """Drop contents until the whole prompt, counted exactly, fits. Raises INVALID if the question alone does not."""
    while (excess := await draft.count(selection) - budget.for_prompt) > 0:
        smaller = drop_last(selection)
        if smaller is None:
            raise _too_long(budget, excess)
        selection = smaller
    return selection


def _too_long(budget: TokenBudget, excess: int) -> SluiceError:
    message = (
        f"the question is {excess} tokens too long: of the {budget.max_context} tokens of model '{budget.llm}' "
        f"{budget.for_answer} are kept for the answer ({named('max_tokens')}), which leaves {budget.for_prompt} for "
        "instructions and question"
    )
    return invalid("query", message)


def select_contents(passages: Sequence[int], exchanges: Sequence[int], room: int) -> PromptSelection:
    """Select passages and exchanges that take at most `room` tokens together. Pure.

    `passages` are the sizes of the passages, best first, `exchanges` those of the exchanges, oldest first. The latest
    exchanges may take half of the room if the best passage fits beside them, and what passages leave.
    """
    num_recent = _num_latest(exchanges, _room_for_exchanges(passages, room))
    kept = _select_passages(passages, room - sum(exchanges[len(exchanges) - num_recent :]))
    return PromptSelection(kept, _num_latest(exchanges, room - sum(passages[index] for index in kept)))


def drop_last(selection: PromptSelection) -> PromptSelection | None:
    """Drop the worst passage, or the oldest exchange if there is no passage. Returns None if nothing is left."""
    if selection.passages:
        return PromptSelection(selection.passages[:-1], selection.num_exchanges)
    return PromptSelection((), selection.num_exchanges - 1) if selection.num_exchanges else None


def _room_for_exchanges(passages: Sequence[int], room: int) -> int:
    if not passages:
        return room
    beside_best = room - passages[0]
    return min(room // 2, beside_best) if beside_best >= 0 else room // 2


def _select_passages(sizes: Sequence[int], room: int) -> tuple[int, ...]:
    """Take each passage that fits whole, in order: a shorter one may fit after one that is too long."""
    kept = []
    for index, size in enumerate(sizes):
        if size <= room:
            kept.append(index)
            room -= size
    return tuple(kept)


def _num_latest(sizes: Sequence[int], room: int) -> int:
    count = 0
    for size in reversed(sizes):
        if size > room:
            break
        room -= size
        count += 1
    return count


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Tokens of each passage, best first, and of each exchange, oldest first."""

    passages: Sequence[int]
    exchanges: Sequence[int]

    def upper_bound(self, selection: PromptSelection) -> int:
        """Return the most tokens that the selection can take."""
        num_joints = len(selection.passages) + selection.num_exchanges
        passages = sum(self.passages[index] for index in selection.passages)
        recent = sum(self.exchanges[len(self.exchanges) - selection.num_exchanges :])
        return passages + recent + _TOKENS_PER_JOINT * num_joints


class _Draft:
    """Builds and counts prompts of one question. Its texts contain no control tokens."""

    def __init__(
        self,
        question: str,
        retrieved: Sequence[RetrievedPassage],
        history: Sequence[ChatMessage],
        style: PromptStyle,
        tokens: PromptTokens,
    ) -> None:
        self._question = question
        self._sources = [each.source for each in retrieved]
        self._escaped_sources = [
            msgspec.structs.replace(each, title=tokens.escape(each.title), heading=tokens.escape(each.heading))
            for each in self._sources
        ]
        self._texts = [tokens.escape(each.text) for each in retrieved]
        turns = [ChatMessage(each.role, tokens.escape(each.content)) for each in history]
        self._exchanges = split_exchanges(turns)
        self._system = "\n\n".join(part for part in (_instructions(style), join_system_messages(turns)) if part)
        self._style = style
        self._tokens = tokens

    async def count_frame(self) -> int:
        """Count the tokens that every prompt of this question has: all but passages and earlier turns."""
        question = self._style.template.question([""], self._question, self._style.no_answer)
        return await self._tokens.count_chat(self._conversation((), question))

    async def count_parts(self, num_passages: int) -> _Sizes:
        """Count the best `num_passages` passages, each with its separator, and all exchanges."""
        flat = [message for exchange in self._exchanges for message in exchange]
        counts = iter(await self._tokens.count_turns(flat))
        exchanges = [sum(next(counts) for _ in exchange) for exchange in self._exchanges]
        if not self._style.template.holds_passages:
            return _Sizes([0] * num_passages, exchanges)
        passages = [self._passage(index, index + 1) + "\n\n" for index in range(num_passages)]
        return _Sizes(await self._tokens.count_texts(passages), exchanges)

    async def count(self, selection: PromptSelection) -> int:
        return await self._tokens.count_chat(self._messages(self._order(selection), selection.num_exchanges))

    def build(self, selection: PromptSelection) -> Prompt:
        ordered = self._order(selection)
        kept = tuple(
            msgspec.structs.replace(self._sources[index], id=number) for number, index in enumerate(ordered, 1)
        )
        dropped = tuple(source for index, source in enumerate(self._sources) if index not in selection.passages)
        answers = self._style.template.answers(self._passages(ordered), self._question)
        return Prompt(self._messages(ordered, selection.num_exchanges), kept, dropped, answers)

    def _order(self, selection: PromptSelection) -> list[int]:
        """Return the indices of the selected passages in the order of the prompt."""
        order = self._style.template.order([self._sources[index] for index in selection.passages])
        return [selection.passages[place] for place in order]

    def _messages(self, ordered: Sequence[int], num_exchanges: int) -> tuple[ChatMessage, ...]:
        question = self._style.template.question(self._passages(ordered), self._question, self._style.no_answer)
        recent = self._exchanges[len(self._exchanges) - num_exchanges :]
        return self._conversation([message for exchange in recent for message in exchange], question)

    def _conversation(self, history: Sequence[ChatMessage], question: str) -> tuple[ChatMessage, ...]:
        return build_messages(self._system, history, question)

    def _passages(self, ordered: Sequence[int]) -> list[str]:
        return [self._passage(index, number) for number, index in enumerate(ordered, 1)]

    def _passage(self, index: int, number: int) -> str:
        passage = NumberedPassage(number, self._escaped_sources[index], self._texts[index])
        return self._style.template.passage(passage)


def _instructions(style: PromptStyle) -> str:
    instructions = style.template.instructions if style.instructions is None else style.instructions
    return instructions.replace(NO_ANSWER_PLACE, style.no_answer)


def join_system_messages(messages: Sequence[ChatMessage]) -> str:
    """Return the conversation's own system messages as one text, "" if there are none."""
    return "\n\n".join(message.content for message in messages if ROLES[message.role] == "system")


def split_exchanges(messages: Sequence[ChatMessage]) -> list[tuple[ChatMessage, ...]]:
    """Split the other messages into exchanges, each a question with its answers, which are kept or dropped together.

    Answers before the first question are left out.
    """
    exchanges: list[list[ChatMessage]] = []
    for message in messages:
        if message.role == "user":
            exchanges.append([message])
        elif message.role == "assistant" and exchanges:
            exchanges[-1].append(message)
    return [tuple(exchange) for exchange in exchanges]
