"""The backend `rag_prompt`: a question and retrieved chunks in, a language model's messages out."""

import asyncio
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
import orjson
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import ErrorCode, SluiceError, invalid, named
from sluice.pipelines.llm.model import llm_text_of
from sluice.pipelines.llm.parse import MAX_SALT_CHARS
from sluice.pipelines.llm.text import LlmText
from sluice.pipelines.rag.rag_prompt.assembly import (
    EstimatedTokens,
    Prompt,
    PromptStyle,
    PromptTokens,
    RetrievedPassage,
    TokenBudget,
    TokenizerTokens,
    assemble_prompt,
)
from sluice.pipelines.rag.rag_prompt.templates import TEMPLATES, TemplateName
from sluice.pipelines.rag.search import MAX_TOP_K
from sluice.pipelines.rag.types import MAX_KEY_CHARS
from sluice.pipelines.text.citations import Source, decode_progress, decode_source, encode_source
from sluice.pipelines.text.tensor_model import build_text_tensor, decode_messages, encode_messages, read_text_rows
from sluice.pipelines.text.tokenizer import ROLES, Tokenizer
from sluice.pipelines.text.types import OWNER_KEY, ChatMessage
from sluice.serving.backend import Backend, BackendContext, ModelLookup
from sluice.serving.config.completion import DeclaredTensor, complete_tensors
from sluice.serving.config.parameters import ParameterReader
from sluice.serving.config.validation import complete_and_check
from sluice.serving.model import Model
from sluice.serving.request import InferRequest, Parameters
from sluice.serving.spec import ModelSource
from sluice.serving.task_model import MakeOutputs, TaskModel
from sluice.serving.tensors.tensor import Tensor

PARAMETERS = (
    *("llm", "template", "instructions", "no_answer", "max_sources"),
    *("max_tokens", "max_context_tokens", "chars_per_token", "tokenizer"),
)
"""Parameters that config.pbtxt may set."""
HISTORY_PARAMETER = "history"
SALT_PARAMETER = "cache_salt"
DEFAULT_LLM = "rill"
DEFAULT_NO_ANSWER = "The sources do not answer this question."
DEFAULT_MAX_TOKENS = 256
_CHARS_PER_TOKEN = 3.0
"""English has about 4, code and other languages fewer. Too short a prompt loses a source, too long a one fails."""
_MAX_TOKENS = 1 << 24
_MAX_INSTRUCTIONS = 65_536
_MAX_HISTORY_CHARS = 1 << 20
_MAX_MESSAGES = 1000
_MAX_TOKENS_NAMES = ("max_tokens", "request_output_len")
"""Names by which language models take the length of the answer."""
_GUIDES = ("guided_decoding_guide_type", "guided_decoding_guide")
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
class PromptSettings:
    """Settings of a rag_prompt model.

    `max_context_tokens` 0 stands for the language model's own context; `tokenizer` "" for its own tokenizer, or an
    estimate if the server does not have it.
    """

    llm: str
    style: PromptStyle
    max_tokens: int
    max_context_tokens: int
    chars_per_token: float
    tokenizer: str


@dataclass(frozen=True, slots=True)
class RagPromptRequest:
    """The parameters of one request. `max_tokens` None: not given. `has_guide`: the answer must match a grammar."""

    history: tuple[ChatMessage, ...]
    max_tokens: int | None
    has_guide: bool
    cache_salt: str


def parse_settings(config: ModelConfig) -> PromptSettings:
    """Parse the parameters of a model's configuration. Raises SluiceError INVALID, which names the parameter."""
    given = ParameterReader.of_config(config, PARAMETERS)
    style = PromptStyle(
        template=TEMPLATES[given.choice("template", TemplateName.CITED)],
        instructions=given.text("instructions", "", _MAX_INSTRUCTIONS) or None,
        no_answer=given.text("no_answer", DEFAULT_NO_ANSWER),
        max_sources=given.integer("max_sources", MAX_TOP_K, 1, MAX_TOP_K),
    )
    return PromptSettings(
        llm=given.text("llm", DEFAULT_LLM),
        style=style,
        max_tokens=given.integer("max_tokens", DEFAULT_MAX_TOKENS, 1, _MAX_TOKENS),
        max_context_tokens=given.integer("max_context_tokens", 0, 0, _MAX_TOKENS),
        chars_per_token=given.number("chars_per_token", _CHARS_PER_TOKEN, 0.5, 20),
        tokenizer=given.text("tokenizer", ""),
    )


def parse_request(request: InferRequest) -> RagPromptRequest:
    """Parse a request's parameters; those of other ensemble steps are ignored. Raises INVALID, naming the parameter."""
    parameters = request.parameters
    given = ParameterReader(parameters)
    for name, max_chars in ((SALT_PARAMETER, MAX_SALT_CHARS), (OWNER_KEY, MAX_KEY_CHARS)):
        given.text(name, "", max_chars)
    size = next((name for name in _MAX_TOKENS_NAMES if name in parameters), None)
    return RagPromptRequest(
        history=parse_history(given.text(HISTORY_PARAMETER, "", _MAX_HISTORY_CHARS)),
        max_tokens=None if size is None else given.integer(size, 1, 1, _MAX_TOKENS),
        has_guide=any(parameters.get(name) for name in _GUIDES),
        cache_salt=choose_salt(request.tenant, parameters),
    )


