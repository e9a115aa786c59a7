"""Attention over pages in plain torch, on any device: it gathers the blocks of each sequence, and computes with copies
in float32. It is the reference for other kernels, and the way on the CPU."""

from collections.abc import Iterator

import torch

from engine.models.kernels import Heads, Scores
from engine.runners.torch.cache import Pages
from engine.runners.torch.step import Group, Step

_MOST_SCORES = 1 << 23
"""Scores that are computed at once: 32 MiB."""


def store(pages: Pages, key: torch.Tensor, value: torch.Tensor, step: Step) -> None:
    """Write the keys and values [num_tokens, num_heads, size] of this step's tokens to their places."""
    if step.fresh is not None:
        # What is not written may hold NaN of another sequence, and a weight of 0 times NaN is NaN.
        pages.values[step.fresh] = 0
    pages.keys[step.blocks, :, step.slots] = key
    pages.values[step.blocks, :, step.slots] = value


class GatheredAttention:
    """Attention of one model. What it gathers lies in memory that is kept for the next layer: fresh memory would take
    the system several times as long to give as the copy takes."""

    def __init__(self) -> None:
        self._memory: dict[str, torch.Tensor] = {}

    def attend(
        self,
        query: torch.Tensor,
        pages: Pages,
        step: Step,
        heads: Heads,
        scores: Scores,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend causally: query [num_tokens, num_heads, head_dim] -> [num_tokens, num_heads, value_dim]. The keys and
        values of this step's tokens must be stored. `sinks` [num_heads] are scores that give nothing."""
        attended = query.new_empty((*query.shape[:2], heads.value_dim or heads.head_dim))
        for group in step.groups:
            attended[group.rows] = self._attend_group(query[group.rows], pages, group, heads, scores, sinks)
        return attended

    def _attend_group(
        self,
        query: torch.Tensor,
        pages: Pages,
        group: Group,
        heads: Heads,
        scores: Scores,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        keys, values = self._gather("keys", pages.keys, group), self._gather("values", pages.values, group)
        hidden = group.hidden(scores.window)
        kv, size = heads.num_kv_heads, query.shape[-1]
        by_sequence = query.float().view(group.num_seqs, group.num_new, kv, -1, size).permute(0, 2, 3, 1, 4)
        if sinks is not None:
            sinks = sinks.view(1, kv, -1, 1, 1)
        parts = [
            _mix(by_sequence[..., rows, :], keys, values, hidden[:, rows], scores, sinks)
            for rows in _parts(group, heads.num_heads, keys.shape[2])
        ]
        mixed = parts[0] if len(parts) == 1 else torch.cat(parts, 3)
        return mixed.permute(0, 3, 1, 2, 4).reshape(len(query), heads.num_heads, -1).to(query.dtype)

    def _gather(self, name: str, pages: torch.Tensor, group: Group) -> torch.Tensor:
        """Copy the blocks of the group's sequences to [num_seqs, num_heads, slots, size] in float32."""
        num_heads, block_size, size = pages.shape[1:]
        # Head by head, so that it takes one copy.
        rows = group.tables[:, None] * num_heads + torch.arange(
            num_heads, dtype=group.tables.dtype, device=pages.device
        ).view(-1, 1)
        shape = rows.numel(), block_size * size
        copied = self._room(name, shape, pages)
        torch.index_select(pages.view(-1, shape[1]), 0, rows.view(-1), out=copied)
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
