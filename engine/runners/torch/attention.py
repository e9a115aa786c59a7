"""Attention over pages in plain torch, on any device: it gathers the blocks of each sequence, and computes with copies
in float32, by torch's own kernel where that has the scores' options. It is the reference for other kernels, and the way
on the CPU."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from sluice.engine.models.kernels import Heads, Scores
from sluice.engine.runners.torch.cache import Pages
from sluice.engine.runners.torch.latent import LatentProjection
from sluice.engine.runners.torch.step import DeviceStep, Group

_MOST_SCORES = 1 << 23
"""Scores that are computed at once: 32 MiB."""


def store(pages: Pages, key: torch.Tensor, value: torch.Tensor | None, step: DeviceStep) -> None:
    """Write the keys and values [num_tokens, num_heads, size] of this step's tokens to their places. There are no
    values where the pages have none."""
    cells = step.cells(pages.keys.shape[1])
    for stored, tokens in ((pages.keys, key), (pages.values, value)):
        if stored is None or tokens is None:
            continue
        if step.fresh is not None:
            # What is not written may hold NaN of another sequence, and a weight of 0 times NaN is NaN.
            stored[step.fresh] = 0
        stored.view(-1, stored.shape[3]).index_copy_(0, cells, tokens.reshape(-1, stored.shape[3]))


class GatheredAttention:
    """Attention of one model. What it gathers lies in memory that is kept for the next layer: fresh memory would take
    the system several times as long to give as the copy takes."""

    def __init__(self) -> None:
        self._memory: dict[str, torch.Tensor] = {}

    def attend(
        self,
        query: torch.Tensor,
        pages: Pages,
        step: DeviceStep,
        heads: Heads,
        scores: Scores,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend causally: query [num_tokens, num_heads, head_dim] -> [num_tokens, num_heads, value_dim]. The keys and
        values of this step's tokens must be stored. `sinks` [num_heads] are scores that give nothing."""
        attended = query.new_empty((*query.shape[:2], heads.value_dim or heads.head_dim))
        for group in step.groups:
            attended[group.rows] = self._attend_group(query[group.rows], pages, group, scores, sinks)
        return attended

    def attend_latent(
        self,
        query: torch.Tensor,
        pages: Pages,
        step: DeviceStep,
        projection: LatentProjection,
        scores: Scores,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend to latent pages, see `TorchKernels.attend_short`. Where it takes less arithmetic, as it does for most
        of a prompt, the keys and values of all heads are made of what the pages have."""
        heads = projection.heads
        attended = query.new_empty((*query.shape[:2], heads.value_dim))
        for group in step.groups:
            own, own_query = projection.of(group.rows), query[group.rows]
            keys = self._gather("keys", pages.keys, group)
            if heads.is_shorter_in_full(group.num_new, keys.shape[2]):
                full = own.expand(keys[:, 0], group.num_new)
                attended[group.rows] = self._mix_group(own_query, *full, group, scores, sinks)
            else:
                mixed = self._mix_group(own.absorb(own_query), keys, keys[..., : heads.rank], group, scores, sinks)
                attended[group.rows] = own.values(mixed)
        return attended

    def _attend_group(
        self,
        query: torch.Tensor,
        pages: Pages,
        group: Group,
        scores: Scores,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        assert pages.values is not None, "latent pages are for `attend_latent`"
        keys, values = self._gather("keys", pages.keys, group), self._gather("values", pages.values, group)
        return self._mix_group(query, keys, values, group, scores, sinks)

    def _mix_group(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        group: Group,
        scores: Scores,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        if scores.softcap is None and sinks is None:
            return _attend_plainly(query, keys, values, group, scores)
        hidden = group.hidden(scores.window)
        kv, (num_heads, size) = keys.shape[1], query.shape[1:]
        by_sequence = query.float().view(group.num_seqs, group.num_new, kv, -1, size).permute(0, 2, 3, 1, 4)
        if sinks is not None:
            sinks = sinks.view(1, kv, -1, 1, 1)
        parts = [
            _mix(by_sequence[..., rows, :], keys, values, hidden[:, rows], scores, sinks)
            for rows in _parts(group, num_heads, keys.shape[2])
        ]
        mixed = parts[0] if len(parts) == 1 else torch.cat(parts, 3)
        return mixed.permute(0, 3, 1, 2, 4).reshape(len(query), num_heads, -1).to(query.dtype)

    def _gather(self, name: str, pages: torch.Tensor, group: Group) -> torch.Tensor:
        """Copy the blocks of the group's sequences to [num_seqs, num_heads, slots, size] in float32."""
        num_heads, block_size, size = pages.shape[1:]
        pieces = group.pieces(num_heads)
        shape = len(pieces), block_size * size
        copied = self._room(name, shape, pages)
        torch.index_select(pages.view(-1, shape[1]), 0, pieces, out=copied)
        if pages.dtype != torch.float32:
            copied = self._room(f"{name} in float32", shape, pages, torch.float32).copy_(copied)
        return copied.view(group.num_seqs, num_heads, -1, size)

    def _room(
        self, name: str, shape: tuple[int, int], pages: torch.Tensor, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        count = shape[0] * shape[1]
        kept = self._memory.get(name)
        if kept is None or kept.numel() < count:
            kept = self._memory[name] = pages.new_empty(count, dtype=dtype)
        return kept[:count].view(shape)


def _attend_plainly(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: Group, scores: Scores
) -> torch.Tensor:
    """Return what the rows of `query` [rows, num_heads, head_dim] see, [rows, num_heads, value_dim]."""
    by_sequence = query.float().view(group.num_seqs, group.num_new, *query.shape[1:]).transpose(1, 2)
    attended = F.scaled_dot_product_attention(
        *(by_sequence, keys, values),
        attn_mask=group.penalties(scores.window),
        scale=scores.scale,
        enable_gqa=keys.shape[1] < by_sequence.shape[1],
    )
    return attended.transpose(1, 2).reshape(*query.shape[:2], -1).to(query.dtype)


def _parts(group: Group, num_heads: int, num_slots: int) -> Iterator[slice]:
    """Yield the new tokens of each sequence in parts whose scores fit."""
    count = max(1, _MOST_SCORES // (group.num_seqs * num_heads * num_slots))
    yield from (slice(start, start + count) for start in range(0, group.num_new, count))


def _mix(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    hidden: torch.Tensor,
    scores: Scores,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return the mixed values [num_seqs, kv, heads of each, num_new, value_dim] for query of that shape in head_dim."""
    num_seqs, kv, each, num_new, size = query.shape
    # Queries that share a key head are rows of one matrix, so that keys and values are read once.
    products = torch.matmul(query.reshape(num_seqs, kv, each * num_new, size), keys.mT).mul_(scores.scale)
    if scores.softcap is not None:
        products = products.div_(scores.softcap).tanh_().mul_(scores.softcap)
    by_head = products.view(num_seqs, kv, each, num_new, -1)
    by_head.masked_fill_(hidden[:, None, None], -torch.inf)
    if sinks is None:
        weights = torch.softmax(by_head, -1)
    else:
        with_sinks = torch.cat((by_head, sinks.expand(num_seqs, -1, -1, num_new, 1)), -1)
        weights = torch.softmax(with_sinks, -1)[..., :-1]
    mixed = torch.matmul(weights.reshape(products.shape), values)
    return mixed.view(num_seqs, kv, each, num_new, -1)
