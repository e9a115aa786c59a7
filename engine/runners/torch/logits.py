"""Logits that stay on the device. The host sends parameters and gets numbers back, one transfer each way for most
calls. No row is copied to the host but by `read`, which is for logits that a client asked for."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from sluice.engine.arrays import FloatArray, Ids, Rows
from sluice.engine.runners.base import Draws, Edits, Logits, Places, TokenMask
from sluice.engine.runners.torch.device import upload as device_copy
from sluice.engine.runners.torch.draw import Parameters, draw, sum_rows, upload, weigh
from sluice.engine.sampling.cores import Cores
from sluice.engine.sampling.host_logits import HostLogits
from sluice.engine.sampling.logprobs import list_logprobs
from sluice.engine.types import TokenLogprob

FusedDraw = Callable[..., torch.Tensor]
"""A kernel that draws without typical_p: (logits, sharpness, top_k, top_p, min_p, uniform) to token ids."""

_BLOCK = 2**25
"""Logits that are computed on at a time, which bounds the memory beside them: 256 rows of 131,072 tokens take about
half a gigabyte."""
_WORD_BITS = 32
_LOW_WORD = 2**32 - 1


def fused_draw(device: torch.device) -> FusedDraw | None:
    """Return the kernel of a device that draws; None where it has none."""
    if device.type != "cuda":
        return None
    from sluice.engine.runners.torch.triton.sampling import (
        draw as fused,  # imports Triton, which a torch for CPUs lacks
    )

    return fused


def wrap_logits(values: torch.Tensor, cores: Cores, fused: FusedDraw | None = None) -> Logits:
    """Return the logits of a step, [num_rows, row_size]. Those in the host's memory are left to numpy on `cores`,
    without a copy, because it samples several times faster there than torch's operations."""
    if values.device.type == "cpu":
        return HostLogits(values.float().numpy(), cores)
    return DeviceLogits(values, fused)


