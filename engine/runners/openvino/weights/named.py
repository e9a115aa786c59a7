"""A checkpoint's weights under the names of a plain text model."""

from dataclasses import dataclass

import openvino as ov

from sluice.engine.models.weights.names import TextModelTensors
from sluice.engine.runners.openvino.weights.checkpoint import CheckpointWeights


@dataclass(frozen=True, slots=True)
class NamedWeights:
    """Constants by plain names."""

    checkpoint: CheckpointWeights
    names: TextModelTensors

    def constant(self, name: str, shape: tuple[int, ...]) -> ov.Node:
        """See `CheckpointWeights.constant`."""
        return self.checkpoint.constant(self.names.use(name), shape)

    def matrices(self, name: str, shape: tuple[int, ...]) -> list[ov.Node]:
        """See `CheckpointWeights.matrices`."""
        return self.checkpoint.matrices(self.names.use(name), shape)
