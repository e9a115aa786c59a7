"""Finds the files of a checkpoint's folder: those of the model, those of its tokenizer, and a build's manifest."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from sluice.engine.model_folder import ModelFormat
from sluice.engine.models.weights.files import INDEX, WHOLE, weight_files
from sluice.pipelines.text.transformers_tokenizer import TOKENIZER_FILES

CONFIG = "config.json"
MANIFEST = "sluice-build.json"
"""The file of settings and versions that `sluice build` writes beside config.pbtxt."""
TOKENIZER_PATTERNS = (
    *TOKENIZER_FILES,
    "*.tiktoken",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.*",
)
TOKENIZER_AND_CONFIG_PATTERNS = (*TOKENIZER_PATTERNS, CONFIG, "generation_config.json")
"""Patterns of the tokenizer and its description: config.json has its class, generation_config.json its end tokens."""
_MODEL_PATTERNS = (*TOKENIZER_AND_CONFIG_PATTERNS, "hf_quant_config.json", "preprocessor_config.json")
WEIGHTS = {
    ModelFormat.HUGGINGFACE: ("*.safetensors", INDEX),
    ModelFormat.OPENVINO_IR: ("openvino_model.xml", "openvino_model.bin"),
    ModelFormat.TENSORRT_LLM_CHECKPOINT: ("rank*.safetensors",),
    ModelFormat.TENSORRT_LLM_ENGINE: ("rank*.engine",),
}


def model_patterns(kind: ModelFormat) -> tuple[str, ...]:
    """Return the glob patterns of the files that `model_files` finds."""
    return (*_MODEL_PATTERNS, *WEIGHTS[kind])


def model_files(folder: Path, kind: ModelFormat) -> list[Path]:
    """Return the files that serving needs, sorted. Raises SluiceError where weights are missing or damaged."""
    found = set(_matching(folder, _MODEL_PATTERNS))
    if kind is ModelFormat.HUGGINGFACE:
        weights = weight_files(folder)
        found.update(weights)
        if weights != [folder / WHOLE] and (folder / INDEX).is_file():
            found.add(folder / INDEX)
    else:
        found.update(_matching(folder, WEIGHTS[kind]))
    return sorted(found)


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the files of the tokenizer, its chat template, config.json and generation_config.json, sorted."""
    return sorted({*_matching(folder, TOKENIZER_AND_CONFIG_PATTERNS)})


def tokenizer_file(*folders: Path) -> Path | None:
    """Return the first file of a tokenizer in the first folder that has one."""
    files = (folder / name for folder in folders for name in TOKENIZER_FILES)
    return next((file for file in files if file.is_file()), None)


def sha256_of(file: Path) -> str:
    with file.open("rb") as read:
        return hashlib.file_digest(read, "sha256").hexdigest()


def size_of(files: Iterable[Path]) -> int:
    """Return the bytes of all files; links count as the files they point to."""
    return sum(file.stat().st_size for file in files)


def _matching(folder: Path, patterns: Iterable[str]) -> list[Path]:
    return [path for pattern in patterns for path in folder.glob(pattern) if path.is_file()]
