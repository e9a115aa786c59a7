"""Shapes of tensors that pass between models that batch and models that do not."""

from collections.abc import Sequence

from serving.tensors.tensor import Tensor

Shape = tuple[int, ...]


def agree(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two shapes can be the same one; -1 is any size."""
    return len(one) == len(other) and all(a == b or -1 in (a, b) for a, b in zip(one, other, strict=True))


def fitted(tensor: Tensor, dims: Sequence[int], *, is_batching: bool, batch_size: int) -> Tensor:
    """A tensor as who expects `dims` takes it, after a batch dimension where `is_batching`. Nothing is copied.

    `batch_size` is of the request that made it, 0 where that was to a model that does not batch. Between the two kinds
    a batch of one row is added or taken off; where the tensor fits as it is, a whole batch passes as one tensor.
    """
    shape = tensor.shape
    if is_batching == (batch_size > 0):
        return tensor
    if is_batching:
        return tensor.reshaped((1, *shape)) if agree(dims, shape) else tensor
    return tensor.reshaped(shape[1:]) if batch_size == 1 and not agree(dims, shape) else tensor
