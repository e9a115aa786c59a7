"""Tokens that the next step takes on the device before the host has seen them."""

import numpy as np
import torch

from sluice.engine.arrays import FloatArray, Ids


class ChosenTokens:
    """The tokens of a step's rows, on their way to the host."""

    def __init__(self, token_ids: torch.Tensor, peaks: torch.Tensor) -> None:
        """Both are [num_rows]: the tokens, and the rows' largest logits."""
        self.token_ids = token_ids
        found = torch.stack((token_ids.double(), peaks.double()))  # float64 has room for either
        self._found = torch.empty(found.shape, dtype=found.dtype, pin_memory=found.is_cuda)
        self._found.copy_(found, non_blocking=True)
        self._arrival = torch.cuda.Event() if found.is_cuda else None
        if self._arrival is not None:
            self._arrival.record()

    def wait(self) -> tuple[Ids, FloatArray]:
        """See `LaunchedStep.wait`."""
        if self._arrival is not None:
            self._arrival.synchronize()
        token_ids, peaks = self._found.numpy()
        return token_ids.astype(np.intp), peaks.astype(np.float32)

    def put_into(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return `token_ids` [n] with the tokens of the rows that negative ones name, see `LookaheadRunner.launch`."""
        rows = (-1 - token_ids).clamp(min=0)
        return torch.where(token_ids < 0, self.token_ids[rows].to(token_ids.dtype), token_ids)
