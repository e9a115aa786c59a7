"""A checkpoint's weights as OpenVINO constants, under its own names or those of a plain text model, without a copy and
without torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import openvino as ov
from openvino import opset13 as ops
from openvino.op import Constant

from sluice.engine.models.weights.assembled import AssembledTensor, Weight, assemble, stored_tensors
from sluice.engine.models.weights.files import NONE, map_files, stored_quantization, weight_files
from sluice.engine.models.weights.mapped import StoredTensor
from sluice.engine.models.weights.names import TextModelTensors
from sluice.engine.runners.openvino.graph.nodes import ints64, part
from sluice.engine.runners.openvino.weights.compression import OPENVINO_TYPES, CompressedTensor, pair_up, stored_tensor
from sluice.errors import ErrorCode, SluiceError, invalid


class CheckpointWeights:
    """The tensors of a directory, mapped copy-on-write, some of them perhaps compressed, now or when it was built.
    Graph constants point into the maps, so this object must live as long as the model built from it."""

    def __init__(
        self,
        tensors: Mapping[str, Weight],
        compressed: Mapping[str, CompressedTensor] | None = None,
        quantization: str = NONE,
    ) -> None:
        self.tensors = tensors
        self.quantization = quantization
        self._compressed = compressed or {}

    @classmethod
    def open(cls, directory: Path) -> "CheckpointWeights":
        """Map the weights in `directory`. Raises SluiceError: NOT_FOUND without files, INVALID for a damaged one, or a
        tensor in two."""
        files = weight_files(directory)
        tensors, stored = map_files(files), stored_quantization(files)
        return cls(assemble(tensors)) if stored == NONE else cls(tensors, pair_up(tensors), stored)

    def constant(self, name: str, shape: tuple[int, ...]) -> ov.Node:
        """Return tensor `name` as an f32 node. Raises SluiceError if it is missing or has another shape or dtype."""
        stored, compressed = self._find(name, shape)
        if compressed is not None:
            return compressed.node(name)
        return _expression(name, stored) if isinstance(stored, AssembledTensor) else _plain(name, stored)

    def matrices(self, name: str, shape: tuple[int, ...]) -> list[ov.Node]:
        """Return the matrices of all experts, which are tensor `name`, as an f32 node each. Raises as `constant`."""
        stored, compressed = self._find(name, shape)
        numbers = range(shape[0])
        if compressed is not None:
            return [compressed.matrix(each).node(f"{name}.{each}") for each in numbers]
        if isinstance(stored, StoredTensor):
            return [_plain(f"{name}.{each}", stored.matrix(each)) for each in numbers]
        if stored.are_apart:
            return [_plain(f"{name}.{each}", matrix) for each, matrix in enumerate(stored.tensors)]
        whole = _expression(name, stored)
        return [ops.squeeze(part(whole, each, each + 1, 0), ints64([0])) for each in numbers]

    def _find(self, name: str, shape: tuple[int, ...]) -> tuple[Weight, CompressedTensor | None]:
        """Return a tensor and its compressed form, if it has one."""
        stored, compressed = self.tensors.get(name), self._compressed.get(name)
        if stored is None:
            raise invalid("model_path", f"the checkpoint has no tensor {name!r}; by config.json it must be {shape}")
        found = stored.shape if compressed is None else compressed.shape
        if found != shape:
            raise invalid("model_path", f"tensor {name!r} has shape {found}; by config.json it must be {shape}")
        return stored, compressed

    def release_pages(self) -> None:
        """Release the resident pages of the maps. If they are accessed again, they are read from the files. Once
        inference has run, the compiled model has the weights in its own layout."""
        parts = [part for compressed in self._compressed.values() for part in compressed.parts]
        for stored in {id(stored.file): stored for stored in stored_tensors((*self.tensors.values(), *parts))}.values():
            stored.release()


def _plain(name: str, stored: StoredTensor) -> ov.Node:
    if stored.dtype not in OPENVINO_TYPES:
        raise SluiceError(
            ErrorCode.UNIMPLEMENTED,
            f"tensor {name!r} is stored as {stored.dtype}; supported: {', '.join(OPENVINO_TYPES)}",
            param="model_path",
        )
    constant = Constant(stored_tensor(stored, OPENVINO_TYPES[stored.dtype], stored.shape), shared_memory=True)
    constant.set_friendly_name(name)
    if stored.dtype == "F32":
        return constant
    converted = ops.convert(constant, "f32")
    # Without this mark the compiler folds the conversion and keeps each weight as f32, in twice the memory.
    converted.get_rt_info()["decompression_0"] = ""
    return converted


def _expression(name: str, assembled: AssembledTensor) -> ov.Node:
    """Return an assembled tensor that is in no file of its own as an expression of the stored ones."""
    wholes = [_plain(name, stored) for stored in assembled.tensors]
    if len(wholes) > 1:
        return ops.concat([ops.unsqueeze(whole, ints64([0])) for whole in wholes], 0)
    rank = len(assembled.tensors[0].shape)
    order = [*range(rank - 2), rank - 1, rank - 2]
    whole = ops.transpose(wholes[0], ints64(order)) if assembled.is_transposed else wholes[0]
    matrices = part(whole, *assembled.rows, rank - 2)
    return ops.reshape(matrices, ints64(assembled.shape), False)


@dataclass(frozen=True, slots=True)
class NamedWeights:
    """Constants by plain names."""

    checkpoint: CheckpointWeights
    names: TextModelTensors

    def constant(self, name: str, shape: tuple[int, ...]) -> ov.Node:
        """See `CheckpointWeights.constant`."""
        return self.checkpoint.constant(self.names.use(name), shape)

    def matrices(self, name: str, shape: tuple[int, ...]) -> list[ov.Node]:
        """See `CheckpointWeights.matrices`."""
        return self.checkpoint.matrices(self.names.use(name), shape)
