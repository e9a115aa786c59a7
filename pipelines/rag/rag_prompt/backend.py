"""The backend `rag_prompt`: assembles a language model's messages from a question and retrieved chunks."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec
import orjson
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import invalid
from sluice.pipelines.rag.prompts.assembly import Prompt, PromptStyle, RetrievedPassage, assemble_prompt
from sluice.pipelines.rag.rag_prompt.language_model import LanguageModel, read_prompt_tokens
from sluice.pipelines.rag.rag_prompt.request import PromptSettings, RagPromptRequest, parse_request, parse_settings
from sluice.pipelines.text.citations import Source, decode_progress, decode_source, encode_source
from sluice.pipelines.text.text_tensors import build_text_tensor, encode_messages, read_text_rows
from sluice.serving.backend import Backend, BackendContext
from sluice.serving.config.completion import DeclaredTensor, complete_tensors
from sluice.serving.config.validation import complete_and_check
from sluice.serving.request import InferRequest
from sluice.serving.spec import ModelSource
from sluice.serving.task_model import MakeOutputs, TaskModel
from sluice.serving.tensors.tensor import Tensor

QUERY, CONTEXT, SOURCES, ENCODING = "query", "context", "sources", "encoding"
MESSAGES, DROPPED, SAMPLING_CONFIG, CACHE_SALT = "messages", "dropped", "sampling_config", "cache_salt"
_REGEX_SIGNS = re.compile(r"[\\.^$*+?{}\[\]|()]")
INPUTS = (
    DeclaredTensor(QUERY, "BYTES"),
    DeclaredTensor(CONTEXT, "BYTES", (-1,)),
    DeclaredTensor(SOURCES, "BYTES", (-1,), is_optional=True),
    DeclaredTensor(ENCODING, "BYTES", is_optional=True),
)
OUTPUTS = (
    DeclaredTensor(MESSAGES, "BYTES"),
    DeclaredTensor(SOURCES, "BYTES", (-1,)),
    DeclaredTensor(DROPPED, "BYTES", (-1,)),
    DeclaredTensor(SAMPLING_CONFIG, "BYTES"),
    DeclaredTensor(CACHE_SALT, "BYTES"),
)


@dataclass(frozen=True, slots=True)
class _Row:
    """One prompt to assemble. `no_answer` answers where nothing was retrieved."""

    question: str
    retrieved: tuple[RetrievedPassage, ...]
    no_answer: str


class RagPromptModel(TaskModel):
    """Assembles one prompt for each row of a request."""

    def __init__(self, config: ModelConfig, version: int, settings: PromptSettings, llm: LanguageModel) -> None:
        super().__init__(config, version)
        self._settings = settings
        self._llm = llm

    def _work(self, request: InferRequest) -> MakeOutputs:
        return partial(self._answer, self._rows(request), parse_request(request))

    def _rows(self, request: InferRequest) -> list[_Row]:
        questions = [row[0] for row in read_text_rows(request, QUERY, is_batched=self._is_batched)]
        texts = read_text_rows(request, CONTEXT, is_batched=self._is_batched)
        if SOURCES in request.inputs:
            sources = read_text_rows(request, SOURCES, is_batched=self._is_batched)
        else:
            sources = [[""] * len(row) for row in texts]
        encodings = [""] * len(texts)
        if ENCODING in request.inputs:
            encodings = [row[0] for row in read_text_rows(request, ENCODING, is_batched=self._is_batched)]
        return [
            _Row(question, _pair_passages(row_texts, row_sources), self._no_answer(encoding))
            for question, row_texts, row_sources, encoding in zip(questions, texts, sources, encodings, strict=True)
        ]

    def _no_answer(self, encoding: str) -> str:
        """Return the sentence of the settings, with the progress of encoding if there is any."""
        sentence = self._settings.style.no_answer
        try:
            progress = decode_progress(encoding.encode())
        except msgspec.MsgspecError as error:
            raise invalid(ENCODING, f"input '{ENCODING}' must be the retriever's: {error}") from None
        return sentence if progress is None else f"{sentence} {progress}"

    async def _answer(self, rows: Sequence[_Row], request: RagPromptRequest) -> list[Tensor]:
        tokens, budget = self._llm.budget(request.max_tokens)
        prompts = [
            await assemble_prompt(row.question, row.retrieved, request.history, self._style(row), budget, tokens)
            for row in rows
        ]
        columns: dict[str, list[list[bytes]]] = {
            MESSAGES: [[encode_messages(prompt.messages)] for prompt in prompts],
            SOURCES: [[*map(encode_source, prompt.kept)] for prompt in prompts],
            DROPPED: [[*map(encode_source, prompt.dropped)] for prompt in prompts],
            SAMPLING_CONFIG: [
                [self._sampling_config(prompt, request, row.no_answer)]
                for prompt, row in zip(prompts, rows, strict=True)
            ],
            CACHE_SALT: [[request.cache_salt.encode()]] * len(prompts),
        }
        return [build_text_tensor(name, column, is_batched=self._is_batched) for name, column in columns.items()]

    def _style(self, row: _Row) -> PromptStyle:
        """Return the style of the prompt. Guided decoding needs no room in it for a longer sentence."""
        style = self._settings.style
        return style if self._llm.can_be_guided else replace(style, no_answer=row.no_answer)

    def _sampling_config(self, prompt: Prompt, request: RagPromptRequest, no_answer: str) -> bytes:
        """Restrict the answer to `no_answer` if the prompt has no source, else to the answers of the template, if any.

        A client's own guide wins. A hosted model cannot be restricted; its instructions ask for the sentence.
        """
        answers = prompt.answers if prompt.kept else (no_answer,)
        if not answers or request.has_guide or not self._llm.can_be_guided:
            return b""
        pattern = "|".join(_REGEX_SIGNS.sub(r"\\\g<0>", answer) for answer in answers)
        return orjson.dumps({"guided_decoding_guide_type": "regex", "guided_decoding_guide": pattern})


def _pair_passages(texts: Sequence[str], sources: Sequence[str]) -> tuple[RetrievedPassage, ...]:
    """Pair the texts of a row with their sources, without padding. A text without a source becomes its own source."""
    if len(sources) != len(texts):
        message = f"inputs '{CONTEXT}' and '{SOURCES}' must have as many elements, got {len(texts)} and {len(sources)}"
        raise invalid(SOURCES, message)
    return tuple(
        RetrievedPassage(_parse_source(sources[index], index, text), text)
        for index, text in enumerate(texts)
        if text.strip()
    )


def _parse_source(element: str, index: int, text: str) -> Source:
    if not element:
        return Source(document="", start=0, end=len(text), score=0.0, text=text)
    try:
        return decode_source(element.encode())
    except msgspec.MsgspecError as error:
        message = f"input '{SOURCES}' must hold sources as JSON; the one at index {index} is none: {error}"
        raise invalid(SOURCES, message) from None


class RagPromptBackend(Backend):
    """Loads models that assemble prompts. Their language model may load later: each request looks it up."""

    name = "rag_prompt"

    async def complete(self, source: ModelSource, context: BackendContext) -> ModelConfig:
        return complete_tensors(source.config, INPUTS, OUTPUTS)

    def check(self, source: ModelSource) -> None:
        complete_and_check(complete_tensors(source.config, INPUTS, OUTPUTS))
        read_prompt_tokens(parse_settings(source.config), source.folder)

    async def load(self, source: ModelSource, context: BackendContext) -> RagPromptModel:
        settings = parse_settings(source.config)
        llm = await LanguageModel.load(context.models, settings, source.folder)
        return RagPromptModel(source.config, source.version, settings, llm)
