"""Text models by name, as `model` or `model:adapter` for one of its LoRA adapters, and their loading from a folder."""

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

import sluice.pipelines.text.tensor_model  # noqa: F401 - registers the text model of models that are not LLMs
from sluice.engine.client.stream import Consumer
from sluice.engine.fleet.client import Engine
from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.chat.registry import ChatFormats, find_formats
from sluice.pipelines.llm.model import llm_text_of
from sluice.pipelines.llm.services import DEFAULT_CHAT, ChatSettings
from sluice.pipelines.llm.text import LlmText, TextOrigin
from sluice.pipelines.text.model import TextModel, fingerprint_of, text_model_of
from sluice.pipelines.text.sampling import SamplingDefaults, load_sampling_defaults
from sluice.pipelines.text.stream import OpenRecord, no_record
from sluice.pipelines.text.tokenizer import Tokenizer
from sluice.pipelines.text.types import AS_IT_IS, ChatReader, Conversation, Prompt, PromptForm, TextEvent, TextRequest
from sluice.serving.model import Model

SEPARATOR = ":"
"""Stands between the names of a model and of its adapter."""
T = TypeVar("T", bound=LlmText)


def split_name(name: str, models: Collection[str]) -> tuple[str, str]:
    """Return the names of model and adapter, "" for none. Raises NOT_FOUND where `name` means none of the `models`."""
    if name in models:
        return name, ""
    base = max((each for each in models if name.startswith(each + SEPARATOR)), key=len, default=None)
    if base is None or name == base + SEPARATOR:
        available = ", ".join(dict.fromkeys(models)) or "none"
        raise SluiceError(ErrorCode.NOT_FOUND, f"model {name!r} not found; available: {available}", param="model")
    return base, name[len(base) + 1 :]


def find_owner(models: Iterable[Model], adapter: str) -> str | None:
    """Return the name of the only model with that LoRA adapter, None where there are none or several."""
    names = {model.name for model in models if (text := llm_text_of(model)) and adapter in text.info.adapters}
    return names.pop() if len(names) == 1 else None


def choose_text_model(model: Model, adapter: str) -> TextModel:
    """Return the text model of `model`, which must have one, or that of its adapter where `adapter` is not empty.
    Raises NOT_FOUND for an adapter that the model does not have."""
    if not adapter:
        found = text_model_of(model)
        assert found is not None
        return found
    text = llm_text_of(model)
    available = text.info.adapters if text is not None else ()
    if text is None or adapter not in available:
        message = f"model {model.name!r} has no LoRA adapter {adapter!r}; available: {', '.join(available) or 'none'}"
        raise SluiceError(ErrorCode.NOT_FOUND, message, param="model")
    return AdapterText(text, adapter)


def list_text_models(models: Iterable[Model]) -> Iterator[TextModel]:
    """Yield each model's text model, of the last version in `models`, each followed by its adapters."""
    latest = {model.name: (model, text) for model in models if (text := text_model_of(model)) is not None}
    for model, text in latest.values():
        yield text
        llm = llm_text_of(model)
        if llm is not None:
            yield from (AdapterText(llm, adapter) for adapter in llm.info.adapters)


def model_and_adapter(text: TextModel) -> tuple[str, str]:
    """Return the names of a text model's model and of its adapter, "" for none."""
    return (text.name, "") if text.parent is None else (text.parent, text.name.removeprefix(text.parent + SEPARATOR))


class AdapterText:
    """A language model with one of its LoRA adapters. The model's engine runs both."""

    takes_parameters = False

    def __init__(self, base: LlmText, adapter: str) -> None:
        self.base = base
        self.adapter = adapter
        self.name = f"{base.name}{SEPARATOR}{adapter}"
        self.parent = base.name
        self.root = base.engine.adapters.get(adapter, adapter)
        """The adapter's folder; its name where the engine found the adapter itself."""
        self.version = base.version
        self.created = base.created
        self.max_model_len = base.max_model_len
        self.max_beam_width = base.max_beam_width

    @property
    def fingerprint(self) -> str:
        return fingerprint_of(self.base.fingerprint, self.adapter)

    @property
    def template_names(self) -> frozenset[str]:
        return self.base.template_names

    @property
    def max_images(self) -> int:
        return self.base.max_images

    @property
    def failure(self) -> str | None:
        return self.base.failure

    def adapt(self, conversation: Conversation) -> Conversation:
        return self.base.adapt(conversation)

    async def prepare_shared(self, prompt: Prompt, form: PromptForm = AS_IT_IS) -> Prompt:
        return await self.base.prepare_shared(prompt, form)

    def chat_reader(self, request: TextRequest) -> ChatReader | None:
        return self.base.chat_reader(request)

    async def generate(self, request: TextRequest, consumer: Consumer[TextEvent]) -> None:
        await self.base.generate(msgspec.structs.replace(request, adapter=self.adapter), consumer)


class TextFiles(NamedTuple):
    """The parts of a text model that come from the files of its checkpoint."""

    tokenizer: Tokenizer
    defaults: SamplingDefaults
    formats: ChatFormats


def read_text_files(path: Path, tokenizer_path: Path | None = None, chat: ChatSettings = DEFAULT_CHAT) -> TextFiles:
    """Read the files of a checkpoint that have no weights. Raises as `load_text`."""
    tokenizer = Tokenizer.load(tokenizer_path or path, allows_special_tokens=chat.allows_special_tokens)
    formats = find_formats(tokenizer.chat_template, chat.tool_call_parser, chat.reasoning_parser)
    return TextFiles(tokenizer, load_sampling_defaults(path), formats)


def load_text(
    kind: type[T],
    name: str,
    path: Path,
    engine: Engine,
    *,
    tokenizer_path: Path | None = None,
    version: str = "1",
    open_record: OpenRecord = no_record,
    chat: ChatSettings = DEFAULT_CHAT,
) -> T:
    """Return a text model of a `kind`. Reading the checkpoint's tokenizer and defaults takes most of a second; `engine`
    may start later. Raises UNAVAILABLE where a file in `path` is missing or cannot be read, INVALID for a parser that
    is not installed."""
    files = read_text_files(path, tokenizer_path, chat)
    return kind(
        name,
        files.tokenizer,
        engine,
        files.defaults,
        created=int((path / "config.json").stat().st_mtime),
        version=version,
        formats=files.formats,
        media_domains=chat.media_domains,
        origin=TextOrigin(path, tokenizer_path or path, chat),
        open_record=open_record,
    )
