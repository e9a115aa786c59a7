"""A checkpoint's weights as OpenVINO constants, without copying a byte and without torch."""

from collections.abc import Mapping
from pathlib import Path

import msgspec
import openvino as ov
from openvino import opset13 as ops
from openvino.op import Constant

from engine.runners.openvino.weights.compression import NONE, QUANTIZATIONS, CompressedTensor, pair_up
from engine.runners.openvino.weights.mapped import FLOAT_TYPES, StoredTensor, map_tensors
from sluice.errors import ErrorCode, SluiceError, invalid

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
_NOT_OURS = ("consolidated", "adapter_")
"""Beginnings of files that lie beside some checkpoints: the same weights in their maker's layout, and adapters."""


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


class CheckpointWeights:
    """A directory's tensors, mapped copy-on-write, and those of them that were compressed, now or when it was built.

    Graph constants point into the maps, so a Checkpoint must live as long as the model built from it.
    """

    def __init__(
        self,
        tensors: Mapping[str, StoredTensor],
        compressed: Mapping[str, CompressedTensor] | None = None,
        quantization: str = NONE,
    ) -> None:
        self.tensors = tensors
        self.quantization = quantization
        self._compressed = compressed or {}

    @classmethod
    def open(cls, directory: Path) -> "CheckpointWeights":
        """Raises SluiceError: NOT_FOUND without files, INVALID for a damaged one."""
        tensors: dict[str, StoredTensor] = {}
        files = weight_files(directory)
        for path in files:
            tensors.update(map_tensors(path))
        stored = next((kind for kind in QUANTIZATIONS for path in files if path.name == compressed_file(kind)), None)
        return cls(tensors) if stored is None else cls(tensors, pair_up(tensors), stored)

    def constant(self, name: str, shape: tuple[int, ...]) -> ov.Node:
        """Tensor `name` as a node of type f32. Raises SluiceError where it is absent, of another shape or dtype."""
        stored, compressed = self.tensors.get(name), self._compressed.get(name)
        if stored is None:
            raise invalid("model_path", f"the checkpoint has no tensor {name!r}")
        found = stored.shape if compressed is None else compressed.shape
        if found != shape:
            raise invalid("model_path", f"tensor {name!r} has shape {found}; by config.json it must be {shape}")
        return _plain(name, stored) if compressed is None else compressed.node(name)

    def release_pages(self) -> None:
        """Give the resident pages of the maps back to the system; touched again, they are read from the files.

        Once inference has run, the compiled model holds the weights in its own layout.
        """
        parts = [part for compressed in self._compressed.values() for part in compressed.parts]
        for stored in {id(stored.file): stored for stored in (*self.tensors.values(), *parts)}.values():
            stored.release()


def compressed_file(quantization: str) -> str:
    """The file of compressed matrices in a checkpoint that was built with them; the other tensors are in another."""
    return f"model-{quantization}.safetensors"


def weight_files(directory: Path) -> list[Path]:
    """The files that hold a checkpoint: the one, else those that its index names, else all that are no strays.

    Raises SluiceError: NOT_FOUND without any or where one that the index names is missing, INVALID for
    an index that is none.
    """
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
    except msgspec.DecodeError as error:
        raise invalid("model_path", f"{index} is no index of weights: {error}") from error
    paths = [index.parent / name for name in sorted(set(weight_map.values()))]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        message = f"{index.parent} lacks {', '.join(missing)}, which {INDEX} names; is the download complete?"
        raise SluiceError(ErrorCode.NOT_FOUND, message, param="model_path")
    return paths


def _plain(name: str, stored: StoredTensor) -> ov.Node:
    if stored.dtype not in FLOAT_TYPES:
        raise SluiceError(
            ErrorCode.UNIMPLEMENTED,
            f"tensor {name!r} is stored as {stored.dtype}; supported: {', '.join(FLOAT_TYPES)}",
            param="model_path",
        )
    constant = Constant(stored.tensor(FLOAT_TYPES[stored.dtype], stored.shape), shared_memory=True)
    constant.set_friendly_name(name)
    if stored.dtype == "F32":
        return constant
    converted = ops.convert(constant, "f32")
    # Without this mark the compiler folds the conversion and holds every weight as f32, twice the memory.
    converted.get_rt_info()["decompression_0"] = ""
    return converted


EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
_PLAIN = ("model.", "lm_head.")
_WITH_OTHERS = (("language_model.model.", "language_model.lm_head."), ("model.language_model.", "lm_head."))
"""What the text model's names begin with where the checkpoint holds another for images beside it."""


class TextModelTensors:
    """Finds the text model by its embedding."""

    def __init__(self, checkpoint: CheckpointWeights) -> None:
        self._checkpoint = checkpoint
        self._beginnings = _PLAIN
        for beginnings in _WITH_OTHERS:
            if EMBEDDING.replace(_PLAIN[0], beginnings[0]) in checkpoint.tensors:
                self._beginnings = beginnings

    @property
    def has_head_of_its_own(self) -> bool:
        """Whether an LM head is stored, in a checkpoint of several models: their configurations are vague on it."""
        return self._beginnings != _PLAIN and self._stored(HEAD) in self._checkpoint.tensors

    def constant(self, name: str, shape: tuple[int, ...]) -> ov.Node:
        """See `CheckpointWeights.constant`."""
        return self._checkpoint.constant(self._stored(name), shape)

    def _stored(self, name: str) -> str:
        for plain, beginning in zip(_PLAIN, self._beginnings, strict=True):
            if name.startswith(plain):
                return beginning + name.removeprefix(plain)
        return name
