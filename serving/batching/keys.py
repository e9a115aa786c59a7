"""Which requests may share a batch: those whose tensors can be stacked."""

from serving.request import InferRequest
from serving.spec import ModelSpec


class BatchKeys:
    """As in Triton, only what may differ is compared: variable sizes, and which of optional inputs there are."""

    def __init__(self, spec: ModelSpec) -> None:
        has_optional = any(each.is_optional for each in spec.inputs.values())
        compared = {each.name: -1 in each.dims and not each.allows_ragged for each in spec.inputs.values()}
        self._compared = [(name, has_shape) for name, has_shape in compared.items() if has_shape or has_optional]

    def of(self, request: InferRequest) -> object:
        """Equal for requests that may share a batch."""
        if not self._compared:
            return None
        inputs = request.inputs
        return tuple(
            None if name not in inputs else inputs[name].shape[1:] if has_shape else ()
            for name, has_shape in self._compared
        )
