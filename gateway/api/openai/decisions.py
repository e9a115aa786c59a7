"""Decisions by the probabilities of a language model's next token: vLLM's `/generative_scoring`, for label tokens, and
`/v1/systemone`, for questions with options. Each prompt is computed, and nothing is generated after it."""

import asyncio
import string
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
import orjson
from fastapi import APIRouter, Request, Response
from numpy.typing import NDArray
from pydantic import Discriminator, Field, Tag

from sluice.errors import SluiceError, invalid
from sluice.gateway.api.fields import json_text
from sluice.gateway.api.openai.reply import error_frame, usage
from sluice.gateway.api.openai.schemas import MAX_MODEL_CHARS, MAX_PROMPTS, SomeTokenIds
from sluice.gateway.api.openai.tokens import language_model, only_model
from sluice.gateway.api.translators import Answering, Reply, Translator
from sluice.gateway.front.http.parsing import RequestObject, WholeNumber, quote_value, union_error
from sluice.gateway.front.http.request import get_begin_time
from sluice.gateway.plane.data_plane import Plane
from sluice.pipelines.llm.text import LlmText
from sluice.pipelines.stages.tokenizer_model import check_token_ids
from sluice.pipelines.text.model import TextModel
from sluice.pipelines.text.types import (
    THINKING_SWITCHES,
    ChatMessage,
    ChatReader,
    Conversation,
    EncodedPrompt,
    TemplateOptions,
    TextEvent,
    TextRequest,
)

JsonObject = dict[str, Any]
MAX_LABELS = 4096
MAX_QUESTIONS = 64
_LETTERS, _YES_NO = tuple(string.ascii_uppercase), ("yes", "no")
_NAMES = {"prompt": "items", "max_tokens": "items"}
"""The client's names of fields that models name otherwise in their errors."""


def _text_or_ids(value: Any) -> str | None:
    if isinstance(value, str):
        return "<text>"
    return "<ids>" if isinstance(value, list) else None


TextOrIds = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[SomeTokenIds, Tag("<ids>")],
    Discriminator(_text_or_ids, **union_error("a string or an array of token ids")),
]


class DecisionFields(RequestObject):
    """The fields of both routes."""

    model: str | None = Field(None, max_length=MAX_MODEL_CHARS, description="Absent: the only language model.")
    cache_salt: str | None = Field(None, max_length=256, description="As in chats.")
    priority: WholeNumber | None = Field(None, ge=-(2**31), lt=2**31, description="Lower runs earlier.")
    request_id: str | None = Field(None, max_length=MAX_MODEL_CHARS, description="Part of the answer's id.")


class ScoringRequest(DecisionFields):
    """`POST /generative_scoring`."""

    example = (
        '{"model": "rill", "query": "Is this about databases? ", "items": ["CREATE INDEX"], "label_token_ids": [5, 6]}'
    )
    query: TextOrIds
    items: list[TextOrIds] = Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)
    label_token_ids: list[int] = Field(min_length=1, max_length=MAX_LABELS, fail_fast=True)
    apply_softmax: bool | None = Field(None, description="false: among all tokens, not among the labels alone.")
    item_first: bool | None = Field(None, description="Whether an item stands before the query.")
    add_special_tokens: bool | None = Field(None, description="Whether the query gets the tokenizer's special tokens.")


DecisionT = TypeVar("DecisionT", bound=DecisionFields)


def _object_or_list(value: Any) -> str | None:
    if isinstance(value, dict):
        return "<object>"
    return "<list>" if isinstance(value, list) else None


Criteria = Annotated[
    Annotated[dict[str, str | None], Tag("<object>")]
    | Annotated[list[str], Field(max_length=MAX_QUESTIONS, fail_fast=True), Tag("<list>")],
    Discriminator(_object_or_list, **union_error("an object of options or an array of levels")),
]


class QuestionFields(RequestObject):
    """A question, its kind, and the options of its answer."""

    type: Literal["choice", "noul", "score"]
    instructions: str | None = None
    criteria: Criteria | None = None


