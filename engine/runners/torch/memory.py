"""The memory of a device: what is free for the KV cache once the weights are read, kernels are compiled and the largest
step has run."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from sluice.engine.arrays import IntArray
from sluice.engine.config import EngineConfig
from sluice.engine.runners.base import Draws, Statistic, StepBatch
from sluice.engine.runners.torch.cache import PagedKvCache, page_shapes
from sluice.engine.runners.torch.logits import DeviceLogits, fused_draw
from sluice.engine.runners.torch.model import TorchModel
from sluice.engine.runners.torch.step import BLOCK_SIZE, make_step
from sluice.errors import ErrorCode, SluiceError
from sluice.machine import available_bytes

_MOST_SPLIT_CONTEXT = 2048
"""Tokens from which on a decoding sequence is not divided among more programs, see `tiles.decode_tiles`."""


class DeviceMemory:
    """A device's memory, as far as the size of the cache depends on it: here the machine's, for a model on the CPU.
    Steps are small beside it, and not measured."""

    keeps_freed = False
    """Whether what a step has taken stays with the process, and is not free for others."""

    def free_bytes(self) -> int:
        """Return how many bytes can still be allocated."""
        return available_bytes()

    def release(self) -> None:
        """Give back what the process keeps without a use for it."""


class CudaMemory(DeviceMemory):
    """The memory of a GPU."""

    keeps_freed = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free_bytes(self) -> int:
        """See `DeviceMemory.free_bytes`."""
        return int(torch.cuda.mem_get_info(self._device)[0])

    def release(self) -> None:
        """See `DeviceMemory.release`."""
        torch.cuda.empty_cache()


def memory_of(device: torch.device) -> DeviceMemory:
    """Return the memory of a device."""
    return CudaMemory(device) if device.type == "cuda" else DeviceMemory()


def measure_free(config: EngineConfig, model: TorchModel, memory: DeviceMemory) -> int:
    """Return the bytes that are free for the KV cache. The weights must be read. Where freed memory stays with the
    process, all kernels and the largest step are run first, so that what they need is not counted. Raises UNAVAILABLE
    if the device has no room for it."""
    if memory.keeps_freed:
        try:
            warm_up(model, config)
            memory.release()  # what was taken to read the weights
            run_step(model, config.max_num_batched_tokens, config.max_num_seqs)
        except torch.OutOfMemoryError as error:
            raise _too_large(config, error) from error
    return int(config.memory_share * memory.free_bytes())


def run_step(model: TorchModel, num_tokens: int, num_seqs: int) -> None:
    """Run a step over a cache of one block, and draw a token of each sequence. The last sequence has most of the
    tokens, behind as many as the context holds; the others have one each."""
    num_new = np.full(num_seqs, 1, np.int32)
    num_new[-1] += num_tokens - num_seqs
    past_lens = np.zeros(num_seqs, np.int32)
    past_lens[-1] = max(model.max_model_len - num_new[-1], 0)
    rows = _run(model, past_lens, num_new)
    if not model.is_embedder:
        DeviceLogits(rows).draw(_draws(num_seqs))


def warm_up(model: TorchModel, config: EngineConfig) -> None:
    """Run steps that have every kernel compiled, so that no request waits for that."""
    limits = model.max_model_len, config.max_num_batched_tokens, config.max_num_seqs
    for past_lens, num_new in warm_up_steps(*limits):
        rows = _run(model, past_lens, num_new)
    if not model.is_embedder:
        plain = replace(_draws(len(rows)), typical_p=np.ones(len(rows)))
        DeviceLogits(rows, fused_draw(model.device)).draw(plain)


def warm_up_steps(max_model_len: int, max_num_batched_tokens: int, max_num_seqs: int) -> Iterator[tuple[IntArray, ...]]:
    """Yield past lengths and numbers of new tokens of steps. Together they have all sizes of tiles that attention can
    have to prompts, which depend on the number of their tokens, and all numbers of programs among which a decoding
    sequence can be divided, which is bounded by its context and by the number of sequences."""
    for num_tokens in sorted({2, max_num_batched_tokens}):
        yield np.zeros(1, np.int32), np.array([num_tokens], np.int32)
    longest = min(max_model_len, _MOST_SPLIT_CONTEXT)
    for context in sorted({*_powers_of_2(longest), longest}):
        yield np.array([context - 1], np.int32), np.ones(1, np.int32)
    for num_seqs in sorted({*_powers_of_2(max_num_seqs), max_num_seqs}):
        yield np.full(num_seqs, longest - 1, np.int32), np.ones(num_seqs, np.int32)


def _powers_of_2(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length())]


def _run(model: TorchModel, past_lens: IntArray, num_new: IntArray) -> torch.Tensor:
    """Run a step over a cache of one block, and return its logits."""
    cache = PagedKvCache(page_shapes(model.config), 1, model.dtype, model.device)
    return model.run(make_step(_batch(past_lens, num_new, model.max_model_len), model.device), cache)


def _batch(past_lens: IntArray, num_new: IntArray, max_model_len: int) -> StepBatch:
    """Return a step whose sequences all read and write block 0."""
    ends = num_new.cumsum()
    places = np.concatenate([past + np.arange(new) for past, new in zip(past_lens, num_new, strict=True)])
    num_blocks = -(-(past_lens + num_new) // BLOCK_SIZE)
    return StepBatch(
        token_ids=np.zeros(ends[-1], np.int32),
        # One sequence may stand for several, and models with embeddings of positions have no more than these.
        position_ids=np.minimum(places, max_model_len - 1).astype(np.int32),
        past_lens=past_lens,
        subsequence_begins=np.concatenate([[0], ends]).astype(np.int32),
        block_indices=np.zeros(num_blocks.sum(), np.int32),
        block_indices_begins=np.concatenate([[0], num_blocks.cumsum()]).astype(np.int32),
        sampled_rows=(ends - 1).astype(np.int32),
        max_context_len=int((past_lens + num_new).max()),
    )


def _draws(num_seqs: int) -> Draws:
    """Return what needs most memory: every option of all rows."""
    half = np.full(num_seqs, 0.5)
    return Draws(
        rows=np.arange(num_seqs),
        sharpness=half.astype(np.float32),
        top_k=np.full(num_seqs, 2, np.intp),
        top_p=half,
        min_p=half,
        typical_p=half,
        uniform=half,
        wanted=np.full(num_seqs, Statistic.MEAN),
    )


def _too_large(config: EngineConfig, error: Exception) -> SluiceError:
    reason = str(error).partition(". ")[0]
    message = f"beside the weights there is no memory for a step of {config.max_num_batched_tokens} tokens and "
    message += f"{config.max_num_seqs} sequences: {reason}; lower max_num_batched_tokens, or max_num_seqs"
    return SluiceError(ErrorCode.UNAVAILABLE, message, param="max_num_batched_tokens")
