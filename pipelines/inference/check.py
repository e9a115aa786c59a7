"""Whether a request fits its model; what does not is said in Triton's words."""

from pipelines.inference.spec import ModelSpec
from pipelines.inference.types import InferRequest


def check_request(request: InferRequest, spec: ModelSpec) -> None:
    """Set the request's batch size. Raises SluiceError INVALID for what does not fit."""
    if spec.max_batch_size > 0:
        request.batch_size = next((tensor.shape[0] for tensor in request.inputs.values() if tensor.shape), 1)
