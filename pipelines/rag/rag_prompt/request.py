"""The settings of a rag_prompt model and the parameters of its requests."""

import hashlib
from dataclasses import dataclass

from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import SluiceError, invalid
from sluice.pipelines.llm.parse import MAX_SALT_CHARS
from sluice.pipelines.rag import owner_keys
from sluice.pipelines.rag.prompts.assembly import PromptStyle
from sluice.pipelines.rag.prompts.templates import TEMPLATES, TemplateName
from sluice.pipelines.rag.retrieval.search import MAX_TOP_K
from sluice.pipelines.text.text_tensors import decode_messages
from sluice.pipelines.text.tokenizer import ROLES
from sluice.pipelines.text.types import OWNER_KEY, ChatMessage
from sluice.serving.config.parameters import ParameterReader
from sluice.serving.request import InferRequest, Parameters

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
    for name, max_chars in ((SALT_PARAMETER, MAX_SALT_CHARS), (OWNER_KEY, owner_keys.MAX_CHARS)):
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
