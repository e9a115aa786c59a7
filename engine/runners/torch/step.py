"""The tensors of one step, made of a `StepBatch`: where each token's keys and values go, and which sequences attend
together; and the tokens that the next step takes on the device before the host has seen them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from sluice.engine.arrays import FloatArray, Ids, IntArray
from sluice.engine.models.config.rope import Rope
from sluice.engine.runners.base import StepBatch
from sluice.engine.runners.torch.device import upload

BLOCK_SIZE = 32
"""Tokens in a block, as in all of Sluice's own runners: blocks of prefixes have the same tokens everywhere."""
_MOST_GATHERED = 1 << 11
"""Slots of a group of sequences that attend together: their keys and values are copied side by side."""


@dataclass(slots=True)
class Group:
    """Sequences with equally many new tokens, which attend in one product, each padded to the blocks of the longest."""

    rows: torch.Tensor | slice
    """The rows of their tokens, sequence by sequence."""
    num_seqs: int
    num_new: int
    tables: torch.Tensor
    """[num_seqs, blocks]; behind its last block a sequence has its first one again."""
    past_lens: torch.Tensor
    """[num_seqs]"""
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)
    biases: dict[int | None, torch.Tensor] = field(default_factory=dict)
    _pieces: dict[int, torch.Tensor] = field(default_factory=dict)

    def hidden(self, window: int | None) -> torch.Tensor:
        """Return which slots each new token does not see, [num_seqs, num_new, slots]."""
        if window not in self.masks:
            slots = torch.arange(self.tables.shape[1] * BLOCK_SIZE, device=self.tables.device)
            places = self.past_lens[:, None, None] + torch.arange(self.num_new, device=slots.device)[:, None]
            hidden = slots > places
            if window is not None:
                hidden |= slots <= places - window
            self.masks[window] = hidden
        return self.masks[window]

    def penalties(self, window: int | None) -> torch.Tensor:
        """Return what is added to scores, -inf for slots that a token does not see, [num_seqs, 1, num_new, slots]."""
        if window not in self.biases:
            hidden = self.hidden(window)[:, None]
            self.biases[window] = torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, -torch.inf)
        return self.biases[window]

    def pieces(self, num_heads: int) -> torch.Tensor:
        """Return where the keys of the sequences' blocks are among those of all blocks and heads, head by head: so they
        are gathered by one copy."""
        if num_heads not in self._pieces:
            heads = torch.arange(num_heads, device=self.tables.device)
            self._pieces[num_heads] = (self.tables[:, None] * num_heads + heads[:, None]).view(-1)
        return self._pieces[num_heads]


