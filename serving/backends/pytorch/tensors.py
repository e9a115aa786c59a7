"""Arrays as PyTorch's tensors and back."""

import ml_dtypes
import numpy as np
import torch

from serving.spec import TensorSpec
from serving.tensors.datatypes import BYTES, DATA_TYPES
from serving.tensors.tensor import Array
from sluice.errors import ErrorCode, SluiceError

_BF16 = DATA_TYPES["BF16"]
_TYPES = {
    torch.bool: DATA_TYPES["BOOL"],
    torch.uint8: DATA_TYPES["UINT8"],
    torch.uint16: DATA_TYPES["UINT16"],
    torch.uint32: DATA_TYPES["UINT32"],
    torch.uint64: DATA_TYPES["UINT64"],
    torch.int8: DATA_TYPES["INT8"],
    torch.int16: DATA_TYPES["INT16"],
    torch.int32: DATA_TYPES["INT32"],
    torch.int64: DATA_TYPES["INT64"],
    torch.float16: DATA_TYPES["FP16"],
    torch.float32: DATA_TYPES["FP32"],
    torch.float64: DATA_TYPES["FP64"],
    torch.bfloat16: _BF16,
}


def value_of(array: Array, device: torch.device) -> torch.Tensor | list[str]:
    """What a model takes for it: a tensor on `device`, for strings a list of `str`."""
    if array.dtype == BYTES.dtype:
        strings: list[str] = array.ravel().tolist()
        return strings
    # A copy: models write into their inputs (`relu_`), and others read the request's.
    own = array.copy()
    if own.dtype == _BF16.dtype:
        return torch.from_numpy(own.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(own).to(device)


def array_of(value: object, tensor: TensorSpec, is_batched: bool) -> Array:
    """A result as the output `tensor`. Raises SluiceError INVALID, in Triton's words, where it is something else."""
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        _check_type(tensor, BYTES.config_name)
        strings = np.empty(len(value), BYTES.dtype)
        strings[:] = value
        return strings
    if not isinstance(value, torch.Tensor):
        raise _invalid(f"output '{tensor.name}' must be of type Tensor or List[str].")
    _check_type(tensor, _TYPES[value.dtype].config_name if value.dtype in _TYPES else f"TYPE_{value.dtype}")
    if is_batched and not value.ndim:
        raise _invalid(f"output '{tensor.name}' is a scalar which is not supported.")
    return _owned(value)


def _owned(value: torch.Tensor) -> Array:
    """A copy: the tensor may be a weight or a state of the model, which the next run changes."""
    value = value.detach().cpu()
    if value.dtype == torch.bfloat16:
        bits: Array = value.contiguous().view(torch.int16).numpy()
        return np.array(bits.view(ml_dtypes.bfloat16))
    array: Array = value.numpy()
    return np.array(array)


def _check_type(tensor: TensorSpec, provided: str) -> None:
    if tensor.data_type.config_name != provided:
        raise _invalid(
            f"configuration expects datatype {tensor.data_type.config_name} for output '{tensor.name}', model provides "
            f"{provided}"
        )


def _invalid(message: str) -> SluiceError:
    return SluiceError(ErrorCode.INVALID, message)