class DecisionRequest(DecisionFields):
    """`POST /v1/systemone`."""

    example = (
        '{"model": "rill", "state": "The build is red.", '
        '"questions": {"fix": {"type": "noul", "instructions": "Is there something to fix?"}}}'
    )
    state: Any = Field(description="What the questions are about: a text, or any JSON.")
    questions: dict[str, QuestionFields] = Field(min_length=1, max_length=MAX_QUESTIONS)
    instructions: str | None = Field(None, description="A system message in front.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, max_length=64, description="As in chats.")
    images: list[str] | None = Field(None, description="Refused: questions are about text.")
    audio: list[str] | None = Field(None, description="Refused: questions are about text.")
    videos: list[str] | None = Field(None, description="Refused: questions are about text.")


def router(plane: Plane, answering: Answering) -> APIRouter:
    """Return the routes, which answer from `plane`."""
    api = APIRouter(tags=["OpenAI"], default_response_class=Response)

    def score(fields: ScoringRequest, request: Request) -> ScoringTranslator:
        return ScoringTranslator(fields, request, plane)

    def decide(fields: DecisionRequest, request: Request) -> DecisionTranslator:
        return DecisionTranslator(fields, request, plane)

    about = "Return the probability of the first label as the token after each item."
    answering.serve(api, "/generative_scoring", "generative_scoring", about, ScoringRequest, score)
    about = "Answer questions by the probabilities of their options."
    answering.serve(api, "/v1/systemone", "structured_decisions", about, DecisionRequest, decide)
    return api


@dataclass(frozen=True, slots=True)
class LabelRead:
    """The probabilities of labels as a model's next token: among each other, their `mass` among all
    tokens, and whether one of them is the likeliest token."""

    probabilities: NDArray[np.float64]
    mass: float
    has_likeliest: bool


def read_labels(logits: bytes, label_ids: Sequence[int]) -> LabelRead:
    """Return the probabilities of tokens from the model's logits, [vocab_size] float32 as bytes."""
    values = np.frombuffer(logits, np.float32).astype(np.float64)
    weights = np.exp(values - values.max())
    labels = weights[list(label_ids)]
    mass = float(labels.sum() / weights.sum())
    own = values[list(label_ids)]
    among = np.exp(own - own.max())
    return LabelRead(among / among.sum(), mass, int(values.argmax()) in label_ids)


class LabelReply(Reply):
    """Formats an answer of reads, of the labels of each prompt."""

    def __init__(
        self,
        labels: Sequence[Sequence[int]],
        write: Callable[[Sequence[LabelRead], Sequence[TextEvent]], Awaitable[JsonObject]],
    ) -> None:
        self._labels = labels
        self._write = write
        self._reads: dict[int, LabelRead] = {}
        self._ends: dict[int, TextEvent] = {}

    def frame(self, index: int, event: TextEvent) -> bytes:
        raise NotImplementedError("a decision is not streamed")

    def collector(self, index: int) -> Callable[[TextEvent], object]:
        def collect(event: TextEvent) -> None:
            if event.detail is not None and event.detail.logits:
                self._reads[index] = read_labels(event.detail.logits, self._labels[index])
            if event.finish_reason is not None:
                self._ends[index] = msgspec.structs.replace(event, detail=None)

        return collect

    async def whole(self) -> bytes:
        places = range(len(self._labels))
        return orjson.dumps(await self._write([self._reads[i] for i in places], [self._ends[i] for i in places]))


class LabelTranslator(Translator[DecisionT]):
    """Prompts whose next token is asked for, by the probabilities of some."""

    encode_error = staticmethod(error_frame)
    is_streamed = False

    def __init__(self, fields: DecisionT, request: Request, plane: Plane) -> None:
        super().__init__(fields, request)
        self.param_names: Mapping[str, str] = _NAMES
        self._name = fields.model or only_model(plane)
        self._began_at = get_begin_time(request)
        self._prompts: list[EncodedPrompt] = []
        self._labels: list[list[int]] = []

    @property
    def model_name(self) -> str:
        return self._name

    @property
    def priority(self) -> int | None:
        return self.fields.priority

    async def prepare(self, model: TextModel) -> Response | None:
        text = language_model(model)
        if not text.info.gives_logits:
            reason = f"{text.info.runtime}, which runs it, gives the probabilities of the likeliest tokens alone"
            raise invalid("model", f"model '{model.name}' cannot decide: {reason}")
        await self.read_prompts(text)
        self.num_prompts = len(self._prompts)
        return None

    @abstractmethod
    async def read_prompts(self, text: LlmText) -> None:
        """Set the prompts and the label tokens of each. Raises INVALID."""

    def parse(self, base: TextRequest) -> list[TextRequest]:
        sampling = {"max_tokens": 1, "temperature": 0.0}
        salt = self.fields.cache_salt or ""
        asked = msgspec.structs.replace(base, sampling=sampling, cache_salt=salt, returns_generation_logits=True)
        return [msgspec.structs.replace(asked, prompt=each) for each in self._prompts]

    def head(self, model: TextModel, prefix: str, kind: str) -> JsonObject:
        """Return the first fields of an answer."""
        answer_id = f"{prefix}-{self.fields.request_id or self.request_id}"
        return {"id": answer_id, "object": kind, "created": int(self._began_at), "model": model.name}


class ScoringTranslator(LabelTranslator[ScoringRequest]):
    """Items to score by the probability of a label after each."""

    protocol = "vllm_scoring"

    async def read_prompts(self, text: LlmText) -> None:
        fields, tokenizer = self.fields, text.tokenizer
        check_token_ids(fields.label_token_ids, text.info.vocab_size, "label_token_ids")
        adds = fields.add_special_tokens is not False
        query = await _token_ids(text, fields.query, adds_special=adds)
        for item in fields.items:
            await asyncio.sleep(0)
            item_ids = await _token_ids(text, item, adds_special=False)
            ids = item_ids + query if fields.item_first else query + item_ids
            if not ids:
                raise invalid("items", "items must not be empty where query is")
            check_token_ids(ids, tokenizer.num_tokens, "items")
            self._prompts.append(EncodedPrompt(ids, ids))
        self._labels = [fields.label_token_ids] * len(self._prompts)

    def reply(self, model: TextModel, readers: Sequence[ChatReader]) -> Reply:
        is_among_labels = self.fields.apply_softmax is not False

        async def write(reads: Sequence[LabelRead], ends: Sequence[TextEvent]) -> JsonObject:
            data = []
            for index, each in enumerate(reads):
                await asyncio.sleep(0)  # there may be millions of numbers in all
                found = each.probabilities * (1.0 if is_among_labels else each.mass)
                row = {"index": index, "object": "score", "score": found[0], "probabilities": found}
                data.append(orjson.Fragment(orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY)))
            counts = usage(ends, len(ends))
            return {**self.head(model, "generative-scoring", "list"), "data": data, "usage": counts}

        return LabelReply(self._labels, write)


