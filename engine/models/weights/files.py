"""The files of a checkpoint's weights, and the tensors in them."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from sluice.engine.models.weights.mapped import StoredTensor, map_tensors
from sluice.errors import ErrorCode, SluiceError, invalid

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
_NOT_OURS = ("consolidated", "adapter_")
"""Prefixes of other files beside some checkpoints: the same weights in their maker's layout, and adapters."""

INT8, INT4 = "int8", "int4"
NONE = "none"
QUANTIZATIONS = (INT8, INT4)
"""How `sluice build` compresses weights, and OpenVINO at load."""
SCALES, ZEROS = ".scales", ".zeros"
"""Suffixes of the tensors with the scales and zero points of a compressed matrix, whose codes have its name."""


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def compressed_file(quantization: str) -> str:
    """Return the name of the file of compressed matrices in a built checkpoint; other tensors are in another file."""
    return f"model-{quantization}.safetensors"


def stored_quantization(files: Sequence[Path]) -> str:
    """Return the compression in which `sluice build` has stored a checkpoint, by the names of its files; NONE for
    others."""
    return next((kind for kind in QUANTIZATIONS for path in files if path.name == compressed_file(kind)), NONE)


def map_files(files: Sequence[Path]) -> dict[str, StoredTensor]:
    """Map the tensors of all `files`. Raises SluiceError INVALID for a damaged file, or a tensor in two."""
    tensors: dict[str, StoredTensor] = {}
    for path in files:
        found = map_tensors(path)
        if twice := found.keys() & tensors.keys():
            raise _stored_twice(min(twice), files)
        tensors.update(found)
    return tensors


def weight_files(directory: Path) -> list[Path]:
    """Return the files of a checkpoint: the single file, else those in its index, else all that can be part of it.
    Raises NOT_FOUND without any, or if a file in the index is missing, INVALID for a malformed index."""
    if (directory / WHOLE).is_file():
        return [directory / WHOLE]
    index = directory / INDEX
    if index.is_file():
        return _indexed(index)
    paths = sorted(path for path in directory.glob("*.safetensors") if not path.name.startswith(_NOT_OURS))
    if not paths:
        raise SluiceError(ErrorCode.NOT_FOUND, f"{directory} holds no *.safetensors file", param="model_path")
    return paths


def _indexed(index: Path) -> list[Path]:
    try:
        weight_map = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except (ValueError, RecursionError) as error:
        raise invalid("model_path", f"{index} is no index of weights: {error}") from error
    paths = [index.parent / name for name in sorted(set(weight_map.values()))]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        message = f"{index.parent} lacks {', '.join(missing)}, which {INDEX} names; is the download complete?"
        raise SluiceError(ErrorCode.NOT_FOUND, message, param="model_path")
    return paths


def _stored_twice(name: str, files: Sequence[Path]) -> SluiceError:
    first, second, *_ = (path.name for path in files if name in map_tensors(path))
    message = f"tensor {name!r} is in {first} and in {second}; remove the file that is not the model's"
    return invalid("model_path", message)
