"""Weights on the device: read from the maps of a checkpoint's files, or random ones for benchmarks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from sluice.engine.arrays import FloatArray
from sluice.engine.models.weights.assembled import AssembledTensor, Weight, stored_tensors
from sluice.engine.models.weights.mapped import FLOAT_TYPES, StoredTensor
from sluice.engine.models.weights.names import TextModelTensors
from sluice.engine.models.weights.scaled import FP8, scales_of
from sluice.engine.runners.torch.fp8 import TYPE, Fp8Use, ScaledMatrix, dequantize, fits, quantize_rows
from sluice.errors import ErrorCode, SluiceError, invalid


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a stored tensor, along one axis of its matrices."""

    axis: int
    """Counted from the last, which is -1."""
    ranges: tuple[tuple[int, int], ...]
    """Begins and ends of what is taken, which is then one behind the other."""
    whole: int
    """The size of the whole tensor along the axis."""

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the tensor whose part has `shape`."""
        axis = len(shape) + self.axis
        return (*shape[:axis], self.whole, *shape[axis + 1 :])

    def copy(self, stored: torch.Tensor, target: torch.Tensor) -> None:
        """Copy the part of a stored tensor to `target`. No more of it is read."""
        pieces = target.split([end - begin for begin, end in self.ranges], self.axis)
        for (begin, end), piece in zip(self.ranges, pieces, strict=True):
            piece.copy_(stored.narrow(self.axis, begin, end - begin))


class WeightSource(Protocol):
    """The tensors of a text model, by the names that a plain one has."""

    has_own_head: bool
    """Whether it has an LM head that is not its embedding."""

    def copy(self, name: str, target: torch.Tensor, part: Part | None = None) -> None:
        """Copy a tensor, or a part of it, to `target`, converted to its type. Raises SluiceError if it is missing, or
        has another shape than that implies."""
        ...

    def copy_codes(self, name: str, codes: torch.Tensor, scales: torch.Tensor, part: Part | None = None) -> bool:
        """Copy a tensor, or a part of it, that is stored in 8-bit floats with a scale for each row or a single one, as
        it is. Returns False if it is stored in another form, and copies nothing then."""
        ...

    def module(self, name: str) -> str:
        """Return the family's name of a projection, by which LoRA adapters know it."""
        ...


class MappedWeights:
    """The tensors of a checkpoint's files, which are mapped: nothing is read before it is copied."""

    def __init__(self, tensors: Mapping[str, Weight], names: TextModelTensors) -> None:
        self._tensors = tensors
        self._names = names
        self.has_own_head = names.has_own_head

    def copy(self, name: str, target: torch.Tensor, part: Part | None = None) -> None:
        """See `WeightSource.copy`."""
        stored_name, stored = self._find(name, tuple(target.shape), part)
        is_assembled = isinstance(stored, AssembledTensor)
        matrices = target.view(-1, *target.shape[-2:]) if is_assembled else target[None]
        for matrix, (values, scales) in zip(matrices, _parts(stored_name, stored), strict=True):
            if scales is not None:
                values = dequantize(values.to(matrix.device), scales.to(matrix.device))
            _copy(values, matrix, part)

    def copy_codes(self, name: str, codes: torch.Tensor, scales: torch.Tensor, part: Part | None = None) -> bool:
        """See `WeightSource.copy_codes`."""
        stored_name, stored = self._find(name, tuple(codes.shape), part)
        if not isinstance(stored, StoredTensor):
            return False
        found = _scales(stored_name, stored)
        if found is None or found.shape[1] > 1:
            return False
        _copy(_as_tensor(stored.array(), stored.dtype), codes, part)
        _copy(found, scales, part if part is None or part.axis == -2 else None)  # of columns, with all rows' scales
        return True

    def _find(self, name: str, shape: tuple[int, ...], part: Part | None) -> tuple[str, Weight]:
        """Return the stored tensor whose part has `shape`, and its own name. Raises SluiceError as `copy`."""
        shape = shape if part is None else part.stored_shape(shape)
        stored_name = self._names.use(name)
        stored = self._tensors.get(stored_name)
        if stored is None:
            message = f"the checkpoint has no tensor {stored_name!r}; by config.json it must be {shape}"
            raise invalid("model_path", message)
        if stored.shape != shape:
            message = f"tensor {stored_name!r} has shape {stored.shape}; by config.json it must be {shape}"
            raise invalid("model_path", message)
        if stored.dtype not in (*FLOAT_TYPES, FP8):
            message = f"tensor {stored_name!r} is stored as {stored.dtype}; supported: {', '.join((*FLOAT_TYPES, FP8))}"
            raise SluiceError(ErrorCode.UNIMPLEMENTED, message, param="model_path")
        return stored_name, stored

    def module(self, name: str) -> str:
        """See `WeightSource.module`."""
        return self._names.module(name)

    def release(self) -> None:
        """Release the resident pages of the files. If they are accessed again, they are read from them."""
        for stored in {id(each.file): each for each in stored_tensors(self._tensors.values())}.values():
            stored.release()


def _copy(stored: torch.Tensor, target: torch.Tensor, part: Part | None) -> None:
    if part is None:
        target.copy_(stored)
    else:
        part.copy(stored, target)


