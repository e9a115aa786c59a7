"""The clients' questions: every protocol, whole and streamed, with a few questions each that come again and again."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sluice.bundled import BUNDLED_MODEL
from sluice.load.apis import Api, make_api
from sluice.load.chaos.answers import WholeApi
from sluice.load.chaos.fleet import ECHO, ENCODER, PIPELINE
from sluice.load.config import ApiKind, TokenRange, Workload
from sluice.load.workload import ApproximateWords

NUM_QUESTIONS = 6
_LENGTHS = (4, 16, 24, 48, 96, 160)
_SEED_OF_PROMPTS = 7
_PROMPT_WORDS = TokenRange(4, 60)


@dataclass(frozen=True, slots=True)
class QuestionKind:
    """A way to ask: an API, of a model, for a whole answer or a stream."""

    api: ApiKind
    model: str = BUNDLED_MODEL
    is_streamed: bool = True
    weight: float = 1.0
    fields: tuple[tuple[str, Any], ...] = ()
    """Further fields of the body."""
    ends_by_itself: bool = False
    """Whether the answer may be shorter than asked: not all protocols can ask for one that ignores the model's end."""
    note: str = ""

    @property
    def name(self) -> str:
        parts = (str(self.api), self.note, "" if self.is_streamed else "whole")
        return " ".join(part for part in parts if part)

    @property
    def is_grpc(self) -> bool:
        return self.api in (ApiKind.GRPC_INFER, ApiKind.GRPC_STREAM)

    @property
    def is_generated(self) -> bool:
        """Return whether a language model answers."""
        return self.model in (BUNDLED_MODEL, PIPELINE)

    def make_api(self) -> Api | None:
        """Return a new instance of its API, None for gRPC, whose callers have their own."""
        if self.is_grpc:
            return None
        is_whole = not self.is_streamed and self.api not in _WHOLE_ONLY
        return WholeApi(self.api) if is_whole else make_api(self.api)

    def workload(self) -> Workload:
        return Workload(prompt_tokens=_PROMPT_WORDS, ignore_eos=not self.ends_by_itself, extra_body=dict(self.fields))


_WHOLE_ONLY = {ApiKind.GENERATE, ApiKind.EMBEDDINGS, ApiKind.INFER, ApiKind.INFER_BINARY, ApiKind.GRPC_INFER}
_INFERS = (ApiKind.INFER, ApiKind.INFER_BINARY, ApiKind.GRPC_INFER)
_STREAMED = [
    QuestionKind(ApiKind.CHAT, weight=2.0),
    QuestionKind(ApiKind.COMPLETIONS, weight=2.0),
    QuestionKind(ApiKind.CHAT, fields=(("temperature", 1.0), ("seed", 5)), note="sampled"),
    QuestionKind(ApiKind.RESPONSES),
    QuestionKind(ApiKind.MESSAGES, ends_by_itself=True),
    QuestionKind(ApiKind.OLLAMA_CHAT, ends_by_itself=True),
    QuestionKind(ApiKind.GENERATE_STREAM),
    QuestionKind(ApiKind.GRPC_STREAM),
    QuestionKind(ApiKind.CHAT, PIPELINE, ends_by_itself=True, note="rag", weight=0.5),
]
_KEPT = (("store", True),)
"""Responses that are kept have the disk written."""
_WHOLE = [
    QuestionKind(ApiKind.CHAT, is_streamed=False),
    QuestionKind(ApiKind.COMPLETIONS, is_streamed=False),
    QuestionKind(ApiKind.RESPONSES, is_streamed=False, fields=_KEPT),
    QuestionKind(ApiKind.MESSAGES, is_streamed=False, ends_by_itself=True),
    QuestionKind(ApiKind.OLLAMA_CHAT, is_streamed=False, ends_by_itself=True),
    QuestionKind(ApiKind.GENERATE, is_streamed=False),
    QuestionKind(ApiKind.EMBEDDINGS, ENCODER, is_streamed=False),
    QuestionKind(ApiKind.INFER, ECHO, is_streamed=False),
    QuestionKind(ApiKind.INFER_BINARY, ECHO, is_streamed=False),
    QuestionKind(ApiKind.GRPC_INFER, ECHO, is_streamed=False),
]
KINDS = (*_STREAMED, *_WHOLE)


@dataclass(frozen=True, slots=True)
class Question:
    """A request that is sent many times, and has one answer."""

    kind: QuestionKind
    number: int
    prompt: str
    max_tokens: int

    @property
    def answer_key(self) -> tuple[object, ...]:
        """Return the key that decides the text: whole and streamed answers of one API have the same."""
        api = ApiKind.GENERATE if self.kind.api in _OF_TRITON else self.kind.api
        return (api, self.kind.model, self.kind.note, self.number)


_OF_TRITON = {ApiKind.GENERATE, ApiKind.GENERATE_STREAM, ApiKind.GRPC_STREAM}
"""APIs that take the prompt as it is and give the text as it is."""


LIGHT_KINDS = tuple(each for each in _WHOLE if each.api in (ApiKind.EMBEDDINGS, *_INFERS, ApiKind.COMPLETIONS))
"""Kinds whose first question costs little."""


def light_questions(questions: Sequence[Question]) -> list[Question]:
    """Return the questions that cost little: an answer of a classic model, an embedding, a few tokens."""
    return [each for each in questions if each.number == 0 and each.kind in LIGHT_KINDS]


def make_questions() -> list[Question]:
    """Return all questions: each kind asks each prompt."""
    words = ApproximateWords()
    questions = []
    for number in range(NUM_QUESTIONS):
        rng = np.random.default_rng((_SEED_OF_PROMPTS, number))
        prompt = words.make(rng, int(rng.integers(_PROMPT_WORDS.low, _PROMPT_WORDS.high)))
        questions += [Question(kind, number, prompt, _LENGTHS[number]) for kind in KINDS]
    return questions
