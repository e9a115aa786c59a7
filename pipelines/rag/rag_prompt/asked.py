"""What the configuration of a rag_prompt model and a request say of a prompt."""

from dataclasses import dataclass

from tritonclient.grpc.model_config_pb2 import ModelConfig

from pipelines.llm.asked import MAX_SALT_CHARS
from pipelines.rag import keys
from pipelines.rag.prompts import history, salt
from pipelines.rag.prompts.assembly import PromptStyle
from pipelines.rag.prompts.templates import TEMPLATES, TemplateName
from pipelines.rag.retrieval.search import MAX_TOP_K
from pipelines.text.types import ChatMessage
from serving.config.parameters import ParameterReader
from serving.request import InferRequest

PARAMETERS = (
    "llm",
    "template",
    "instructions",
    "no_answer",
    "max_sources",
    "max_tokens",
    "max_context_tokens",
    "chars_per_token",
    "tokenizer",
)
"""What config.pbtxt may set."""
DEFAULT_LLM = "rill"
DEFAULT_NO_ANSWER = "The sources do not answer this question."
DEFAULT_MAX_TOKENS = 256
_CHARS_PER_TOKEN = 3.0
"""English has about 4, code and other languages fewer: too short a prompt loses a source, too long a one fails."""
_MAX_TOKENS = 1 << 24
_MAX_INSTRUCTIONS = 65_536
_MAX_HISTORY_CHARS = 1 << 20
_ANSWER_SIZES = ("max_tokens", "request_output_len")
"""The names that language models take it by."""
_GUIDES = ("guided_decoding_guide_type", "guided_decoding_guide")


@dataclass(frozen=True, slots=True)
class PromptSettings:
    """`max_context_tokens` 0 is what the model itself says; `tokenizer` "" is the model's own, or an estimate."""

    llm: str
    style: PromptStyle
    max_tokens: int
    max_context_tokens: int
    chars_per_token: float
    tokenizer: str


@dataclass(frozen=True, slots=True)
class Asked:
    """What one request asks for. `max_tokens` None: it does not say. `has_guide`: its answer must match a grammar."""

    history: tuple[ChatMessage, ...]
    max_tokens: int | None
    has_guide: bool
    cache_salt: str


def settings_of(config: ModelConfig) -> PromptSettings:
    """Raises SluiceError INVALID, naming the parameter."""
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


def asked_of(request: InferRequest) -> Asked:
    """Raises SluiceError INVALID, naming the parameter. Those that are another step's are left alone."""
    parameters = request.parameters
    given = ParameterReader(parameters)
    for name, most_chars in ((salt.PARAMETER, MAX_SALT_CHARS), (keys.PARAMETER, keys.MAX_CHARS)):
        given.text(name, "", most_chars)
    size = next((name for name in _ANSWER_SIZES if name in parameters), None)
    return Asked(
        history=history.parse_history(given.text(history.PARAMETER, "", _MAX_HISTORY_CHARS)),
        max_tokens=None if size is None else given.integer(size, 1, 1, _MAX_TOKENS),
        has_guide=any(parameters.get(name) for name in _GUIDES),
        cache_salt=salt.salt_of(request.tenant, parameters),
    )
