"""Decode steps from fixed buffers: one token of each sequence, padded to a few batch sizes. On a GPU each size is
captured in a CUDA graph once, and replayed with one launch; on the CPU the same is a call."""

import numpy as np
import torch

from sluice.engine.runners.base import StepBatch
from sluice.engine.runners.torch.cache import PagedKvCache
from sluice.engine.runners.torch.device import upload
from sluice.engine.runners.torch.model import TorchModel
from sluice.engine.runners.torch.step import BLOCK_SIZE, ChosenTokens, DeviceStep, Group, padded_tables, used_tables

LARGEST_BATCH = 256
"""Steps of more sequences take long enough for single launches."""
_STEP_FIELDS = 4
"""Numbers per sequence: token, position, block and slot."""


def batch_sizes(most: int) -> list[int]:
    """Return the sizes that steps are padded to: at least `most`, or LARGEST_BATCH."""
    sizes = [1, 2, 4, *range(8, LARGEST_BATCH + 1, 8)]
    needed = next((number for number, size in enumerate(sizes, 1) if size >= most), len(sizes))
    return sizes[:needed]


class DecodeGraphs:
    """Runs decode steps over `cache`, whose block `spare_block` takes what padding writes."""

    def __init__(self, model: TorchModel, cache: PagedKvCache, spare_block: int, max_num_seqs: int) -> None:
        self._model = model
        self._cache = cache
        self._spare_block = spare_block
        self._sizes = batch_sizes(max_num_seqs)
        device, most = model.device, self._sizes[-1]
        self._most_blocks = -(-model.max_model_len // BLOCK_SIZE)
        self._rows = torch.zeros((most, _STEP_FIELDS), dtype=torch.int32, device=device)
        self._tables = torch.zeros((most, self._most_blocks), dtype=torch.int32, device=device)
        self._captured: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        """By their sizes graphs, and the logits that each writes."""
        if device.type == "cuda":
            self._capture_all()

    def takes(self, batch: StepBatch) -> bool:
        """Return whether each sequence of the step has one token, and none an adapter."""
        num_seqs = len(batch.past_lens)
        return len(batch.token_ids) == num_seqs <= self._sizes[-1] and batch.adapters is None

    def run(self, batch: StepBatch, last: ChosenTokens | None = None) -> torch.Tensor:
        """Return the logits of all sequences, [num_seqs, row_size]; a buffer that the next run overwrites. `last` has
        the tokens of the step before if the batch has rows in their place."""
        num_seqs = len(batch.token_ids)
        size = next(each for each in self._sizes if each >= num_seqs)
        num_columns = self._fill(batch, size)
        if last is not None:
            self._rows[:size, 0] = last.put_into(self._rows[:size, 0])
        if size not in self._captured:
            return self._compute(size, num_columns)[:num_seqs]
        graph, logits = self._captured[size]
        graph.replay()
        return logits[:num_seqs]

    def _fill(self, batch: StepBatch, size: int) -> int:
        """Copy the step into the buffers, and return how many columns of the tables it needs. The arrays that are
        copied are new: the device may still have to copy those of the last step."""
        count, tables = len(batch.token_ids), padded_tables(batch)
        num_columns = int(min(-(-batch.max_context_len // BLOCK_SIZE), tables.shape[1]))
        rows, places = np.empty((size, _STEP_FIELDS), np.int32), batch.position_ids
        rows[:count, 0], rows[:count, 1], rows[:count, 3] = batch.token_ids, places, places % BLOCK_SIZE
        rows[:count, 2] = tables[np.arange(count), places // BLOCK_SIZE]
        rows[count:] = 0, 0, self._spare_block, 0
        padded = np.full((size, num_columns), self._spare_block, np.int32)
        padded[:count] = used_tables(tables[:, :num_columns], places // BLOCK_SIZE + 1)
        self._rows[:size] = upload(rows, self._rows.device)
        self._tables[:size, :num_columns] = upload(padded, self._rows.device)
        return num_columns

    def _compute(self, size: int, num_columns: int) -> torch.Tensor:
        token_ids, positions, blocks, slots = self._rows[:size].unbind(1)
        tables = self._tables[:size, :num_columns]
        step = DeviceStep(
            token_ids=token_ids,
            positions=positions,
            blocks=blocks,
            slots=slots,
            tables=tables,
            sequences=torch.arange(size, dtype=torch.int32, device=tables.device),
            past_lens=positions,
            num_decodes=size,
            begins=None,
            # A GPU's kernels leave out what is not written, and a graph holds no tensor of varying size.
            fresh=None if tables.is_cuda else blocks[slots == 0],
            sampled=None,
            groups=(Group(slice(None), size, 1, tables, positions),),
        )
        return self._model.run(step, self._cache)

    def _capture_all(self) -> None:
        """Capture a graph for each size, the largest first, whose memory the others share."""
        self._rows[:, 2] = self._tables[:] = self._spare_block
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self._sizes):
            self._compute(size, self._most_blocks)  # kernels are compiled, and libraries make their handles
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                logits = self._compute(size, self._most_blocks)
            self._captured[size] = graph, logits
