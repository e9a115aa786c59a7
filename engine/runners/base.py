"""What the executor asks of a runtime: run one ragged batch, return logits of the rows that sample."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step's input in the ragged layout that paged-attention kernels share.

    Sequence i owns tokens `subsequence_begins[i]:subsequence_begins[i + 1]`; before them stand
    `past_lens[i]` tokens whose K and V are already in its blocks, which are
    `block_indices[block_indices_begins[i]:block_indices_begins[i + 1]]` and have room for the new tokens too.
    """

    token_ids: IntArray
    """[num_tokens]"""
    position_ids: IntArray
    """[num_tokens]"""
    past_lens: IntArray
    """[num_seqs]"""
    subsequence_begins: IntArray
    """[num_seqs + 1]"""
    block_indices: IntArray
    """[sum of block tables]"""
    block_indices_begins: IntArray
    """[num_seqs + 1]"""
    sampled_rows: IntArray
    """[num_sampled], indices into token_ids: the last token of each sequence that samples. May be empty."""
    max_context_len: int
    """Longest past + new of the batch."""


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """What a loaded runner is and holds."""

    runtime: str
    model_type: str
    dtype: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    block_size: int
    num_blocks: int
    kv_cache_dtype: str = ""
    quantization: str = "none"


class Runner(Protocol):
    """A model on a device with its KV blocks. Used from one thread."""

    @property
    def info(self) -> RunnerInfo: ...

    def run(self, batch: StepBatch) -> FloatArray:
        """One forward pass. Returns logits [num_sampled, vocab_size] float32.

        The array may be the runtime's own buffer: it is valid until the next `run`, and the
        caller may write to it.
        """
        ...

    def close(self) -> None:
        """Free the device memory. `run` must not be called again."""
        ...
