"""Texts in and out of tensors, row by row; where the model has no batch dimension there is one row."""

from collections.abc import Sequence

import numpy as np

from serving.request import InferRequest
from serving.tensors.tensor import Tensor
from sluice.errors import invalid


def text_rows(request: InferRequest, name: str, *, is_batched: bool) -> list[list[str]]:
    """The texts of each row of the input `name`. Raises SluiceError INVALID for what is not UTF-8."""
    array = request.inputs[name].array
    rows = array.reshape(array.shape[0], -1) if is_batched else array.reshape(1, -1)
    try:
        return [[element.decode() for element in row] for row in rows.tolist()]
    except UnicodeDecodeError:
        raise invalid(name, f"input '{name}' must be text in UTF-8") from None


def text_tensor(name: str, rows: Sequence[Sequence[bytes]], *, is_batched: bool) -> Tensor:
    """[rows, longest row], shorter rows filled up with empty elements; [elements] without a batch dimension."""
    width = max(map(len, rows))
    array = np.full((len(rows), width), b"", np.object_)
    for filled, row in zip(array, rows, strict=True):
        filled[: len(row)] = row
    return Tensor.of(name, array if is_batched else array.reshape(width))
