"""The LoRA adapters of a compiled graph: their matrices stacked in its inputs, and the mask of each step."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from sluice.engine.arrays import FloatArray, IntArray
from sluice.engine.models.weights.lora import Matrices, read_adapter, stack_matrices
from sluice.engine.runners.openvino.graph.adapters import MASK, stack_names

_NOBODY = -1


class AdapterStacks:
    """The adapters that were loaded into `request`, by their numbers. `shapes` has features out and in of the graph's
    projections."""

    def __init__(self, request: ov.InferRequest, shapes: Mapping[str, tuple[int, int]], kind: ov.Type) -> None:
        self._request = request
        self._shapes = shapes
        self._kind = kind
        self._adapters: dict[int, dict[str, Matrices]] = {}
        self._owners: IntArray = np.zeros(0, np.int32)
        """The number of the adapter that each rank belongs to."""
        self._memory: list[NDArray[np.generic]] = []
        """Arrays that the input tensors point into, kept alive here."""
        self._stack({})()

    def read(self, number: int, name: str, folder: Path) -> Callable[[], None]:
        """Read an adapter, on any thread; what this returns adds it. Raises SluiceError, as `read_adapter`."""
        return self._stack({**self._adapters, number: read_adapter(name, folder, self._shapes)})

    def drop(self, numbers: Collection[int]) -> Callable[[], None]:
        """Prepare to remove adapters, on any thread; what this returns does."""
        return self._stack({number: each for number, each in self._adapters.items() if number not in numbers})

    def set_mask(self, adapters: IntArray | None, num_tokens: int) -> None:
        """Set which ranks each token of the step has; `adapters` are the tokens' numbers."""
        if adapters is None:
            adapters = np.zeros(num_tokens, np.int32)
        self._request.set_tensor(MASK, ov.Tensor(np.ascontiguousarray(adapters[:, None] == self._owners)))

    def _stack(self, adapters: dict[int, dict[str, Matrices]]) -> Callable[[], None]:
        """Stack all `adapters`, and return what sets them as the inputs of the graph, which copies nothing."""
        ranks = {number: max(len(a) for a, _ in each.values()) for number, each in adapters.items()}
        # A product over no ranks is left unwritten by the plugin: there is always one, of nobody.
        owners = np.repeat(np.array([_NOBODY, *ranks], np.int32), [1, *ranks.values()])
        memory: list[NDArray[np.generic]] = []
        tensors: dict[str, ov.Tensor] = {}
        for module, shape in self._shapes.items():
            stacks = stack_matrices(module, shape, [(adapters[number], rank) for number, rank in ranks.items()], 1)
            for input_name, values in zip(stack_names(module), stacks, strict=True):
                # numpy has no bf16, and a tensor of that type does not keep its memory alive
                stored = values if self._kind == ov.Type.f32 else to_bf16(values).view(np.float16)
                tensors[input_name] = ov.Tensor(stored.reshape(-1), ov.Shape(list(values.shape)), self._kind)
                memory.append(stored)
        self._adapters = adapters

        def use() -> None:
            for input_name, tensor in tensors.items():
                self._request.set_tensor(input_name, tensor)
            self._owners, self._memory = owners, memory

        return use


def to_bf16(values: FloatArray) -> NDArray[np.uint16]:
    """Return the bits of finite values in bf16, rounded to the nearest, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