def parse_history(text: str) -> tuple[ChatMessage, ...]:
    """Parse earlier turns from a JSON array of {role, content}; "" has none. Raises INVALID (param "history")."""
    if not text:
        return ()
    messages = decode_messages(text, HISTORY_PARAMETER)
    if len(messages) > _MAX_MESSAGES:
        raise _bad_history(f"at most {_MAX_MESSAGES} messages, got {len(messages)}")
    for index, message in enumerate(messages):
        if message.role not in ROLES:
            raise _bad_history(f"messages of the roles {', '.join(ROLES)}, got {message.role[:40]!r} at index {index}")
    return messages


def _bad_history(expected: str) -> SluiceError:
    return invalid(HISTORY_PARAMETER, f"parameter '{HISTORY_PARAMETER}' must be {expected}")


def derive_salt(tenant: str, collection_key: str) -> str:
    """Return the salt of the language model's prefix cache for a tenant and a collection key; "" if both are empty.

    Prompts are shared only within one salt: else a tenant could learn from the time to an answer which documents
    another tenant's prompts contain. The salt reveals neither tenant nor key.
    """
    if not tenant and not collection_key:
        return ""
    digest = hashlib.sha256(b"sluice cache salt\0")
    for part in (tenant, collection_key):
        digest.update(hashlib.sha256(part.encode()).digest())
    return digest.hexdigest()


def choose_salt(tenant: str, parameters: Parameters) -> str:
    """Return the request's own salt, else the derived one. The types of the parameters are already checked."""
    given = parameters.get(SALT_PARAMETER, "")
    return str(given) or derive_salt(tenant, str(parameters.get(OWNER_KEY, "")))


def read_prompt_tokens(settings: PromptSettings, folder: Path) -> PromptTokens | None:
    """Read the tokenizer of the settings, if any, relative to `folder`, on a thread. Raises UNAVAILABLE if it cannot be
    read."""
    return TokenizerTokens(Tokenizer.load(folder / settings.tokenizer)) if settings.tokenizer else None


class LanguageModel:
    """Looks the model up for each prompt, so that a reload takes effect. The settings describe a hosted model."""

    def __init__(self, models: ModelLookup, settings: PromptSettings, tokens: PromptTokens | None) -> None:
        """`tokens`, if given, counts in place of the model's own tokenizer."""
        self._models = models
        self._settings = settings
        self._tokens = tokens
        self._latest: tuple[Tokenizer, PromptTokens] | None = None
        """The tokenizer that the model had last, and the counter made of it."""

    @classmethod
    async def load(cls, models: ModelLookup, settings: PromptSettings, folder: Path) -> "LanguageModel":
        """Load the tokenizer of the settings, if any. Raises as `read_prompt_tokens`."""
        return cls(models, settings, await asyncio.to_thread(read_prompt_tokens, settings, folder))

    def budget(self, max_tokens: int | None) -> tuple[PromptTokens, TokenBudget]:
        """Return the model's token counter, and the budget of a prompt whose answer has `max_tokens` (None: default).

        Raises SluiceError UNAVAILABLE, which names the model, if it does not serve, INVALID for too long an answer.
        """
        model = self._find()
        text, max_context = llm_text_of(model), self._max_context(model)
        default = min(self._settings.max_tokens, max_context // 2)
        for_answer = default if max_tokens is None else max_tokens
        if for_answer >= max_context:
            longest = f"must be below the {max_context} tokens of model '{self._settings.llm}', got {for_answer}"
            raise invalid("max_tokens", f"parameter '{named('max_tokens')}' {longest}")
        return self._counter(text), TokenBudget(self._settings.llm, max_context, for_answer)

    @property
    def can_be_guided(self) -> bool:
        """Whether guided decoding can restrict the model's answer."""
        return llm_text_of(self._find()) is not None

    def _find(self) -> Model:
        try:
            return self._models.find(self._settings.llm)
        except SluiceError as error:
            message = f"its language model '{self._settings.llm}' (parameter llm) does not serve: {error.message}"
            raise SluiceError(ErrorCode.UNAVAILABLE, message) from error

    def _max_context(self, model: Model) -> int:
        text, configured = llm_text_of(model), self._settings.max_context_tokens
        if text is None:
            configured = configured or _configured_context(model)
            if not configured:
                message = f"model '{self._settings.llm}' does not tell its context: set its parameter context_tokens"
                raise SluiceError(ErrorCode.UNAVAILABLE, message)
            return configured
        info = text.info
        # The last token is never fed back, so it needs no slot.
        capacity = min(info.max_model_len, info.num_blocks * info.block_size + 1)
        return min(capacity, configured) if configured else capacity

    def _counter(self, text: LlmText | None) -> PromptTokens:
        if self._tokens is not None:
            return self._tokens
        if text is None:
            return EstimatedTokens(self._settings.chars_per_token)
        if self._latest is None or self._latest[0] is not text.tokenizer:
            self._latest = text.tokenizer, TokenizerTokens(text.tokenizer)
        return self._latest[1]


def _configured_context(model: Model) -> int:
    """Return the context that a hosted model's configuration declares, 0 if none."""
    text = model.config.parameters["context_tokens"].string_value if "context_tokens" in model.config.parameters else ""
    return int(text) if text.isascii() and text.isdigit() else 0


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
    is_stateless = True
    finds_models = True

    async def complete(self, source: ModelSource, context: BackendContext) -> ModelConfig:
        return complete_tensors(source.config, INPUTS, OUTPUTS)

    def check(self, source: ModelSource) -> None:
        complete_and_check(complete_tensors(source.config, INPUTS, OUTPUTS))
        read_prompt_tokens(parse_settings(source.config), source.folder)

    async def load(self, source: ModelSource, context: BackendContext) -> RagPromptModel:
        settings = parse_settings(source.config)
        llm = await LanguageModel.load(context.models, settings, source.folder)
        return RagPromptModel(source.config, source.version, settings, llm)