class DeviceLogits:
    """The `Logits` of a torch tensor on any device, of any type of floats. It computes in float32.

    A row that a grammar masks fails if any of its logits is NaN or +inf; on the host, a mask that lists its tokens
    removes such a logit unseen.
    """

    __slots__ = ("_fused_draw", "values")

    def __init__(self, values: torch.Tensor, fused: FusedDraw | None = None) -> None:
        """`values` are [num_rows, row_size]; `edit` writes to them if they are contiguous and float32. `fused` draws
        in place of torch's operations where it can."""
        self.values = values
        self._fused_draw = fused

    @property
    def num_rows(self) -> int:
        return len(self.values)

    def argmax(self, rows: Rows) -> tuple[Ids, FloatArray]:
        """See `Logits.argmax`."""
        return _fetch([self._argmax(rows)])

    def choose(self, draws: Draws | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the token of each row [num_rows], the most likely one or that of `draws`, and the largest logits. They
        stay on the device, and nothing is waited for. A row of NaN has some token too."""
        peaks, token_ids = self.values.max(dim=1)
        for drawing in [] if draws is None else [draws.select(block) for block in self._blocks(len(draws.rows))]:
            drawn, _ = self._draw(drawing)
            token_ids[self._upload(drawing.rows)] = drawn.long().clamp(0, self.values.shape[1] - 1)
        return token_ids, peaks

    def draw(self, draws: Draws) -> tuple[Ids, FloatArray]:
        """See `Logits.draw`."""
        return _fetch(self._draw_blocks(draws))

    def argmax_and_draw(self, rows: Rows, draws: Draws) -> tuple[Ids, FloatArray]:
        """See `Logits.argmax_and_draw`."""
        return _fetch([self._argmax(rows), *self._draw_blocks(draws)])

    def _argmax(self, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        peaks, token_ids = self._pick(rows).max(dim=1)
        return token_ids, peaks

    def _draw_blocks(self, draws: Draws) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [self._draw(draws.select(block)) for block in self._blocks(len(draws.rows))]

    def _draw(self, draws: Draws) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self._pick(draws.rows)
        peaks = logits.amax(dim=1).float()
        parameters = upload(draws, logits.device)
        if self._fused_draw is None or (draws.typical_p < 1).any():
            return draw(logits, peaks, draws, parameters), peaks
        return _call_fused(self._fused_draw, logits, parameters), peaks

    def edit(self, edits: Edits) -> None:
        """See `Logits.edit`."""
        self.values = self.values.float().contiguous()
        places = self._upload_places(edits)
        flat = self.values.view(-1)
        for name, (index, values) in places.items():
            if name == "added":
                flat[index] += values
            elif name == "repeated":
                scores = flat[index]
                flat[index] = torch.where(scores > 0, scores / values, scores * values)
            elif name == "subtracted":
                flat[index] -= values
            elif name == "allowed":
                self._restrict(index)
            else:
                flat.index_fill_(0, index, -torch.inf)
        for block in self._blocks(len(edits.masks)):
            self._mask(edits.masks[block])

    def _upload_places(self, edits: Edits) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Copy the places of all kinds in two pieces: indices of the flattened logits, and values."""
        given = {name: places for name in _PLACES if (places := getattr(edits, name)) is not None}
        if not given:
            return {}
        indices = [_flat_index(places, self.values.shape[1]) for places in given.values()]
        values = [places.values for places in given.values()]
        device_indices = self._upload(np.concatenate(indices)).split([len(each) for each in indices])
        device_values = self._upload(np.concatenate(values)).split([len(each) for each in values])
        return dict(zip(given, zip(device_indices, device_values, strict=True), strict=True))

    def _restrict(self, index: torch.Tensor) -> None:
        flat = self.values.view(-1)
        kept = flat[index]
        self.values.index_fill_(0, index // self.values.shape[1], -torch.inf)
        flat[index] = kept

    def _mask(self, masks: Sequence[tuple[int, TokenMask]]) -> None:
        vocab_size = self.values.shape[1]
        rows = self._upload(np.array([row for row, _ in masks], np.intp))
        words = self._upload(np.stack([mask.pack(vocab_size) for _, mask in masks]))
        shifts = torch.arange(_WORD_BITS, dtype=torch.int32, device=words.device)
        is_allowed = (words[:, :, None] >> shifts & 1).flatten(1)[:, :vocab_size]
        picked = self.values[rows]
        self.values[rows] = torch.where(is_allowed > 0, picked, picked - torch.inf)

    def take(self, rows: Rows) -> "DeviceLogits":
        """See `Logits.take`."""
        return DeviceLogits(self.values[self._upload(rows)], self._fused_draw)

    def logprobs(self, rows: Rows, token_ids: NDArray[np.integer], num_top: Sequence[int]) -> list[TokenLogprob]:
        """See `Logits.logprobs`."""
        if not len(rows):
            return []
        count = min(max(num_top), self.values.shape[1])
        found = [self._logprobs(rows[block], token_ids[block], count) for block in self._blocks(len(rows))]
        own, best, values = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return list_logprobs(token_ids, own, best, values, num_top)

    def _logprobs(self, rows: Rows, token_ids: NDArray[np.integer], count: int) -> tuple[FloatArray, Ids, FloatArray]:
        """Return the log probabilities [n] of the tokens, and the ids [n, count] and log probabilities of the likeliest
        ones."""
        logits = self._pick(rows).float()
        best = _largest(logits, count)
        wanted = torch.cat([self._upload(token_ids.astype(np.int64))[:, None], best], dim=1)
        peaks = logits.amax(dim=1)
        log_mass = sum_rows(weigh(logits, peaks, torch.ones_like(peaks))).log_() + peaks
        found = logits.gather(1, wanted) - log_mass[:, None]
        fetched = torch.cat([found, best.double()], dim=1).cpu().numpy()
        return fetched[:, 0], fetched[:, 1 + count :].astype(np.intp), fetched[:, 1 : 1 + count]

    def read(self, rows: Rows | None = None) -> FloatArray:
        """See `Logits.read`. Copies the rows to the host."""
        picked = self.values if rows is None else self._pick(rows)
        values: FloatArray = picked.float().cpu().numpy()
        return values

    def _pick(self, rows: Rows) -> torch.Tensor:
        """Return `rows` [n]. Consecutive ones are not copied."""
        first, count = (int(rows[0]), len(rows)) if len(rows) else (0, 0)
        if (rows == np.arange(first, first + count)).all():
            return self.values[first : first + count]
        return self.values[self._upload(rows)]

    def _blocks(self, num_rows: int) -> list[slice]:
        size = max(_BLOCK // self.values.shape[1], 1)
        return [slice(begin, min(begin + size, num_rows)) for begin in range(0, num_rows, size)]

    def _upload(self, array: NDArray[np.generic]) -> torch.Tensor:
        return device_copy(array, self.values.device)


_PLACES = ("added", "repeated", "subtracted", "allowed", "banned")
"""The fields of `Edits` that are places, in their order."""


def _flat_index(places: Places, row_size: int) -> NDArray[np.int64]:
    return places.rows.astype(np.int64) * row_size + places.token_ids


def _call_fused(fused: FusedDraw, logits: torch.Tensor, parameters: Parameters) -> torch.Tensor:
    top_k, vocab_size = parameters.top_k, logits.shape[1]
    return fused(
        logits,
        parameters.sharpness,
        top_k.clamp(max=vocab_size).to(torch.int32),
        parameters.top_p,
        parameters.min_p,
        parameters.uniform,
    )


def _largest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ids [n, count] of the largest logits, largest first, smaller ids first among equal ones. `topk` keeps
    no order among equals: value and place are packed into one integer."""
    bits = (logits + 0.0).view(torch.int32).long()  # adding 0 makes 0 of -0
    rising = torch.where(bits >= 0, bits, -1 - (bits & 0x7FFFFFFF))
    places = torch.arange(logits.shape[1] - 1, -1, -1, device=logits.device)
    keys = (rising << _WORD_BITS) | places
    found = keys.topk(count, dim=1).values & _LOW_WORD
    return logits.shape[1] - 1 - found


def _fetch(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[Ids, FloatArray]:
    """Copy the token ids and the largest logits of all parts to the host, in one piece. float64 has room for either."""
    joined = [torch.stack((token_ids.double(), peaks.double())) for token_ids, peaks in parts]
    found = torch.cat(joined, 1).cpu().numpy()
    return found[0].astype(np.intp), found[1].astype(np.float32)
