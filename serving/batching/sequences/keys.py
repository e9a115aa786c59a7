"""Which requests of different sequences may share a batch."""

from serving.batching.keys import BatchKeys
from serving.request import InferRequest
from serving.spec import ModelSpec


class SequenceKeys(BatchKeys):
    """As for other requests; states of variable size are stacked like inputs, and so compared like them."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self._states = [state.input_name for state in spec.states if -1 in state.dims] if spec.max_batch_size else []

    def of(self, request: InferRequest) -> object:
        key = super().of(request)
        if not self._states:
            return key
        return key, tuple(request.inputs[name].shape for name in self._states)