@dataclass(slots=True)
class DeviceStep:
    """One step on the device. Rows are tokens."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    blocks: torch.Tensor
    """The block of each token's keys and values."""
    slots: torch.Tensor
    """Their place in it."""
    tables: torch.Tensor
    """[num_seqs, most blocks]; what is beyond a sequence's own blocks is 0."""
    sequences: torch.Tensor
    """Each token's sequence: its row of `tables`."""
    past_lens: torch.Tensor
    """[num_seqs]"""
    num_decodes: int
    """Sequences that have one new token, before the first that has more."""
    begins: torch.Tensor | None
    """Where the tokens of the sequences behind those begin, counted from the first of them, and where they end; None
    without such sequences."""
    fresh: torch.Tensor | None
    """Blocks whose first token comes in this step; None without any."""
    sampled: torch.Tensor | None
    """The rows whose logits are needed; None for all."""
    groups: tuple[Group, ...]
    adapters: torch.Tensor | None = None
    """The number of each token's LoRA adapter; None where no token has one."""
    rotations: dict[Rope, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """Cosines and sines of the tokens' positions, by rope, in the form in which kernels want them."""
    earlier: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """Block, slot and existence of the tokens before each, by how many a convolution sees."""
    _places: torch.Tensor | None = None
    _cells: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def places(self) -> torch.Tensor:
        """The place of each token's keys and values among those of all blocks."""
        if self._places is None:
            self._places = self.blocks * BLOCK_SIZE + self.slots
        return self._places

    def cells(self, num_heads: int) -> torch.Tensor:
        """Return the place of the keys and values of each token and head among those of all blocks and heads."""
        if num_heads not in self._cells:
            heads = torch.arange(num_heads, device=self.blocks.device)
            cells = (self.blocks[:, None] * num_heads + heads) * BLOCK_SIZE + self.slots[:, None]
            self._cells[num_heads] = cells.view(-1)
        return self._cells[num_heads]


def make_step(batch: StepBatch, device: torch.device) -> DeviceStep:
    """Return the tensors of `batch` on the device."""
    num_new = np.diff(batch.subsequence_begins)
    num_decodes = int((num_new != 1).argmax()) if (num_new != 1).any() else len(num_new)
    tables = padded_tables(batch)
    sequences = np.repeat(np.arange(len(num_new)), num_new)
    blocks, slots = tables[sequences, batch.position_ids // BLOCK_SIZE], batch.position_ids % BLOCK_SIZE

    def on_device(values: NDArray[np.integer]) -> torch.Tensor:
        return upload(np.ascontiguousarray(values, np.int32), device)

    return DeviceStep(
        token_ids=on_device(batch.token_ids),
        positions=on_device(batch.position_ids),
        blocks=on_device(blocks),
        slots=on_device(slots),
        tables=on_device(tables),
        sequences=on_device(sequences),
        past_lens=on_device(batch.past_lens),
        num_decodes=num_decodes,
        begins=None if num_decodes == len(num_new) else on_device(batch.subsequence_begins[num_decodes:] - num_decodes),
        fresh=on_device(blocks[slots == 0]) if (slots == 0).any() else None,
        sampled=on_device(batch.sampled_rows),
        groups=tuple(_make_groups(batch, num_new, tables, on_device)),
        adapters=None if batch.adapters is None else on_device(batch.adapters),
    )


def padded_tables(batch: StepBatch) -> IntArray:
    """Return the block tables [num_seqs, most blocks], filled up with block 0."""
    begins = batch.block_indices_begins
    lengths = np.diff(begins)
    tables = np.zeros((len(lengths), int(lengths.max(initial=1))), np.int32)
    columns = np.arange(tables.shape[1])
    tables[columns < lengths[:, None]] = batch.block_indices
    return tables


def used_tables(tables: IntArray, num_blocks: IntArray) -> IntArray:
    """Return block tables with each sequence's first block in place of those that have nothing yet, or are none of its
    own: what those hold may be NaN."""
    return np.where(np.arange(tables.shape[1]) < num_blocks[:, None], tables, tables[:, :1])


def _make_groups(
    batch: StepBatch, num_new: IntArray, tables: IntArray, on_device: Callable[[NDArray[np.integer]], torch.Tensor]
) -> Iterator[Group]:
    num_blocks = -(-(batch.past_lens + num_new) // BLOCK_SIZE)
    for chosen in _grouped(num_new, num_blocks):
        count = int(num_new[chosen[0]])
        rows = batch.subsequence_begins[chosen][:, None] + np.arange(count)
        own = used_tables(tables[chosen, : num_blocks[chosen].max()], num_blocks[chosen])
        yield Group(
            rows=slice(None) if rows.size == len(batch.token_ids) else on_device(rows.reshape(-1)),
            num_seqs=len(chosen),
            num_new=count,
            tables=on_device(own),
            past_lens=on_device(batch.past_lens[chosen]),
        )


def _grouped(num_new: IntArray, num_blocks: IntArray) -> Iterator[NDArray[np.integer]]:
    """Yield the sequences that attend together: all if they are alike, else those with as many new tokens and about as
    many blocks."""
    order = np.arange(len(num_new))
    if (num_new != num_new[0]).any() or len(order) * num_blocks.max() * BLOCK_SIZE > _MOST_GATHERED:
        order = np.lexsort((num_blocks, num_new))
    new, slots = num_new[order].tolist(), (num_blocks[order] * BLOCK_SIZE).tolist()
    start = 0
    for end in range(1, len(order) + 1):
        if end == len(order) or new[end] != new[start] or (end + 1 - start) * slots[end] > _MOST_GATHERED:
            yield order[start:end]
            start = end


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
        """See `LaunchedStep`."""
        if self._arrival is not None:
            self._arrival.synchronize()
        token_ids, peaks = self._found.numpy()
        return token_ids.astype(np.intp), peaks.astype(np.float32)

    def put_into(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return `token_ids` [n] with the tokens of the rows that negative ones name, see `Runner.launch`."""
        rows = (-1 - token_ids).clamp(min=0)
        return torch.where(token_ids < 0, self.token_ids[rows].to(token_ids.dtype), token_ids)
