"""Finds some hundred of the likeliest tokens of rows of logits.

The vocabulary is divided into stripes, and those with the largest maxima are searched: a token that is larger than the
largest maximum of the other stripes is in one of them. A stripe is every n-th token, so that the maxima of all stripes
are computed by long vector operations.
"""

from dataclasses import dataclass

import numpy as np

from sluice.engine.arrays import FloatArray, Ids, Rows

STRIPE = 8
"""Tokens in a stripe, and maxima that are compared at once in the search for the largest of them."""


@dataclass(frozen=True, slots=True)
class TopTokens:
    """Some tokens of each row, including all above its `bound`, in order of their ids."""

    values: FloatArray
    """Logits, [n, num_tokens]."""
    token_ids: Ids
    """[n, num_tokens]"""
    bound: FloatArray
    """[n]; -inf if all tokens of the row are included."""


def stripe_maxima(values: FloatArray, out: FloatArray | None = None) -> FloatArray:
    """Return the largest of `values` [n, any] in each stripe, [n, stride]; c is of those at c, c + stride, ..."""
    stride = values.shape[1] // STRIPE
    maxima: FloatArray = values[:, : stride * STRIPE].reshape(len(values), STRIPE, stride).max(axis=1, out=out)
    return maxima


def all_tokens(logits: FloatArray, rows: Rows) -> TopTokens:
    """Return all tokens of `rows` [n]."""
    shape = (len(rows), logits.shape[1])
    token_ids = np.broadcast_to(np.arange(logits.shape[1]), shape)
    return TopTokens(logits[rows], token_ids, np.full(len(rows), -np.inf, np.float32))


def top_tokens(logits: FloatArray, rows: Rows, maxima: FloatArray, coarse: FloatArray, num_stripes: int) -> TopTokens:
    """Return the tokens of the `num_stripes` with the largest `maxima`, of each of `rows` [n], and those that are in no
    stripe; all tokens if there are not twice as many stripes. At least `num_stripes` of them are the largest, but for
    ties at the bound. `coarse` are the stripe maxima of `maxima`."""
    if maxima.shape[1] < 2 * num_stripes:
        return all_tokens(logits, rows)
    stripes, bound = _largest(maxima, num_stripes, coarse)
    token_ids = _members(stripes, maxima.shape[1], logits.shape[1])
    return TopTokens(take(logits, rows, token_ids), token_ids, bound)


def take(values: FloatArray, rows: Rows, places: Ids) -> FloatArray:
    """Return the elements of `values` [any, width] at the `places` [n, any] of each of `rows` [n]."""
    if not values.flags.c_contiguous:
        return values[rows[:, None], places]
    taken: FloatArray = values.reshape(-1).take(places + (rows * values.shape[1])[:, None])  # in half of the time
    return taken


def _largest(values: FloatArray, count: int, maxima: FloatArray | None = None) -> tuple[Ids, FloatArray]:
    """Return the places [n, count] of the largest of `values` [n, any], ascending, and the largest [n] of the rest.
    `maxima` are the stripe maxima of `values`, if they are known."""
    width = values.shape[1]
    if width <= 2 * STRIPE * count:
        return _largest_of_few(values, count)
    stripes, bound = _largest(
        stripe_maxima(values) if maxima is None else maxima, count
    )  # the others have none of the largest
    places = _members(stripes, width // STRIPE, width)
    index = np.arange(len(values))
    chosen, bound_of_chosen = _largest_of_few(take(values, index, places), count)
    return places[index[:, None], chosen], np.maximum(bound, bound_of_chosen)


def _largest_of_few(values: FloatArray, count: int) -> tuple[Ids, FloatArray]:
    num_rows, width = values.shape
    bound = np.sort(values, axis=1)[:, -count - 1]
    is_chosen = values > bound[:, None]
    is_tied = np.count_nonzero(is_chosen, axis=1) < count
    if not is_tied.any():
        return np.flatnonzero(is_chosen).reshape(num_rows, count) % width, bound
    places = np.empty((num_rows, count), np.intp)
    places[~is_tied] = np.flatnonzero(is_chosen[~is_tied]).reshape(-1, count) % width
    places[is_tied] = np.sort(np.argpartition(values[is_tied], -count - 1, axis=1)[:, -count:], axis=1)
    return places, bound


def _members(stripes: Ids, stride: int, size: int) -> Ids:
    """Return the places of all members of `stripes` [n, any], then those of the rest in no stripe, ascending."""
    in_stripes = (np.arange(STRIPE)[:, None] * stride + stripes[:, None, :]).reshape(len(stripes), -1)
    if stride * STRIPE == size:
        return in_stripes
    rest = np.broadcast_to(np.arange(stride * STRIPE, size), (len(stripes), size - stride * STRIPE))
    return np.concatenate([in_stripes, rest], axis=1)