async def _token_ids(text: LlmText, sent: str | list[int], *, adds_special: bool) -> list[int]:
    if not isinstance(sent, str):
        return sent
    return await text.tokenizer.encode_text(sent, text.max_model_len, add_special_tokens=adds_special)


@dataclass(frozen=True, slots=True)
class DecisionQuestion:
    """A question with the label and the name of each option, and what the model reads of it."""

    kind: str
    labels: tuple[str, ...]
    names: tuple[str, ...]
    text: str

    def answer(self, read: LabelRead) -> JsonObject:
        """Return the answer: the likeliest option, the probability of yes, or the mean level from 0."""
        probabilities, best = read.probabilities.tolist(), int(np.argmax(read.probabilities))
        rest = {"confidence": probabilities[best] * read.mass}
        if self.kind == "choice":
            found: JsonObject = {"choice": self.names[best]}
            return {"type": self.kind, **found, "probabilities": self._by(self.names, probabilities), **rest}
        if self.kind == "noul":
            found = {"noul": probabilities[0]}
            return {"type": self.kind, **found, "probabilities": self._by(_YES_NO, probabilities), **rest}
        found = {"score": sum(level * each for level, each in enumerate(probabilities))}
        legend = dict(zip(self.labels, self.names, strict=True))
        return {
            "type": self.kind,
            **found,
            "legend": legend,
            "probabilities": self._by(self.labels, probabilities),
            **rest,
        }

    @staticmethod
    def _by(names: Sequence[str], probabilities: Sequence[float]) -> dict[str, float]:
        return dict(zip(names, probabilities, strict=True))


def parse_question(fields: QuestionFields, path: str) -> DecisionQuestion:
    """Return the question at `path`. Raises INVALID for options that its type cannot have."""
    criteria, kind = fields.criteria, fields.type
    labels: tuple[str, ...]
    names: tuple[str, ...]
    if kind == "noul":
        sent = criteria or {}
        if not isinstance(sent, dict) or not sent.keys() <= {"true", "false"}:
            raise _wrong(path, "an object with true and false, or null", criteria)
        options = [("yes", sent.get("true")), ("no", sent.get("false"))]
        labels, names, order = _YES_NO, _YES_NO, "Reply with yes or no and nothing else."
        lines = [f"{name}: {description}" if description else name for name, description in options]
    elif kind == "choice":
        if not isinstance(criteria, dict) or not 0 < len(criteria) <= len(_LETTERS):
            raise _wrong(path, f"an object of 1 to {len(_LETTERS)} options, each with a description or null", criteria)
        labels, names = _LETTERS[: len(criteria)], tuple(criteria)
        order = "Reply with the letter of one option and nothing else."
        described = [f"{name} - {about}" if about else name for name, about in criteria.items()]
        lines = [f"{label}: {each}" for label, each in zip(labels, described, strict=True)]
    else:
        if not isinstance(criteria, list) or not 2 <= len(criteria) <= len(string.digits):
            raise _wrong(path, f"an array of 2 to {len(string.digits)} levels, the lowest first", criteria)
        labels, names = tuple(string.digits[: len(criteria)]), tuple(criteria)
        order = "Reply with the number of one level and nothing else."
        lines = [f"{label}: {each}" for label, each in zip(labels, names, strict=True)]
    asked = [f"Question: {fields.instructions}"] if fields.instructions else []
    return DecisionQuestion(kind, labels, names, "\n".join([*asked, *lines, order]))


