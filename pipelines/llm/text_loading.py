"""Loads an LLM's text model from the folder of its checkpoint."""

from pathlib import Path
from typing import NamedTuple, TypeVar

from sluice.engine.fleet.client import Engine
from sluice.pipelines.chat.registry import ChatFormats, find_formats
from sluice.pipelines.llm.services import DEFAULT_CHAT, ChatSettings
from sluice.pipelines.llm.text import LlmText, TextOrigin
from sluice.pipelines.text.sampling import SamplingDefaults, load_sampling_defaults
from sluice.pipelines.text.stream import OpenRecord, no_record
from sluice.pipelines.text.tokenizer import Tokenizer

T = TypeVar("T", bound=LlmText)


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
