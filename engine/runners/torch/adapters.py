"""LoRA adapters: each projection adds B(A(x)), where the matrices of all adapters are stacked along their ranks."""

from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np
import torch

from sluice.engine.arrays import FloatArray
from sluice.engine.models.weights.lora import Matrices, read_adapter, stack_matrices
from sluice.errors import invalid

Stacks = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""A [ranks, features in] and B [features out, ranks] of each projection that some adapter changes."""


class DeviceAdapters:
    """The adapters of a model, by their numbers. Those that other tokens have are replaced by zeros and not multiplied
    by them, so that no adapter's infinities reach another's tokens."""

    def __init__(self, module: Callable[[str], str], dtype: torch.dtype, device: torch.device) -> None:
        """`module` returns the name by which adapters know a projection."""
        self._module = module
        self._dtype = dtype
        self._device = device
        self._names: dict[str, str] = {}
        self._shapes: dict[str, tuple[int, int]] = {}
        self._adapters: dict[int, dict[str, Matrices]] = {}
        self._stacks: Stacks = {}
        self._owners = torch.zeros(0, dtype=torch.int64, device=device)
        """The number of the adapter that each rank belongs to."""

    def add_to(self, product: torch.Tensor, x: torch.Tensor, name: str, adapters: torch.Tensor | None) -> torch.Tensor:
        """Return the output of projection `name` of `x` with that of each token's adapter added."""
        stack = self.find(name, (product.shape[-1], x.shape[-1]), adapters)
        if stack is None or adapters is None:
            return product
        a, b = stack
        return product + self.keep_own(x @ a.T, adapters) @ b.T

    def find(
        self, name: str, shape: tuple[int, int], adapters: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the stacked matrices of projection `name`, whose own matrix has `shape`; None if none of the step's
        tokens may have an adapter that changes it."""
        module = self._names.get(name)
        if module is None:  # the first pass: before it no adapter can be read
            module = self._names[name] = self._module(name)
            self._shapes[module] = shape
        return None if adapters is None else self._stacks.get(module)

    def keep_own(self, by_rank: torch.Tensor, adapters: torch.Tensor) -> torch.Tensor:
        """Return [num_tokens, ..., ranks] with 0 in the ranks of all adapters but the token's own."""
        numbers = adapters.view(-1, *[1] * (by_rank.dim() - 1))
        return torch.where(numbers == self._owners, by_rank, 0)

    def read(self, number: int, name: str, folder: Path) -> Callable[[], None]:
        """See `Runner.read_adapter`."""
        matrices = read_adapter(name, folder, self._shapes)
        largest = torch.finfo(self._dtype).max
        for module, pair in matrices.items():
            if not all((np.abs(each) <= largest).all() for each in pair):
                message = f"LoRA adapter {name}: the matrices of {module} must be finite in {self._dtype}, and are not"
                raise invalid("lora_modules", message)
        return self._stack({**self._adapters, number: matrices})

    def drop(self, numbers: Collection[int]) -> Callable[[], None]:
        """See `Runner.drop_adapters`."""
        return self._stack({number: each for number, each in self._adapters.items() if number not in numbers})

    def _stack(self, adapters: dict[int, dict[str, Matrices]]) -> Callable[[], None]:
        """Stack all `adapters`, and return what puts them into use."""
        ranks = {number: max(len(a) for a, _ in each.values()) for number, each in adapters.items()}
        owners = torch.from_numpy(np.repeat(np.array([*ranks], np.int64), [*ranks.values()])).to(self._device)
        with_ranks = [(adapters[number], rank) for number, rank in ranks.items()]
        changed = dict.fromkeys(module for each in adapters.values() for module in each)
        stacks: Stacks = {}
        for module in changed:
            a, b = stack_matrices(module, self._shapes[module], with_ranks)
            stacks[module] = self._on_device(a), self._on_device(b)
        self._adapters = adapters

        def use() -> None:
            self._stacks, self._owners = stacks, owners

        return use

    def _on_device(self, matrix: FloatArray) -> torch.Tensor:
        return torch.from_numpy(matrix).to(self._device, self._dtype)
