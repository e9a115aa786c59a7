"""The base of TorchScript and package sessions: converts tensors and runs a model under its options."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import ml_dtypes
import numpy as np
import torch

from sluice.errors import ErrorCode, SluiceError, invalid_argument
from sluice.serving.backends.arrays.session import ArraySession, UninterruptibleRun
from sluice.serving.backends.pytorch.options import TorchOptions
from sluice.serving.backends.pytorch.signature import ConfiguredTensors, check_output_index
from sluice.serving.spec import TensorSpec
from sluice.serving.tensors.byte_strings import object_array
from sluice.serving.tensors.datatypes import BYTES, DATA_TYPES
from sluice.serving.tensors.tensor import Array

_TRACE = "\nException raised from "
"""Start of the C++ stack trace in PyTorch's messages."""
_BF16 = DATA_TYPES["BF16"]
_TYPES = {getattr(torch, each.dtype.name): each for each in DATA_TYPES.values() if each is not BYTES}
"""Data types by torch's dtypes, which have numpy's names."""


class TorchSession(ArraySession):
    """A model that is open on one device."""

    library = "PyTorch"
    strings_are_text = True
    _output_positions: Mapping[str, int]
    """Position of each output among the results, unless these are a dictionary."""

    def __init__(self, tensors: ConfiguredTensors, options: TorchOptions, device: torch.device) -> None:
        self.signature = tensors.signature
        self._tensors = tensors
        self._options = options
        self._device = device

    def open_run(self) -> UninterruptibleRun:
        return UninterruptibleRun(self.run)

    def convert_error(self, error: Exception) -> SluiceError:
        """Convert an error to INTERNAL, as Triton does: PyTorch does not say whether the inputs caused it."""
        return SluiceError(ErrorCode.INTERNAL, f"PyTorch execute failure: {extract_message(error)}")

    def run(self, inputs: dict[str, Array], outputs: Sequence[str]) -> list[Array]:
        """Return the arrays of `outputs`. Blocks. Raises INVALID for unexpected results, else what PyTorch raises."""
        _set_switches(self._options)
        with torch.inference_mode(self._options.uses_inference_mode), torch.no_grad():
            values = {name: to_torch(array, self._device) for name, array in inputs.items()}
            results = self._compute(values)
            arrays = [self._array(results, name) for name in outputs]
        if self._options.cleans_cache:
            torch.cuda.empty_cache()
        return arrays

    @abstractmethod
    def _compute(self, values: dict[str, object]) -> Sequence[object] | dict[str, object]:
        """Run the model and return its results by position or by name."""

    def _array(self, results: Sequence[object] | dict[str, object], name: str) -> Array:
        tensor, is_batched = self._tensors.outputs[name], self._tensors.spec.max_batch_size > 0
        if isinstance(results, dict):
            if name not in results:
                reason = f"unexpected inference output '{name}', the model's results are: {', '.join(results)}"
                raise invalid_argument(reason)
            return to_array(results[name], tensor, is_batched)
        position = self._output_positions[name]
        check_output_index(name, position, len(results))
        return to_array(results[position], tensor, is_batched)


def extract_message(error: Exception) -> str:
    """Return PyTorch's message without the stack trace of its C++ code."""
    return str(error).partition(_TRACE)[0]


def _set_switches(options: TorchOptions) -> None:
    """Set the model's switches. Done before every run, because another model's run may have changed them."""
    # The first switch belongs to the thread, the others to the process.
    torch._C._set_graph_executor_optimize(options.is_optimized)
    if options.jit_profiling is not None:
        torch._C._jit_set_profiling_mode(options.jit_profiling)
    if options.jit_executor is not None:
        torch._C._jit_set_profiling_executor(options.jit_executor)
    if options.tensor_fuser is not None:
        torch._C._jit_set_texpr_fuser_enabled(options.tensor_fuser)
    torch.backends.cudnn.enabled = options.has_cudnn


def to_torch(array: Array, device: torch.device) -> torch.Tensor | list[str]:
    """Convert an input: to a tensor on `device`, for strings to a list of `str`."""
    if array.dtype == BYTES.dtype:
        strings: list[str] = array.ravel().tolist()
        return strings
    # A copy, because models write into their inputs (`relu_`), and others may read those of the request.
    own = array.copy()
    if own.dtype == _BF16.dtype:
        return torch.from_numpy(own.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(own).to(device)


def to_array(value: object, tensor: TensorSpec, is_batched: bool) -> Array:
    """Convert a result to the output `tensor`. Raises INVALID, in Triton's words, where it is something else."""
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        _check_type(tensor, BYTES.config_name)
        return object_array(value, (len(value),))
    if not isinstance(value, torch.Tensor):
        raise invalid_argument(f"output '{tensor.name}' must be of type Tensor or List[str].")
    _check_type(tensor, _TYPES[value.dtype].config_name if value.dtype in _TYPES else f"TYPE_{value.dtype}")
    if is_batched and not value.ndim:
        raise invalid_argument(f"output '{tensor.name}' is a scalar which is not supported.")
    return _copy(value)


def _copy(value: torch.Tensor) -> Array:
    """Return a copy: the tensor may be a weight or a state of the model, which the next run changes."""
    value = value.detach().cpu()
    if value.dtype == torch.bfloat16:
        bits: Array = value.contiguous().view(torch.int16).numpy()
        return np.array(bits.view(ml_dtypes.bfloat16))
    array: Array = value.numpy()
    return np.array(array)


def _check_type(tensor: TensorSpec, provided: str) -> None:
    if tensor.data_type.config_name != provided:
        raise invalid_argument(
            f"configuration expects datatype {tensor.data_type.config_name} for output '{tensor.name}', model provides "
            f"{provided}"
        )
