"""What a runner compiles: a decoder's graph with its limits, wherever it came from."""

from dataclasses import dataclass
from typing import Protocol

import openvino as ov

from sluice.errors import invalid


class Weights(Protocol):
    """The memory that a graph's constants point into; it must live as long as the compiled model."""

    def release_pages(self) -> None:
        """Give resident pages back to the system; touched again, they are read from their file."""
        ...


@dataclass(frozen=True, slots=True)
class Decoder:
    """A paged-attention graph with the inputs and the output that `build_model` describes."""

    model: ov.Model
    weights: Weights
    model_type: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    """Longest prompt + output of one sequence, in tokens."""
    quantization: str
    """Type of the weights in memory, where they are compressed: none, int8, int4."""


def choose_max_model_len(asked: int | None, default: int, most: int | None = None) -> int:
    """What is asked for within what the model was made for. Raises SluiceError(INVALID).

    `most` is more than the `default` where the model can be stretched beyond it.
    """
    if asked is None:
        return default
    most = default if most is None else most
    if not 1 <= asked <= most:
        raise invalid("max_model_len", f"max_model_len must be 1 to {most}, what the model was made for; got {asked}")
    return asked
