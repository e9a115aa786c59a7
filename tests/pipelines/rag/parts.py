"""Builders that the tests of the RAG models share."""

from collections.abc import Sequence

import numpy as np

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.model import Model
from sluice.serving.tensors.tensor import Tensor


class Lookup:
    """Loaded models by name."""

    def __init__(self, **models: Model) -> None:
        self.models = models

    def find(self, name: str, version: int = -1) -> Model:
        if name not in self.models:
            raise SluiceError(ErrorCode.NOT_FOUND, f"Request for unknown model: '{name}' is not found")
        return self.models[name]


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }} '


def texts_tensor(name: str, rows: Sequence[Sequence[str | bytes]]) -> Tensor:
    """Build a BYTES tensor [rows, texts]."""
    encoded_rows = [[each.encode() if isinstance(each, str) else each for each in row] for row in rows]
    array = np.empty((len(rows), len(rows[0])), np.object_)
    for filled, row in zip(array, encoded_rows, strict=True):
        filled[:] = row
    return Tensor(name, "BYTES", array.shape, array=array)
