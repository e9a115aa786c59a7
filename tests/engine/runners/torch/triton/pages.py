"""Random keys and values in pages, and attention to them in plain torch and float64."""

from collections.abc import Sequence
from typing import Any

import torch

from tests.engine.runners.torch.triton.cases import Case

BLOCK = 32
_SPARE = 2
"""Blocks of no sequence, all NaN."""


class Pages:
    """The cache of several sequences. Each slot without a token is NaN, and so is what the tables name past an end."""

    def __init__(self, case: Case, dtype: torch.dtype, device: str) -> None:
        counts = [-(-length // BLOCK) for length in case.lengths]
        order = (torch.randperm(sum(counts)) + _SPARE).tolist()
        self.tables = torch.zeros(len(counts), max(counts) + 1, dtype=torch.int32)
        shape = sum(counts) + _SPARE, case.num_kv_heads, BLOCK
        self.keys = torch.full((*shape, case.head_dim), torch.nan, dtype=dtype)
        values = torch.full((*shape, case.value_dim or case.head_dim), torch.nan, dtype=dtype)
        self.tokens: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Keys and values of each sequence in order, [num_kv_heads, length, size], float64."""
        for row, (length, count) in enumerate(zip(case.lengths, counts, strict=True)):
            blocks = [order.pop() for _ in range(count)]
            self.tables[row, :count] = torch.tensor(blocks)
            keys = self._fill(self.keys, blocks, length)
            latent = None if case.latent_dim is None else keys[..., : case.latent_dim]
            self.tokens.append((keys, self._fill(values, blocks, length) if latent is None else latent))
        self.keys, self.tables = self.keys.to(device), self.tables.to(device)
        self.values = None if case.latent_dim is not None else values.to(device)

    def _fill(self, pages: torch.Tensor, blocks: Sequence[int], length: int) -> torch.Tensor:
        tokens = torch.randn(pages.shape[1], length, pages.shape[3]).to(pages.dtype)
        for place, block in enumerate(blocks):
            part = tokens[:, place * BLOCK : (place + 1) * BLOCK]
            pages[block, :, : part.shape[1]] = part
        return tokens.double()


def attended(query: torch.Tensor, tokens: tuple[torch.Tensor, torch.Tensor], case: Case, sinks: Any) -> torch.Tensor:
    """Attend from `query` [num_new, num_heads, head_dim], the last tokens of a sequence. All is float64."""
    keys, values = (each.repeat_interleave(case.num_heads // case.num_kv_heads, 0) for each in tokens)
    scores = torch.einsum("qhd,hkd->hqk", query, keys) * case.head_dim**-0.5
    if case.softcap is not None:
        scores = torch.tanh(scores / case.softcap) * case.softcap
    places = torch.arange(keys.shape[1])
    own = places[-len(query) :, None]
    hidden = places > own
    if case.window is not None:
        hidden |= places <= own - case.window
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double().view(-1, 1, 1).expand(-1, len(query), 1)), -1)
    weights = torch.softmax(scores, -1)[..., : keys.shape[1]]
    return torch.einsum("hqk,hkd->qhd", weights, values)
