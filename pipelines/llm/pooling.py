"""How a model of embeddings makes one vector of its tokens' hidden states, by the files of sentence-transformers."""

from collections.abc import AsyncIterable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sluice.engine.arrays import FloatArray
from sluice.engine.model_folder import SENTENCE_TRANSFORMERS, read_json
from sluice.engine.types import GenerateRequest, SamplingParams, TokenEvent
from sluice.errors import ErrorCode, SluiceError, invalid

_SETTINGS = "config_sentence_transformers.json"
_LENGTHS = "sentence_bert_config.json"


class _Module(msgspec.Struct, frozen=True):
    type: str
    path: str


class PoolingMode(Enum):
    """The hidden states that a vector is made of."""

    LAST = "lasttoken"
    FIRST = "cls"
    MEAN = "mean"

    def pool(self, hidden: FloatArray) -> FloatArray:
        """Return the vector of a text's hidden states [num_tokens, size]. LAST needs the last one alone."""
        match self:
            case PoolingMode.LAST:
                return np.asarray(hidden[-1])
            case PoolingMode.FIRST:
                return np.asarray(hidden[0])
            case PoolingMode.MEAN:
                return np.asarray(hidden.mean(axis=0, dtype=np.float32))


@dataclass(frozen=True, slots=True)
class EmbeddingSettings:
    """The settings of a model of embeddings. Without files of sentence-transformers: the last token's hidden state, of
    length 1.

    `prompts` stand before texts, by the name of the kind of text. `max_tokens` is the longest text, None for no bound
    but the context. `dimensions` are the lengths to which vectors may be cut, None for any, () for none.
    """

    mode: PoolingMode = PoolingMode.LAST
    normalizes: bool = True
    prompts: dict[str, str] = field(default_factory=dict)
    max_tokens: int | None = None
    dimensions: tuple[int, ...] | None = ()


def read_embedding_settings(folder: Path, *, is_pooled: bool = False) -> EmbeddingSettings:
    """Read the files of a checkpoint. Raises INVALID for a damaged file, UNIMPLEMENTED for parts other than a
    transformer, a pooling and a normalization, and for another pooling than by last token, first token or mean. An
    engine of which vectors come pooled (`is_pooled`) may have dense layers behind the pooling too."""
    config = read_json(folder / "config.json")
    dimensions: tuple[int, ...] | None = tuple(config.get("matryoshka_dimensions") or ())
    if config.get("is_matryoshka") and not dimensions:
        dimensions = None
    if not (folder / SENTENCE_TRANSFORMERS).is_file():
        return EmbeddingSettings(dimensions=dimensions)
    parts = _read_parts(folder / SENTENCE_TRANSFORMERS)
    unknown = parts.keys() - {"Transformer", "Pooling", "Normalize", *(["Dense"] if is_pooled else [])}
    if unknown:
        raise _unsupported(f"{folder / SENTENCE_TRANSFORMERS} has the part {min(unknown)}")
    prompts = _read(folder / _SETTINGS).get("prompts") or {}
    return EmbeddingSettings(
        mode=_read_mode(folder / parts["Pooling"] / "config.json") if "Pooling" in parts else PoolingMode.LAST,
        normalizes="Normalize" in parts,
        prompts={str(name): str(text) for name, text in prompts.items()},
        max_tokens=_read(folder / parts.get("Transformer", "") / _LENGTHS).get("max_seq_length"),
        dimensions=dimensions,
    )


def build_embedding_request(token_ids: list[int], *, whole: bool, second_text_start: int = 0) -> GenerateRequest:
    """Return a request for the hidden states of all `token_ids`, or of the last one, to an engine that embeds."""
    return GenerateRequest(
        request_id="embedding",
        prompt_token_ids=token_ids,
        sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
        returns_context_logits=whole,
        returns_generation_logits=not whole,
        second_text_start=second_text_start,
    )


async def read_hidden_states(events: AsyncIterable[TokenEvent], size: int) -> FloatArray:
    """Return the hidden states [num_tokens, size] in the events of such a request."""
    details = [event.detail async for event in events if event.detail is not None]
    states = b"".join([each.context_logits or each.generation_logits or b"" for each in details])
    return np.frombuffer(states, np.float32).reshape(-1, size)


def _read_parts(path: Path) -> dict[str, str]:
    """Return the folders of a model's parts, by their classes."""
    try:
        modules = msgspec.json.decode(path.read_bytes(), type=list[_Module])
    except (ValueError, RecursionError) as error:
        raise invalid("model_path", f"{path} is no list of a model's parts: {error}") from error
    return {each.type.rpartition(".")[2]: each.path for each in modules}


def _read_mode(path: Path) -> PoolingMode:
    fields = read_json(path)
    chosen = {name.removeprefix("pooling_mode_").removesuffix("_token").removesuffix("_tokens") for name in _on(fields)}
    if isinstance(fields.get("pooling_mode"), str):
        chosen = {fields["pooling_mode"]}
    modes = [mode for mode in PoolingMode if mode.value in chosen]
    if len(chosen) != 1 or not modes:
        raise _unsupported(f"{path} asks for pooling by {', '.join(sorted(chosen)) or 'nothing'}")
    if fields.get("include_prompt") is False:
        raise _unsupported(f"{path} leaves the prompt out of the pooling (include_prompt false)")
    return modes[0]


def _on(fields: dict[str, Any]) -> list[str]:
    return [name for name, value in fields.items() if name.startswith("pooling_mode_") and value is True]


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _unsupported(what: str) -> SluiceError:
    known = "a transformer, a pooling by lasttoken, cls or mean, and a normalization are supported"
    return SluiceError(ErrorCode.UNIMPLEMENTED, f"{what}; {known}")
