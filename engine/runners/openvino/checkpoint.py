"""Safetensors files as OpenVINO constants, without copying a byte and without torch."""

import mmap
from dataclasses import dataclass
from pathlib import Path

import msgspec
import openvino as ov
from openvino import opset13 as ops
from openvino.op import Constant
from safetensors import SafetensorError, safe_open

from engine.errors import ErrorCode, SluiceError, invalid
from engine.runners.openvino.memory import shared_tensor

_TYPES = {"BF16": ov.Type.bf16, "F16": ov.Type.f16, "F32": ov.Type.f32}
_HEADER_LENGTH_BYTES = 8


class _HeaderEntry(msgspec.Struct, frozen=True):
    """One tensor as a safetensors header describes it; offsets count from the header's end."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    file: mmap.mmap
    base: int
    entry: _HeaderEntry


class Checkpoint:
    """The tensors of a directory's `*.safetensors`, mapped copy-on-write.

    Graph constants point into the maps, so a Checkpoint must live as long as the model built
    from it. Raises SluiceError: NOT_FOUND without files, INVALID for a damaged one.
    """

    def __init__(self, directory: Path) -> None:
        paths = sorted(directory.glob("*.safetensors"))
        if not paths:
            raise SluiceError(ErrorCode.NOT_FOUND, f"{directory} holds no *.safetensors file", param="model_path")
        self._tensors: dict[str, _StoredTensor] = {}
        for path in paths:
            self._tensors.update(_map_tensors(path))

    def constant(self, name: str, shape: tuple[int, ...]) -> ov.Node:
        """Tensor `name` as a node of type f32. Raises SluiceError where it is absent, of another shape or dtype."""
        stored = self._tensors.get(name)
        if stored is None:
            raise invalid("model_path", f"the checkpoint has no tensor {name!r}")
        if stored.entry.shape != shape:
            raise invalid(
                "model_path", f"tensor {name!r} has shape {stored.entry.shape}; by config.json it must be {shape}"
            )
        constant = Constant(_shared_tensor(name, stored), shared_memory=True)
        constant.set_friendly_name(name)
        if stored.entry.dtype == "F32":
            return constant
        converted = ops.convert(constant, "f32")
        # Without this mark the compiler folds the conversion and holds every weight as f32, twice the memory.
        converted.get_rt_info()["decompression_0"] = ""
        return converted

    def release_pages(self) -> None:
        """Give the resident pages of the maps back to the system; touched again, they are read from the files.

        Once inference has run, the compiled model holds the weights in its own layout.
        """
        for file in {id(stored.file): stored.file for stored in self._tensors.values()}.values():
            file.madvise(mmap.MADV_DONTNEED)


def _map_tensors(path: Path) -> dict[str, _StoredTensor]:
    _check_intact(path)
    with path.open("rb") as handle:
        # Copy-on-write, since OpenVINO takes only buffers that look writable; nothing writes to them.
        file = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
    header_bytes = int.from_bytes(file[:_HEADER_LENGTH_BYTES], "little")
    base = _HEADER_LENGTH_BYTES + header_bytes
    header = msgspec.json.decode(file[_HEADER_LENGTH_BYTES:base])
    header.pop("__metadata__", None)
    entries = msgspec.convert(header, dict[str, _HeaderEntry])
    return {name: _StoredTensor(file, base, entry) for name, entry in entries.items()}


def _check_intact(path: Path) -> None:
    """Let the library check header, offsets and file length, so that the mapping can rely on them."""
    try:
        with safe_open(path, framework="numpy"):
            pass
    except SafetensorError as error:
        raise invalid("model_path", f"{path.name} is damaged: {error}") from error


def _shared_tensor(name: str, stored: _StoredTensor) -> ov.Tensor:
    entry = stored.entry
    if entry.dtype not in _TYPES:
        raise SluiceError(
            ErrorCode.UNIMPLEMENTED,
            f"tensor {name!r} is stored as {entry.dtype}; supported: {', '.join(_TYPES)}",
            param="model_path",
        )
    begin, end = entry.data_offsets
    return shared_tensor(stored.file, stored.base + begin, end - begin, _TYPES[entry.dtype], entry.shape)
