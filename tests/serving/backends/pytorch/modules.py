"""Small modules that the tests script, each for one thing that may go wrong."""

from pathlib import Path

import torch
from torch import nn


class Layers(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.second = nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.second(torch.relu(self.first(x))), dim=1)


class SumAndDifference(nn.Module):  # type: ignore[misc]
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a + b, a - b


class Listed(nn.Module):  # type: ignore[misc]
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        return [a + b, a - b]


class Keyed(nn.Module):  # type: ignore[misc]
    def forward(self, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"sum": given["a"] + given["b"], "difference": given["a"] - given["b"]}


class Same(nn.Module):  # type: ignore[misc]
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Shout(nn.Module):  # type: ignore[misc]
    def forward(self, x: list[str]) -> tuple[list[str], torch.Tensor]:
        loud: list[str] = []
        lengths: list[int] = []
        for text in x:
            loud.append(text + "!")
            lengths.append(len(text))
        return loud, torch.tensor(lengths)


class InPlace(nn.Module):  # type: ignore[misc]
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.add_(1)


class Counter(nn.Module):  # type: ignore[misc]
    """Returns its own state, which the next run changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.count: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(x)
        return self.count


class Picky(nn.Module):  # type: ignore[misc]
    """Looks rows up in a table: a wrong number fails the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(10.0).reshape(10, 1))
        self.table: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table[x[:, 0]]


class Optionally(nn.Module):  # type: ignore[misc]
    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return x if bias is None else x + bias


class Scaled(nn.Module):  # type: ignore[misc]
    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        return x * scale


class Total(nn.Module):  # type: ignore[misc]
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum()


class Stateful(nn.Module):  # type: ignore[misc]
    """Adds to a state that the server keeps for it; a sequence start resets it."""

    def forward(self, x: torch.Tensor, start: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = torch.where(start > 0, x, state + x)
        return total, total


class Sums(nn.Module):  # type: ignore[misc]
    """Sums rows that lie one behind the other; `ends` has the number of elements up to each row's end."""

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        sums = torch.cumsum(x, 0)[ends.to(torch.int64) - 1]
        return torch.diff(sums, prepend=torch.zeros(1))[:, None]


def put(folder: Path, module: nn.Module) -> nn.Module:
    """Script a module into version 1."""
    (folder / "1").mkdir()
    torch.jit.script(module.eval()).save(folder / "1" / "model.pt")
    return module
