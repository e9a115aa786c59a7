"""Mixtures of experts: rows sorted by their expert, then one product of all experts' matrices with their own rows, or a
product for each expert that has some."""

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F

from sluice.engine.models.config.decoder_config import Experts
from sluice.engine.models.kernels import Chosen, ExpertBody
from sluice.engine.runners.torch.weights import DeviceWeights
from sluice.errors import invalid

_ALIGNMENT_BYTES = 16
"""The product of all takes matrices whose rows and columns are a multiple of this."""
_CAPABILITIES = (9, 10)
"""The major compute capabilities where the product of all is one kernel, in bf16. On others the host counts rows."""

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(rows in the order of their experts, matrices [num_experts, out, in]) -> each row times its expert's matrix."""


def choose_grouped(
    experts: Experts | None, hidden_size: int, asked: bool | None, dtype: torch.dtype, device: torch.device
) -> bool:
    """Return whether the experts of a model are multiplied at once, and the host does not learn whose rows they are:
    where a GPU has a kernel for it, or on the CPU if it is asked for. Raises INVALID where that is not possible."""
    if experts is None or asked is False:
        return False
    is_aligned = all(size * dtype.itemsize % _ALIGNMENT_BYTES == 0 for size in (hidden_size, experts.size))
    has_kernel = device.type == "cpu" or (
        dtype == torch.bfloat16 and torch.cuda.get_device_capability(device)[0] in _CAPABILITIES
    )
    if asked and not (is_aligned and has_kernel):
        message = "grouped_experts needs bf16 on a GPU of compute capability 9 or 10, or a CPU, and rows of a multiple "
        message += f"of {_ALIGNMENT_BYTES} bytes; this model computes in {dtype} on {device}, its rows have "
        raise invalid("grouped_experts", f"{message}{hidden_size} and {experts.size} elements")
    return bool(asked) or (device.type == "cuda" and is_aligned and has_kernel)


def compute_experts(
    weights: DeviceWeights,
    x: torch.Tensor,
    choice: Chosen,
    name: str,
    num_experts: int,
    body: ExpertBody,
    *,
    is_grouped: bool,
) -> torch.Tensor:
    """See `Kernels.experts`."""
    num_tokens, num_chosen = choice.experts.shape
    chosen, order = choice.experts.reshape(-1).sort(stable=True)
    # The numbers of the experts' rows stay on the device: counts by `bincount` would be waited for.
    numbers = torch.arange(num_experts, dtype=chosen.dtype, device=chosen.device)
    ends = torch.searchsorted(chosen, numbers, right=True, out_int32=True)
    product = _grouped(ends) if is_grouped else _one_by_one(ends)

    def linear(rows: torch.Tensor, part: str, num_out: int, bias: bool) -> torch.Tensor:
        matrices = weights.tensor(f"{name}.{part}.weight", (num_experts, num_out, rows.shape[-1]))
        output = product(rows, matrices)
        if bias:
            output += weights.tensor(f"{name}.{part}_bias", (num_experts, num_out))[chosen]
        return output

    output = body(x.index_select(0, order // num_chosen), linear)
    # Back in the tokens' own order, so that the sum of each is in the same order whatever else is in the step.
    by_choice = torch.empty_like(output).index_copy_(0, order, output)
    weighted = by_choice.view(num_tokens, num_chosen, -1).float() * choice.weights[..., None].float()
    return weighted.sum(1).to(x.dtype)


def _grouped(ends: torch.Tensor) -> Product:
    return lambda rows, matrices: F.grouped_mm(rows, matrices.mT, offs=ends)


def _one_by_one(ends: torch.Tensor) -> Product:
    bounds = [0, *ends.tolist()]

    def multiply(rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        output = rows.new_empty(len(rows), matrices.shape[1])
        for number, (start, end) in enumerate(pairwise(bounds)):
            if end > start:
                torch.mm(rows[start:end], matrices[number].T, out=output[start:end])
        return output

    return multiply
