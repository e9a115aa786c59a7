"""Builders that the tests of the RAG models share."""

from collections.abc import Sequence

import numpy as np

from sluice.serving.tensors.tensor import Tensor


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }} '


def texts_tensor(name: str, rows: Sequence[Sequence[str | bytes]]) -> Tensor:
    """Build a BYTES tensor [rows, texts]."""
    encoded_rows = [[each.encode() if isinstance(each, str) else each for each in row] for row in rows]
    array = np.empty((len(rows), len(rows[0])), np.object_)
    for filled, row in zip(array, encoded_rows, strict=True):
        filled[:] = row
    return Tensor(name, "BYTES", array.shape, array=array)
