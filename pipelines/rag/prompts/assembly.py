"""A prompt that fits: instructions, earlier turns, the best passages and the question, in the model's tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from pipelines.rag.prompts.budget import Fit, fit, smaller
from pipelines.rag.prompts.history import exchanges_of, system_of
from pipelines.rag.prompts.templates import NO_ANSWER_PLACE, Passage, Template, messages_of
from pipelines.rag.prompts.tokens import PromptTokens
from pipelines.text.citations import Source
from pipelines.text.types import ChatMessage
from sluice.errors import SluiceError, invalid

_TOKENS_A_JOINT = 4
"""By which two texts may grow when they are put together: tokenizers split at white space, which is between all of
them, and what they make of it may be a token or two more. Where that could matter the whole is counted."""


@dataclass(frozen=True, slots=True)
class PromptStyle:
    """`instructions` None are the template's own. `no_answer` is what an answer says where the sources do not."""

    template: Template
    instructions: str | None
    no_answer: str
    max_sources: int


@dataclass(frozen=True, slots=True)
class Budget:
    """In tokens. `max_context` is the window of the model `llm`, `for_answer` the part that the prompt leaves."""

    llm: str
    max_context: int
    for_answer: int

    @property
    def for_prompt(self) -> int:
        return self.max_context - self.for_answer


@dataclass(frozen=True, slots=True)
class Retrieved:
    """A source and the text that stands for it in the prompt."""

    source: Source
    text: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """`kept` are in the order in which the prompt has them, with the ids that it calls them by; `dropped` by rank."""

    messages: tuple[ChatMessage, ...]
    kept: tuple[Source, ...]
    dropped: tuple[Source, ...]


async def assemble(
    question: str,
    retrieved: Sequence[Retrieved],
    history: Sequence[ChatMessage],
    style: PromptStyle,
    budget: Budget,
    tokens: PromptTokens,
) -> Prompt:
    """The prompt with as many of the best passages, which come best first, as fit whole, and of the latest exchanges.

    Raises SluiceError INVALID for a question that does not fit by itself.
    """
    draft = _Draft(tokens.defused(question), retrieved, history, style, tokens, await tokens.takes_system())
    room = budget.for_prompt - await draft.frame_size()
    if room < 0:
        raise _too_long(budget, -room)
    sizes = await draft.sizes(min(len(retrieved), style.max_sources))
    chosen = fit(sizes.passages, sizes.exchanges, room)
    # What a prompt without passages says in their place is not in the frame.
    if sizes.most(chosen) > room or not chosen.passages:
        chosen = await _verified(chosen, draft, budget)
    return draft.prompt(chosen)


async def _verified(chosen: Fit, draft: "_Draft", budget: Budget) -> Fit:
    """As much of it as fits when the whole is counted. Raises INVALID where the question alone does not."""
    while (excess := await draft.count(chosen) - budget.for_prompt) > 0:
        left = smaller(chosen)
        if left is None:
            raise _too_long(budget, excess)
        chosen = left
    return chosen


def _too_long(budget: Budget, excess: int) -> SluiceError:
    message = (
        f"the question is {excess} tokens too long: of the {budget.max_context} tokens of model '{budget.llm}' "
        f"{budget.for_answer} are kept for the answer (max_tokens), which leaves {budget.for_prompt} for instructions "
        "and question"
    )
    return invalid("query", message)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Of passages, best first, and exchanges, oldest first, each by itself."""

    passages: Sequence[int]
    exchanges: Sequence[int]

    def most(self, chosen: Fit) -> int:
        """The most that the chosen ones can take together."""
        num_joints = len(chosen.passages) + chosen.num_exchanges
        passages = sum(self.passages[index] for index in chosen.passages)
        recent = sum(self.exchanges[len(self.exchanges) - chosen.num_exchanges :])
        return passages + recent + _TOKENS_A_JOINT * num_joints


class _Draft:
    """What prompts of one question are made of, all of it harmless: no text has a control token."""

    def __init__(
        self,
        question: str,
        retrieved: Sequence[Retrieved],
        history: Sequence[ChatMessage],
        style: PromptStyle,
        tokens: PromptTokens,
        takes_system: bool,
    ) -> None:
        self._question = question
        self._sources = [each.source for each in retrieved]
        self._shown = [_defused(each.source, tokens) for each in retrieved]
        self._texts = [tokens.defused(each.text) for each in retrieved]
        harmless = [ChatMessage(each.role, tokens.defused(each.content)) for each in history]
        self._exchanges = exchanges_of(harmless)
        self._system = "\n\n".join(part for part in (_instructions(style), system_of(harmless)) if part)
        self._style = style
        self._tokens = tokens
        self._takes_system = takes_system

    async def frame_size(self) -> int:
        """Of what every prompt of this question has: all but passages and earlier turns."""
        question = self._style.template.question([""], self._question, self._style.no_answer)
        return await self._tokens.count_chat(self._conversation((), question))

    async def sizes(self, limit: int) -> _Sizes:
        """Of the `limit` best passages, each with what parts it from the next, and of all exchanges."""
        passages = [self._passage(index, index + 1) + "\n\n" for index in range(limit)]
        flat = [message for exchange in self._exchanges for message in exchange]
        counts = iter(await self._tokens.count_turns(flat))
        exchanges = [sum(next(counts) for _ in exchange) for exchange in self._exchanges]
        return _Sizes(await self._tokens.count_texts(passages), exchanges)

    async def count(self, chosen: Fit) -> int:
        return await self._tokens.count_chat(self._messages(self._placed(chosen), chosen.num_exchanges))

    def prompt(self, chosen: Fit) -> Prompt:
        placed = self._placed(chosen)
        kept = tuple(msgspec.structs.replace(self._sources[index], id=number) for number, index in enumerate(placed, 1))
        dropped = tuple(source for index, source in enumerate(self._sources) if index not in chosen.passages)
        return Prompt(self._messages(placed, chosen.num_exchanges), kept, dropped)

    def _placed(self, chosen: Fit) -> list[int]:
        """The chosen passages' indices in the order in which the prompt has them."""
        order = self._style.template.order([self._sources[index] for index in chosen.passages])
        return [chosen.passages[place] for place in order]

    def _messages(self, placed: Sequence[int], num_exchanges: int) -> tuple[ChatMessage, ...]:
        passages = [self._passage(index, number) for number, index in enumerate(placed, 1)]
        question = self._style.template.question(passages, self._question, self._style.no_answer)
        recent = self._exchanges[len(self._exchanges) - num_exchanges :]
        return self._conversation([message for exchange in recent for message in exchange], question)

    def _conversation(self, history: Sequence[ChatMessage], question: str) -> tuple[ChatMessage, ...]:
        if self._takes_system:
            return messages_of(self._system, history, question)
        return _without_system(messages_of("", history, question), self._system)

    def _passage(self, index: int, number: int) -> str:
        return self._style.template.passage(Passage(number, self._shown[index], self._texts[index]))


def _defused(source: Source, tokens: PromptTokens) -> Source:
    return msgspec.structs.replace(source, title=tokens.defused(source.title), heading=tokens.defused(source.heading))


def _instructions(style: PromptStyle) -> str:
    own = style.template.instructions if style.instructions is None else style.instructions
    return own.replace(NO_ANSWER_PLACE, style.no_answer)


def _without_system(messages: tuple[ChatMessage, ...], system: str) -> tuple[ChatMessage, ...]:
    """The instructions at the beginning of the first question, for a model that knows no system message."""
    if not system:
        return messages
    first, *others = messages
    return (ChatMessage(first.role, f"{system}\n\n{first.content}"), *others)
