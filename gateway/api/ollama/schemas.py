"""Field names and types of requests to Ollama's routes. As for OpenAI's, everything is strict."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from sluice.engine.sampling_fields import MAX_LOGPROBS
from sluice.gateway.api.fields import MAX_TOOLS, SentArguments
from sluice.gateway.api.openai.encoders import Texts
from sluice.gateway.api.openai.schemas import MAX_MODEL_CHARS, SomeTokenIds
from sluice.gateway.api.openai.turns import FunctionTool
from sluice.gateway.front.http.parsing import (
    MAX_LIST,
    MAX_MESSAGES,
    RequestObject,
    StopStrings,
    text_or_list,
    text_or_object,
    union_error,
)

_ACCEPTED = "Accepted and not used."
_ALWAYS_LOADED = "Accepted and not used: models stay loaded. 0 without a prompt is answered as an unload."
Format = Annotated[
    Annotated[Literal["", "json"], Tag("<text>")] | Annotated[dict[str, Any], Tag("<object>")],
    Discriminator(text_or_object, **union_error("'json' or a JSON schema")),
]


class _LoadingOptions(RequestObject):
    """Options of how Ollama loads a model, and those that refine an option that is refused: accepted and not used."""

    num_ctx: Any = None
    num_batch: Any = None
    num_gpu: Any = None
    main_gpu: Any = None
    num_thread: Any = None
    numa: Any = None
    low_vram: Any = None
    f16_kv: Any = None
    use_mmap: Any = None
    use_mlock: Any = None
    logits_all: Any = None
    vocab_only: Any = None
    embedding_only: Any = None
    num_keep: Any = None
    mirostat_tau: Any = None
    mirostat_eta: Any = None


class Options(_LoadingOptions):
    """How tokens are chosen. The model's own values hold for those that are absent, not Ollama's."""

    num_predict: int | None = Field(
        None, description="Most tokens to generate, cut to what the context has room for; 0 or less: all of that."
    )
    temperature: float | None = None
    top_k: int | None = Field(None, ge=-1)
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    seed: int | None = Field(None, ge=-1)
    repeat_penalty: float | None = Field(None, gt=0, description="Over the whole text.")
    repeat_last_n: int | None = Field(
        None, description="0 switches the penalties off; any other length of their window is that of the whole text."
    )
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: StopStrings | None = None


class ModelRequest(RequestObject):
    """The fields of every route that runs a model."""

    model: str = Field(max_length=MAX_MODEL_CHARS, description="A model of the repository; `:latest` is left out.")
    options: Options | None = None
    keep_alive: Any = Field(None, description=_ALWAYS_LOADED)


class AnswerRequest(ModelRequest):
    """The fields of both routes that generate text."""

    stream: bool | None = Field(None, description="true where absent.")
    format: Format | None = None
    think: bool | Literal["low", "medium", "high"] | None = Field(
        None, description="Whether the model reasons before its answer, and how much. Refused where it cannot."
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="Needs logprobs.")


class OllamaFunction(RequestObject):
    """The function that a model called, and its arguments."""

    name: str
    arguments: SentArguments | None = None
    index: int | None = Field(None, description=_ACCEPTED)


class OllamaCall(RequestObject):
    """A call that the model made in an earlier turn."""

    function: OllamaFunction
    id: str | None = None
    type: str | None = Field(None, description=_ACCEPTED)


class OllamaMessage(RequestObject):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = Field(None, description="The reasoning before an assistant's answer.")
    tool_calls: list[OllamaCall] | None = Field(None, fail_fast=True)
    tool_name: str | None = Field(None, description="The function whose result a tool's turn is.")
    tool_call_id: str | None = Field(None, description="The call whose result it is: by default the first without one.")
    images: list[str] | None = Field(None, max_length=MAX_LIST, fail_fast=True, description="In base64.")


class OllamaTool(FunctionTool):
    """A tool, which is a function where it does not say."""

    type: Literal["function"] = "function"


class OllamaChatRequest(AnswerRequest):
    """`POST /api/chat`."""

    example = '{"model": "rill", "messages": [{"role": "user", "content": "Hello!"}], "options": {"num_predict": 50}}'
    messages: list[OllamaMessage] | None = Field(
        None, max_length=MAX_MESSAGES, fail_fast=True, description="None: whether the model is loaded."
    )
    tools: list[OllamaTool] | None = Field(None, max_length=MAX_TOOLS, fail_fast=True)


class OllamaGenerateRequest(AnswerRequest):
    """`POST /api/generate`."""

    example = '{"model": "rill", "prompt": "What is a block table?", "options": {"num_predict": 50}}'
    prompt: str | None = Field(None, description="Absent or empty: whether the model is loaded.")
    suffix: str | None = Field(
        None,
        description="The text after the answer, for models with fill-in-the-middle tokens; as if raw.",
    )
    system: str | None = None
    raw: bool | None = Field(None, description="Whether the prompt is used as it is, without the chat template.")
    context: SomeTokenIds | None = Field(
        None, description="That of an earlier answer, which this one continues; empty for none."
    )
    images: list[str] | None = Field(None, max_length=MAX_LIST, fail_fast=True, description="In base64.")


class EmbedRequest(ModelRequest):
    """`POST /api/embed`."""

    example = '{"model": "sentence_encoder", "input": ["one text", "another"]}'
    input: (
        Annotated[
            Annotated[str, Tag("<text>")] | Annotated[Texts, Tag("<list>")],
            Discriminator(text_or_list, **union_error("a string or an array of strings")),
        ]
        | None
    ) = Field(None, description="Without a text, an empty one and an empty array have no vectors.")
    truncate: bool | None = Field(None, description="Whether to cut long texts; true where absent.")
    dimensions: int | None = Field(None, ge=1)


class OldEmbedRequest(ModelRequest):
    """`POST /api/embeddings`, which `/api/embed` replaced."""

    example = '{"model": "sentence_encoder", "prompt": "one text"}'
    prompt: str | None = Field(None, description="Absent or empty: no vector.")


class ShowRequest(RequestObject):
    """`POST /api/show`."""

    example = '{"model": "rill"}'
    model: str | None = Field(None, max_length=MAX_MODEL_CHARS)
    name: str | None = Field(None, max_length=MAX_MODEL_CHARS, description="The older name of model.")
    verbose: bool | None = Field(None, description=_ACCEPTED)
