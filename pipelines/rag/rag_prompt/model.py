"""Prompts as a model: a question and what was retrieved in, the language model's messages out."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import orjson
from tritonclient.grpc.model_config_pb2 import ModelConfig

from pipelines.rag.prompts.assembly import Prompt, Retrieved, assemble
from pipelines.rag.rag_prompt.asked import Asked, PromptSettings, asked_of
from pipelines.rag.rag_prompt.language_model import LanguageModel
from pipelines.text.messages import encode_messages
from pipelines.text.sources import Source, decoded, encoded
from pipelines.text.text_rows import text_rows, text_tensor
from serving.request import InferRequest
from serving.task_model import MakeOutputs, TaskModel
from serving.tensors.tensor import Tensor
from sluice.errors import invalid

QUERY, CONTEXT, SOURCES = "query", "context", "sources"
MESSAGES, DROPPED, SAMPLING_CONFIG, CACHE_SALT = "messages", "dropped", "sampling_config", "cache_salt"
_REGEX_SIGNS = re.compile(r"[\\.^$*+?{}\[\]|()]")


@dataclass(frozen=True, slots=True)
class _Row:
    question: str
    retrieved: tuple[Retrieved, ...]


class RagPromptModel(TaskModel):
    """Assembles one prompt for each row."""

    def __init__(self, config: ModelConfig, version: int, settings: PromptSettings, llm: LanguageModel) -> None:
        super().__init__(config, version)
        self._settings = settings
        self._llm = llm

    def _work(self, request: InferRequest) -> MakeOutputs:
        return partial(self._answer, self._rows(request), asked_of(request))

    def _rows(self, request: InferRequest) -> list[_Row]:
        questions = [row[0] for row in text_rows(request, QUERY, is_batched=self._is_batched)]
        texts = text_rows(request, CONTEXT, is_batched=self._is_batched)
        given = SOURCES in request.inputs
        sources = text_rows(request, SOURCES, is_batched=self._is_batched) if given else [[] for _ in texts]
        return [
            _Row(question, _retrieved(row_texts, row_sources if given else [""] * len(row_texts)))
            for question, row_texts, row_sources in zip(questions, texts, sources, strict=True)
        ]

    async def _answer(self, rows: Sequence[_Row], asked: Asked) -> list[Tensor]:
        tokens, budget = self._llm.counts(asked.max_tokens)
        prompts = [
            await assemble(row.question, row.retrieved, asked.history, self._settings.style, budget, tokens)
            for row in rows
        ]
        columns: dict[str, list[list[bytes]]] = {
            MESSAGES: [[encode_messages(prompt.messages)] for prompt in prompts],
            SOURCES: [[*map(encoded, prompt.kept)] for prompt in prompts],
            DROPPED: [[*map(encoded, prompt.dropped)] for prompt in prompts],
            SAMPLING_CONFIG: [[self._sampling_config(prompt, asked)] for prompt in prompts],
            CACHE_SALT: [[asked.cache_salt.encode()]] * len(prompts),
        }
        return [text_tensor(name, column, is_batched=self._is_batched) for name, column in columns.items()]

    def _sampling_config(self, prompt: Prompt, asked: Asked) -> bytes:
        """Where there is nothing to answer from, the language model can say only that. A client's own grammar wins.

        A hosted model cannot be held to a sentence: its instructions ask for it.
        """
        if prompt.kept or asked.has_guide or not self._llm.can_be_guided:
            return b""
        sentence = _REGEX_SIGNS.sub(r"\\\g<0>", self._settings.style.no_answer)
        return orjson.dumps({"guided_decoding_guide_type": "regex", "guided_decoding_guide": sentence})


def _retrieved(texts: Sequence[str], sources: Sequence[str]) -> tuple[Retrieved, ...]:
    """What is left of a row without what fills it up. A text without a source is one of its own."""
    if len(sources) != len(texts):
        message = f"inputs '{CONTEXT}' and '{SOURCES}' must have as many elements, got {len(texts)} and {len(sources)}"
        raise invalid(SOURCES, message)
    return tuple(
        Retrieved(_source(sources[index], index, text), text) for index, text in enumerate(texts) if text.strip()
    )


def _source(element: str, index: int, text: str) -> Source:
    if not element:
        return Source(document="", start=0, end=len(text), score=0.0, text=text)
    try:
        return decoded(element.encode())
    except msgspec.MsgspecError as error:
        message = f"input '{SOURCES}' must hold sources as JSON; the one at index {index} is none: {error}"
        raise invalid(SOURCES, message) from None
