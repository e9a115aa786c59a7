"""Matrices in 8-bit floats (float8_e4m3fn), with a scale for each row. The rows that they are multiplied by are rounded
to 8 bits too, each with a scale of its own, and the product is one of the device's 8-bit units."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch

from sluice.engine.models.config.stored_fp8 import BLOCK
from sluice.engine.models.weights.files import NONE
from sluice.errors import ErrorCode, SluiceError

FP8 = "fp8"
TYPE = torch.float8_e4m3fn
LARGEST = torch.finfo(TYPE).max
SMALLEST_SCALE = 1e-12
"""The scale of a row of zeros, which would be 0."""
_ALIGNMENT = 16
"""The units take matrices whose rows and columns are a multiple of this."""
_LEAST_CAPABILITY = (8, 9)


class Fp8Use(Enum):
    """The projections that are computed in 8 bits."""

    NEVER = 0
    STORED = 1
    """The projections that the checkpoint stores so, with scales that fit."""
    ALWAYS = 2
    """All projections but routers, those that latent attention absorbs, and those whose shape the units do not take."""


def choose_fp8(quantization: str, device: torch.device) -> Fp8Use:
    """Return the use for `EngineConfig.quantization`. On a CPU, whose products in 8 bits are slow, matrices that are
    stored so are converted, unless it is asked for. Raises UNIMPLEMENTED for another kind, and for a device without
    8-bit units."""
    if quantization == NONE:
        return Fp8Use.STORED if device.type == "cuda" and _has_units(device) else Fp8Use.NEVER
    if quantization != FP8:
        message = f"quantization must be one of {NONE}, {FP8} on torch, got {quantization!r}; "
        message += "for weights in int8 or int4 use --runtime openvino"
        raise SluiceError(ErrorCode.UNIMPLEMENTED, message, param="quantization")
    if device.type == "cuda" and not _has_units(device):
        name, (major, minor) = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        message = f"quantization {FP8} needs a GPU of compute capability 8.9 or higher; {name} has {major}.{minor}"
        raise SluiceError(ErrorCode.UNIMPLEMENTED, f"{message}. Use {NONE}", param="quantization")
    return Fp8Use.ALWAYS


def _has_units(device: torch.device) -> bool:
    return bool(torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY)


def fits(num_out: int, num_in: int) -> bool:
    """Return whether the units take matrices of this shape."""
    return num_out % _ALIGNMENT == num_in % _ALIGNMENT == 0


def quantize_rows(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes of each row and its scale, [..., 1] in float32."""
    largest = torch.linalg.vector_norm(values, torch.inf, -1, keepdim=True, dtype=torch.float32)
    scales = (largest / LARGEST).clamp_(min=SMALLEST_SCALE)
    return (values / scales).to(TYPE), scales


def dequantize(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the values of a matrix in float32, from scales of its rows or of each row's blocks of columns."""
    if scales.shape[-1] > 1:
        scales = scales.repeat_interleave(BLOCK, -1)[..., : codes.shape[-1]]
    return codes.float() * scales


Quantize = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""x -> the codes of its rows and their scales, as `quantize_rows`."""


@dataclass(frozen=True, slots=True)
class ScaledMatrix:
    """The codes [features out, features in] of a matrix, and the scales [features out, 1] of its rows."""

    codes: torch.Tensor
    scales: torch.Tensor

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None, quantize: Quantize = quantize_rows) -> torch.Tensor:
        """Return x @ matrix.T (+ bias) in the type of x."""
        codes, scales = quantize(x)
        # Not all devices give float32, and none adds a bias to it.
        is_wide = x.dtype == torch.float32
        dtype = torch.bfloat16 if is_wide and x.is_cuda else x.dtype
        product = torch._scaled_mm(
            codes,
            self.codes.T,
            scales,
            self.scales.T,
            bias=None if is_wide else bias,
            out_dtype=dtype,
            use_fast_accum=x.is_cuda,
        ).to(x.dtype)
        return product + bias if is_wide and bias is not None else product
