"""Requests of nobody: they stand in for sequences that have none now, so that the others keep their rows."""

from serving.batching.controls import ControlInputs
from serving.batching.sequences.zeros import zeros
from serving.job import Job
from serving.request import InferRequest, InferResponse


class FillerJob(Job):
    """Its responses go nowhere, and no statistics know of it."""

    __slots__ = ()

    def __init__(self, beside: Job, request: InferRequest) -> None:
        """In a batch with `beside`."""
        super().__init__(beside._model, request, _ignore)

    def respond(self, response: InferResponse) -> None:
        self.is_finished = self.is_finished or response.is_final


def filler_request(like: InferRequest, controls: ControlInputs) -> InferRequest:
    """Inputs of the same types and shapes without values, states too, and controls that say: not ready."""
    inputs = {name: zeros(name, tensor.data_type, tensor.shape) for name, tensor in like.inputs.items()}
    return InferRequest(inputs | controls.of_filler(), requested_outputs=like.requested_outputs)


def _ignore(_: InferResponse) -> None:
    """Of a request that nobody made."""
