"""Which files of a checkpoint's folder belong to the model, and which to its tokenizer."""

from collections.abc import Iterable
from pathlib import Path

from engine.runners.openvino.weights.checkpoint import INDEX, WHOLE, weight_files
from engine.model_folder import ModelFormat
from pipelines.text.tokenizer import TOKENIZER_FILES

CONFIG = "config.json"
TOKENIZER_PATTERNS = (
    *TOKENIZER_FILES,
    "*.tiktoken",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.*",
)
TOKENIZER_AND_KIN = (*TOKENIZER_PATTERNS, CONFIG, "generation_config.json")
"""config.json tells transformers the tokenizer's class, generation_config.json which tokens end a text."""
_SMALL = (*TOKENIZER_AND_KIN, "hf_quant_config.json", "preprocessor_config.json")
WEIGHTS = {
    ModelFormat.HUGGINGFACE: ("*.safetensors", INDEX),
    ModelFormat.OPENVINO_IR: ("openvino_model.xml", "openvino_model.bin"),
    ModelFormat.TENSORRT_LLM_CHECKPOINT: ("rank*.safetensors",),
    ModelFormat.TENSORRT_LLM_ENGINE: ("rank*.engine",),
}


def model_patterns(kind: ModelFormat) -> tuple[str, ...]:
    """The names of what `model_files` finds."""
    return (*_SMALL, *WEIGHTS[kind])


def model_files(folder: Path, kind: ModelFormat) -> list[Path]:
    """What serving needs of it, in order of their names. Raises SluiceError where weights are missing or damaged."""
    found = set(_matching(folder, _SMALL))
    if kind is ModelFormat.HUGGINGFACE:
        weights = weight_files(folder)
        found.update(weights)
        if weights != [folder / WHOLE] and (folder / INDEX).is_file():
            found.add(folder / INDEX)
    else:
        found.update(_matching(folder, WEIGHTS[kind]))
    return sorted(found)


def tokenizer_files(folder: Path) -> list[Path]:
    """The tokenizer with its chat template, and what tells of it."""
    return sorted({*_matching(folder, TOKENIZER_AND_KIN)})


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def size_of(files: Iterable[Path]) -> int:
    """Bytes, behind links."""
    return sum(file.stat().st_size for file in files)


def _matching(folder: Path, patterns: Iterable[str]) -> list[Path]:
    return [path for pattern in patterns for path in folder.glob(pattern) if path.is_file()]
