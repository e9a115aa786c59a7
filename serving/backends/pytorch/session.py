"""What TorchScript models and AOTInductor packages have in common: arrays in, arrays out, under the model's options."""

from abc import abstractmethod
from collections.abc import Sequence

import torch

from serving.backends.arrays.session import ArraySession, WholeRun
from serving.backends.pytorch.configured import ConfiguredTensors
from serving.backends.pytorch.naming import check_output_index
from serving.backends.pytorch.options import TorchOptions
from serving.backends.pytorch.tensors import array_of, value_of
from serving.tensors.tensor import Array
from sluice.errors import ErrorCode, SluiceError

_TRACE = "\nException raised from "
"""What C++ adds to its messages: the lines of its own stack."""


class TorchSession(ArraySession):
    """A model that is open on one device."""

    library = "PyTorch"
    strings_are_text = True

    def __init__(self, tensors: ConfiguredTensors, options: TorchOptions, device: torch.device) -> None:
        self.signature = tensors.signature
        self._tensors = tensors
        self._options = options
        self._device = device

    def open_run(self) -> WholeRun:
        return WholeRun(self.run)

    def failure_of(self, error: Exception) -> SluiceError:
        """INTERNAL, as in Triton: PyTorch does not say whose fault it is."""
        return SluiceError(ErrorCode.INTERNAL, f"PyTorch execute failure: {message_of(error)}")

    def run(self, inputs: dict[str, Array], outputs: Sequence[str]) -> list[Array]:
        """The arrays of `outputs`. Blocks. Raises SluiceError INVALID for results that the configuration does not fit,
        else what PyTorch raises.
        """
        _set_switches(self._options)
        with torch.inference_mode(self._options.uses_inference_mode), torch.no_grad():
            values = {name: value_of(array, self._device) for name, array in inputs.items()}
            results = self._results(values)
            arrays = [self._array(results, name) for name in outputs]
        if self._options.cleans_cache:
            torch.cuda.empty_cache()
        return arrays

    @abstractmethod
    def _results(self, values: dict[str, object]) -> Sequence[object] | dict[str, object]:
        """Of one run: by place or by name."""

    @abstractmethod
    def _place(self, name: str) -> int:
        """Of an output among the results."""

    def _array(self, results: Sequence[object] | dict[str, object], name: str) -> Array:
        tensor, is_batched = self._tensors.outputs[name], self._tensors.spec.max_batch_size > 0
        if isinstance(results, dict):
            if name not in results:
                reason = f"unexpected inference output '{name}', the model's results are: {', '.join(results)}"
                raise SluiceError(ErrorCode.INVALID, reason)
            return array_of(results[name], tensor, is_batched)
        check_output_index(name, self._place(name), len(results))
        return array_of(results[self._place(name)], tensor, is_batched)


def message_of(error: Exception) -> str:
    """What PyTorch says, without the stack of its C++."""
    return str(error).partition(_TRACE)[0]


def _set_switches(options: TorchOptions) -> None:
    """Before every run, as another model's run may have set them otherwise."""
    # The first is each thread's own; the others are the process's.
    torch._C._set_graph_executor_optimize(options.is_optimized)
    if options.jit_profiling is not None:
        torch._C._jit_set_profiling_mode(options.jit_profiling)
    if options.jit_executor is not None:
        torch._C._jit_set_profiling_executor(options.jit_executor)
    if options.tensor_fuser is not None:
        torch._C._jit_set_texpr_fuser_enabled(options.tensor_fuser)
    torch.backends.cudnn.enabled = options.has_cudnn
