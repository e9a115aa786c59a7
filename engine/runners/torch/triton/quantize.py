"""Rows in 8-bit floats for products that take them, each with a scale of its own: one pass over memory."""

import torch
import triton
import triton.language as tl

from sluice.engine.runners.torch.fp8 import LARGEST, SMALLEST_SCALE, TYPE


@triton.jit
def _quantize_rows(
    x, codes, scales, stride, SIZE: tl.constexpr, WIDTH: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr
):  # fmt: skip
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    mask = columns < SIZE
    content = tl.load(x + row * stride + columns, mask=mask, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(content), 0) / LARGEST, SMALLEST)
    # The largest is that of the numbers; a row of NaN gets a scale of NaN, whatever its codes are.
    scale = tl.where(tl.max((content != content).to(tl.int32), 0) > 0, float("nan"), scale)
    tl.store(scales + row, scale)
    tl.store(codes + row * SIZE + columns, (content / scale).to(codes.dtype.element_ty), mask=mask)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes [num_rows, size] of x, and the scales [num_rows, 1] that they are times. Rows of x may be parts
    of longer ones."""
    num_rows, size = x.shape
    if x.stride(1) != 1:
        x = x.contiguous()
    codes = torch.empty(num_rows, size, dtype=TYPE, device=x.device)
    scales = torch.empty(num_rows, 1, dtype=torch.float32, device=x.device)
    width = triton.next_power_of_2(size)
    _quantize_rows[(num_rows,)](
        x, codes, scales, x.stride(0), size, width, LARGEST, SMALLEST_SCALE, num_warps=min(16, max(4, width // 512))
    )
    return codes, scales
