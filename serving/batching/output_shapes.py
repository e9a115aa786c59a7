"""Outputs with a `reshape`: the backend gives them one shape, and clients another."""

from serving.check import reshaped_dims
from serving.spec import ModelSpec
from serving.tensors.tensor import Tensor


class OutputShapes:
    """Turns what the backend gives into what the configuration promises."""

    def __init__(self, spec: ModelSpec) -> None:
        self._dims = {
            each.name: (each.reshape, each.dims) for each in spec.outputs.values() if each.reshape is not None
        }
        self._num_leading = 1 if spec.max_batch_size > 0 else 0

    @property
    def are_any(self) -> bool:
        return bool(self._dims)

    def restored(self, outputs: list[Tensor]) -> list[Tensor]:
        """The same values in the promised shapes. One that the backend shaped otherwise stays as it is."""
        return [self._restored(each) for each in outputs]

    def _restored(self, tensor: Tensor) -> Tensor:
        found = self._dims.get(tensor.name)
        if found is None:
            return tensor
        given, promised = found
        leading, dims = tensor.shape[: self._num_leading], tensor.shape[self._num_leading :]
        if len(dims) != len(given):
            return tensor
        return tensor.reshaped(leading + reshaped_dims(dims, given, promised))