def _wrong(path: str, expected: str, got: Any) -> SluiceError:
    return invalid(f"{path}.criteria", f"{path}.criteria must be {expected}, got {quote_value(got)}")


class DecisionTranslator(LabelTranslator[DecisionRequest]):
    """Questions to answer, each in a prompt of its own that begins as the others do."""

    protocol = "vllm_decisions"

    def __init__(self, fields: DecisionRequest, request: Request, plane: Plane) -> None:
        super().__init__(fields, request, plane)
        self.param_names = {"prompt": "state", "messages": "state", "max_tokens": "state"}
        self._questions: list[DecisionQuestion] = []

    async def read_prompts(self, text: LlmText) -> None:
        fields = self.fields
        for name in ("images", "audio", "videos"):
            if getattr(fields, name):
                raise invalid(name, f"{name} is not supported: questions are about text")
        self._questions = [parse_question(each, f"questions.{name}") for name, each in fields.questions.items()]
        options = TemplateOptions(
            arguments={**dict.fromkeys(THINKING_SWITCHES, False), **(fields.chat_template_kwargs or {})}
        )
        system = (ChatMessage("system", fields.instructions),) if fields.instructions else ()
        state = json_text(fields.state)
        for question in self._questions:
            await asyncio.sleep(0)
            turn = ChatMessage("user", f"{state}\n\n{question.text}")
            prompt = await text.prepare_shared(Conversation((*system, turn), options))
            _refuse_open_reasoning(text, prompt.token_ids)
            self._prompts.append(EncodedPrompt(prompt.token_ids, prompt.token_ids))
            self._labels.append(label_token_ids(text, prompt.token_ids, question.labels))

    def reply(self, model: TextModel, readers: Sequence[ChatReader]) -> Reply:
        names = list(self.fields.questions)

        async def write(reads: Sequence[LabelRead], ends: Sequence[TextEvent]) -> JsonObject:
            answers = [question.answer(read) for question, read in zip(self._questions, reads, strict=True)]
            told = [{"label_mass": each.mass, "argmax_is_label": each.has_likeliest} for each in reads]
            counts = {
                "input_tokens": sum(end.prompt_tokens for end in ends),
                "output_tokens": sum(end.completion_tokens for end in ends),
            }
            return {
                **self.head(model, "decision", "structured_decision"),
                "answers": dict(zip(names, answers, strict=True)),
                "usage": counts,
                "diagnostics": dict(zip(names, told, strict=True)),
            }

        return LabelReply(self._labels, write)


def _refuse_open_reasoning(text: LlmText, prompt: Sequence[int]) -> None:
    """Raise INVALID where the answer to a prompt would begin with reasoning."""
    format = text.formats.reasoning
    if format is not None and format.is_open(text.tokenizer.decode([*prompt[-16:]], skip_special_tokens=False)):
        reason = "its chat template lets the answer begin with reasoning, in which no label can come"
        raise invalid("model", f"model '{text.name}' cannot decide: {reason}")


def label_token_ids(text: LlmText, prompt: Sequence[int], labels: Sequence[str]) -> list[int]:
    """Return the token that each label begins with, as the first one of an answer to a prompt. Raises INVALID for a
    tokenizer with which two labels begin alike, or one with the prompt's end."""
    tokenizer = text.tokenizer
    added = frozenset(tokenizer.added_token_ids.values())
    start = next((index for index in range(len(prompt), 0, -1) if prompt[index - 1] in added), 0)
    tail = [*prompt[start:]]
    before = tokenizer.decode(tail, skip_special_tokens=False)
    found: list[int] = []
    for label in labels:
        ids = tokenizer.encode(before + label, "model", add_special_tokens=False)
        if ids[: len(tail)] != tail or len(ids) == len(tail) or ids[len(tail)] in found:
            reason = f"the label {label!r} begins with no token of its own after its chat template's prompt"
            raise invalid("model", f"model '{text.name}' cannot decide: {reason}")
        found.append(ids[len(tail)])
    return found
