"""The elementary operations of `sluice.engine.models.kernels.Kernels` in torch. A result has the type of `x`, so
that what is computed in float32 beside a stream in bf16 does not make that float32 too."""

from collections.abc import Sequence
from typing import TypeAlias

import torch
import torch.nn.functional as F

Operand: TypeAlias = torch.Tensor | float

_HAS_ONEDNN = torch.backends.mkldnn.is_available()
_MANY_WEIGHTS = 1 << 20
"""Elements of a matrix from which oneDNN multiplies a single row of float32 faster than MKL."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return x @ weight.T (+ bias), [num_rows, features out]."""
    # On the CPU torch leaves float32 to MKL, which takes up to three times as long as oneDNN for several rows. It gives
    # a single row to one core, and takes up to half as long again for a large matrix as oneDNN, which gives it to all;
    # a small one's product is over in the time that oneDNN takes to start.
    is_float32_on_cpu = x.dtype == torch.float32 and x.device.type == "cpu"
    if _HAS_ONEDNN and is_float32_on_cpu and (len(x) > 1 or weight.numel() >= _MANY_WEIGHTS):
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return product
    return F.linear(x, weight, bias)


class TorchOperations:
    """Each is one kernel or a few, executed at once."""

    def add(self, x: torch.Tensor, y: Operand) -> torch.Tensor:
        return x + _like(x, y)

    def subtract(self, x: torch.Tensor, y: Operand) -> torch.Tensor:
        return x - _like(x, y)

    def multiply(self, x: torch.Tensor, y: Operand) -> torch.Tensor:
        return x * _like(x, y)

    def divide(self, x: Operand, y: Operand) -> torch.Tensor:
        quotient = x / _like(x, y) if isinstance(x, torch.Tensor) else x / y
        assert isinstance(quotient, torch.Tensor), "one of the operands is a tensor"
        return quotient

    def minimum(self, x: torch.Tensor, y: Operand) -> torch.Tensor:
        return torch.minimum(x, _like(x, y)) if isinstance(y, torch.Tensor) else x.clamp(max=y)

    def maximum(self, x: torch.Tensor, y: Operand) -> torch.Tensor:
        return torch.maximum(x, _like(x, y)) if isinstance(y, torch.Tensor) else x.clamp(min=y)

    def clamp(self, x: torch.Tensor, low: float, high: float) -> torch.Tensor:
        return x.clamp(low, high)

    def absolute(self, x: torch.Tensor) -> torch.Tensor:
        return x.abs()

    def exp(self, x: torch.Tensor) -> torch.Tensor:
        return x.exp()

    def log(self, x: torch.Tensor) -> torch.Tensor:
        return x.log()

    def floor(self, x: torch.Tensor) -> torch.Tensor:
        return x.floor()

    def sigmoid(self, x: torch.Tensor) -> torch.Tensor:
        return x.sigmoid()

    def swish(self, x: torch.Tensor, slope: float) -> torch.Tensor:
        return x * torch.sigmoid(x * slope)

    def softcapped(self, x: torch.Tensor, cap: float | None) -> torch.Tensor:
        return x if cap is None else torch.tanh(x / cap) * cap

    def softmax(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, -1)

    def total(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(-1, keepdim=True)

    def greater(self, x: torch.Tensor, y: Operand) -> torch.Tensor:
        return x > y

    def less_equal(self, x: torch.Tensor, y: Operand) -> torch.Tensor:
        return x <= y

    def select(self, condition: torch.Tensor, x: Operand, y: Operand) -> torch.Tensor:
        return torch.where(condition, x, y)

    def part(self, x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        return x[..., start:stop]

    def every_second(self, x: torch.Tensor, first: int) -> torch.Tensor:
        return x[..., first::2]

    def concat(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(tuple(tensors), -1)

    def largest(self, x: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        values, columns = torch.topk(x, count, -1)
        return values, columns

    def take(self, x: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        return x.gather(-1, columns)

    def is_column(self, column: torch.Tensor, count: int) -> torch.Tensor:
        return torch.arange(count, device=column.device) == column

    # -- norms and activations that need no more than their tensors

    def split_heads(self, x: torch.Tensor, size: int) -> torch.Tensor:
        return x.reshape(len(x), -1, size)

    def join_heads(self, heads: torch.Tensor) -> torch.Tensor:
        return heads.reshape(len(heads), -1)

    def repeat_heads(self, heads: torch.Tensor, count: int) -> torch.Tensor:
        return heads.expand(-1, count, -1)

    def uninterleave(self, heads: torch.Tensor, num_components: int) -> torch.Tensor:
        turned = heads[..., :num_components]
        return torch.cat((turned[..., 0::2], turned[..., 1::2], heads[..., num_components:]), -1)

    def activate(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        match activation:
            case "silu" | "swish":
                return F.silu(x)
            case "gelu":
                return F.gelu(x)
            case "gelu_new" | "gelu_pytorch_tanh":
                return F.gelu(x, approximate="tanh")
            case "relu":
                return F.relu(x)
            case _:
                assert activation == "relu2", f"an activation of the configuration is not known here: {activation}"
                return F.relu(x).square()

    def gate(self, gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
        return self.activate(gate, activation).mul_(up)

    def keep_best_groups(
        self, scores: torch.Tensor, num_groups: int, num_kept: int, num_counted: int, other: float
    ) -> torch.Tensor:
        by_group = scores.view(len(scores), num_groups, -1)
        sums = by_group.topk(num_counted, -1).values.sum(-1)
        is_kept = torch.zeros_like(sums, dtype=torch.bool).scatter_(1, sums.topk(num_kept, -1).indices, True)
        return torch.where(is_kept[..., None], by_group, other).view_as(scores)


def _like(x: Operand, y: Operand) -> Operand:
    """Return `y` in the type of `x`."""
    return y.to(x.dtype) if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) else y