def _parts(name: str, stored: Weight) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Yield the elements of a tensor without a copy, or those of each of its matrices, with their scales if they are
    codes: [rows, 1], or [rows, blocks of columns]."""
    if isinstance(stored, StoredTensor):
        yield _as_tensor(stored.array(), stored.dtype), _scales(name, stored)
        return
    for number in range(stored.num_matrices):
        scales = _scales(name, stored.tensors[number]) if stored.dtype == FP8 else None
        yield _as_tensor(stored.matrix(number), stored.dtype), scales


def _scales(name: str, stored: StoredTensor) -> torch.Tensor | None:
    return None if stored.scale is None else torch.from_numpy(scales_of(name, stored))


def _as_tensor(array: NDArray[np.generic], dtype: str) -> torch.Tensor:
    """Return the elements of a map without a copy. numpy has no bf16 and no 8-bit floats, and gives their bits."""
    tensor = torch.from_numpy(array)
    special = _SPECIAL_TYPES.get(dtype)
    return tensor if special is None else tensor.view(special)


_SPECIAL_TYPES = {"BF16": torch.bfloat16, FP8: torch.float8_e4m3fn}


class RandomWeights:
    """Weights of any shape, made on the device: for benchmarks, which do not look at the text."""

    def __init__(self, seed: int = 0, *, has_own_head: bool = False) -> None:
        self._seed = seed
        self.has_own_head = has_own_head

    def copy(self, name: str, target: torch.Tensor, part: Part | None = None) -> None:
        """See `WeightSource.copy`."""
        if target.dim() < 2:
            target.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            generator = torch.Generator(target.device).manual_seed(self._seed)
            self._seed += 1
            target.normal_(0.0, target.shape[-1] ** -0.5, generator=generator)

    def copy_codes(self, name: str, codes: torch.Tensor, scales: torch.Tensor, part: Part | None = None) -> bool:
        """See `WeightSource.copy_codes`."""
        return False

    def module(self, name: str) -> str:
        """See `WeightSource.module`."""
        return name


class DeviceWeights:
    """The weights on the device, as the kernels read them. Each tensor is made when it is first asked for; a runner
    asks for all of them before it serves. Projections of the same input are one matrix."""

    def __init__(
        self, source: WeightSource, dtype: torch.dtype, device: torch.device, fp8: Fp8Use = Fp8Use.NEVER
    ) -> None:
        self.source = source
        self._dtype = dtype
        self._device = device
        self._fp8 = fp8
        self._scaled: dict[tuple[str, ...], ScaledMatrix | None] = {}
        self._tensors: dict[object, torch.Tensor] = {}
        self._values: dict[str, FloatArray] = {}

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a tensor, in the type of the computation or another."""
        found = self._tensors.get(name)
        if found is None:
            found = self._tensors[name] = self._empty(shape, dtype)
            self.source.copy(name, found)
        return found

    def joined(self, names: tuple[str, ...], shapes: tuple[tuple[int, ...], ...]) -> torch.Tensor:
        """Return several tensors as one, behind each other along the first axis."""
        found = self._tensors.get(names)
        if found is None:
            sizes = [shape[0] for shape in shapes]
            found = self._tensors[names] = self._empty((sum(sizes), *shapes[0][1:]), None)
            for name, rows in zip(names, found.split(sizes), strict=True):
                self.source.copy(name, rows)
        return found

    @property
    def are_scaled(self) -> bool:
        """Whether some of the matrices that were asked for are in 8 bits."""
        return any(each is not None for each in self._scaled.values())

    def scaled(self, names: tuple[str, ...], nums_out: tuple[int, ...], num_in: int) -> ScaledMatrix | None:
        """Return the matrices of several projections as one in 8 bits; None where they are not to be so."""
        if names not in self._scaled:
            is_taken = self._fp8 is not Fp8Use.NEVER and fits(sum(nums_out), num_in)
            self._scaled[names] = self._make_scaled(names, nums_out, num_in) if is_taken else None
        return self._scaled[names]

    def _make_scaled(self, names: tuple[str, ...], nums_out: tuple[int, ...], num_in: int) -> ScaledMatrix | None:
        codes = self._empty((sum(nums_out), num_in), TYPE)
        scales = self._empty((sum(nums_out), 1), torch.float32)
        for name, matrix, of_rows in zip(names, codes.split(nums_out), scales.split(nums_out), strict=True):
            if self.source.copy_codes(name, matrix, of_rows):
                continue
            if self._fp8 is not Fp8Use.ALWAYS:
                return None
            exact = self._empty(tuple(matrix.shape), None)
            self.source.copy(name, exact)
            for target, made in zip((matrix, of_rows), quantize_rows(exact), strict=True):
                target.copy_(made)
        return ScaledMatrix(codes, scales)

    def values(self, name: str, shape: tuple[int, ...]) -> FloatArray:
        """Return a tensor's values."""
        if name not in self._values:
            target = torch.empty(shape, dtype=torch.float32)
            self.source.copy(name, target)
            self._values[name] = target.numpy()
        return self._values[name]

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype | None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self._dtype, device=self._device)
