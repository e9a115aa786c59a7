"""Draws tokens from rows of logits in torch, on any device, by the rule of `sluice.engine.sampling.draw`.

Each filter keeps the tokens that weigh at least as much as the lightest that it keeps, so each is a threshold, found
by bisection over the bits of a float: 31 masked sums, whatever the distribution. The host knows which rows have which
filter, so no result is waited for.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from sluice.engine.arrays import Mask
from sluice.engine.runners.base import Draws
from sluice.engine.runners.torch.device import upload as device_copy
from sluice.engine.sampling.softmax import CHUNK

_TINY = torch.finfo(torch.float32).tiny
_INFINITE = 0x7F800000
"""The bits of infinity: no finite float that is not negative has larger ones."""
_HIGHEST_BIT = 30


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of rows on the device, all [n] float64 but `sharpness`, which is float32."""

    sharpness: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    typical_p: torch.Tensor
    uniform: torch.Tensor


def upload(draws: Draws, device: torch.device) -> Parameters:
    """Copy the parameters of `draws` to the device, in one piece."""
    columns = (draws.sharpness, draws.top_k, draws.top_p, draws.min_p, draws.typical_p, draws.uniform)
    sharpness, *others = device_copy(np.stack(columns).astype(np.float64), device)
    return Parameters(sharpness.float(), *others)


def draw(logits: torch.Tensor, peaks: torch.Tensor, draws: Draws, parameters: Parameters) -> torch.Tensor:
    """Return token ids [n] drawn from `logits` [n, vocab_size]. `peaks` [n] float32 are the largest of them. A row
    where that is not finite has no meaningful token."""
    weights = weigh(logits, peaks, parameters.sharpness)
    _filter(weights, draws.has_top_k, _keep_top_k, parameters.top_k)
    _filter(weights, draws.top_p < 1, _keep_top_p, parameters.top_p)
    if (draws.min_p > 0).any():
        weights.mul_(weights >= parameters.min_p.float()[:, None])
    _filter(weights, draws.typical_p < 1, _keep_typical, parameters.typical_p)
    return _invert(weights, parameters.uniform).clamp(max=logits.shape[1] - 1)


def weigh(logits: torch.Tensor, peaks: torch.Tensor, sharpness: torch.Tensor) -> torch.Tensor:
    """Return the weights of the tokens, [n, whole chunks] float32; the rest of the last chunk weighs 0."""
    width = -(-logits.shape[1] // CHUNK) * CHUNK
    weights = torch.zeros(len(logits), width, device=logits.device)
    scaled = torch.sub(logits, peaks[:, None], out=weights[:, : logits.shape[1]])
    scaled.mul_(sharpness[:, None]).exp_()
    return weights


def _filter(
    weights: torch.Tensor,
    which: Mask,
    keep: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    parameter: torch.Tensor,
) -> None:
    """Set the weights of the rows `which` that `keep` does not keep to 0."""
    if which.all():
        weights.mul_(keep(weights, parameter))
    elif which.any():
        rows = device_copy(np.flatnonzero(which), weights.device)
        part = weights[rows]
        weights[rows] = part * keep(part, parameter[rows])


def _keep_top_k(weights: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    keys = weights.view(torch.int32)
    return keys >= _threshold(keys, lambda kept: kept.sum(1) >= top_k)


def _keep_top_p(weights: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    return _keep_share(weights, weights.view(torch.int32), top_p * sum_rows(weights))


def _keep_typical(weights: torch.Tensor, typical_p: torch.Tensor) -> torch.Tensor:
    """Keep the tokens whose logarithm is nearest to the mean, see `sluice.engine.sampling.softmax`."""
    logs = weights.clamp(min=_TINY).log_()
    mass = sum_rows(weights)
    mean = (sum_rows(weights * logs) / mass).float()
    distance = logs.sub_(mean[:, None]).abs_()
    return _keep_share(weights, _INFINITE - distance.view(torch.int32), typical_p * mass)


def _keep_share(weights: torch.Tensor, keys: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
    """Keep those of the largest keys that first weigh `goal` [n] together, and all that have the same key as the last
    of these."""
    return keys >= _threshold(keys, lambda kept: sum_rows(weights * kept) >= goal)


def _threshold(keys: torch.Tensor, enough: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return the largest threshold [n, 1] for which `enough(keys >= threshold)` [n] holds. `keys` are int32, not
    negative: the bits of floats that are not negative rise as they do."""
    least = torch.zeros(len(keys), 1, dtype=torch.int32, device=keys.device)
    for bit in range(_HIGHEST_BIT, -1, -1):
        tried = least | (1 << bit)
        least = torch.where(enough(keys >= tried)[:, None], tried, least)
    return least


def sum_rows(weights: torch.Tensor) -> torch.Tensor:
    """Return the sum [n] float64 of each row of `weights` [n, whole chunks]."""
    return _sum_chunks(weights).double().sum(1)


def _sum_chunks(weights: torch.Tensor) -> torch.Tensor:
    return weights.unflatten(1, (-1, CHUNK)).sum(2)


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return where the cumulative weight first passes the share `uniform` of its sum."""
    cumulative = _sum_chunks(weights).double().cumsum(1)
    target = uniform * cumulative[:, -1]
    chunk = _first_above(cumulative, target)[:, None]
    before = torch.where(chunk > 0, cumulative.gather(1, (chunk - 1).clamp(min=0)), 0.0)[:, 0]
    chunks = weights.unflatten(1, (-1, CHUNK))
    within = chunks.gather(1, chunk[:, :, None].expand(-1, -1, CHUNK))[:, 0].double().cumsum(1)
    return chunk[:, 0] * CHUNK + _first_above(within, target - before)


def _first_above(cumulative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    # Rounding may lift a target to the sum or above it; then it is the last place with a weight.
    below = torch.nextafter(cumulative[:, -1], torch.full_like(target, -torch.inf))
    return (cumulative <= torch.minimum(target, below)[:, None]).sum(1)
