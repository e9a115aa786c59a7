"""The executor's interface to a runtime: run one ragged batch, return the logits of the sampled rows."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from engine.arrays import ByteArray, FloatArray, IntArray

__all__ = ["AdapterRunner", "BlockRunner", "ByteArray", "FloatArray", "IntArray", "Runner", "RunnerInfo", "StepBatch"]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step's input in the ragged layout of paged-attention kernels.

    Sequence i has the tokens `subsequence_begins[i]:subsequence_begins[i + 1]`. They follow `past_lens[i]` tokens
    whose K and V are already in its blocks, `block_indices[block_indices_begins[i]:block_indices_begins[i + 1]]`,
    which have room for the new tokens too.
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
    """[num_sampled], indices into token_ids of the tokens whose logits are needed. May be empty."""
    max_context_len: int
    """Largest number of past and new tokens of a sequence in the batch."""
    adapters: IntArray | None = None
    """[num_tokens], the number of the LoRA adapter that computes each token, 0 for none. None where all are 0."""


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """The properties of a loaded runner."""

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
    embedding_size: int = 0
    """Elements of a hidden state, for a model that returns those in the place of logits; 0 for others."""

    @property
    def row_size(self) -> int:
        """Elements of what `run` returns for a token."""
        return self.embedding_size or self.vocab_size


class Runner(Protocol):
    """A model on a device with its KV blocks. Used from one thread."""

    info: RunnerInfo

    def run(self, batch: StepBatch) -> FloatArray:
        """Run one forward pass. Returns logits [num_sampled, row_size] float32. The array may be the runtime's own
        buffer: it is valid until the next `run`, and the caller may write to it."""
        ...

    def close(self) -> None:
        """Free the device memory. `run` must not be called afterwards."""
        ...


@runtime_checkable
class AdapterRunner(Runner, Protocol):
    """A runner that applies LoRA adapters, known by numbers of 1 or more that the executor never gives out twice."""

    def read_adapter(self, number: int, name: str, folder: Path) -> Callable[[], None]:
        """Read PEFT's adapter in `folder`, and return what puts it into use between two steps, on the runner's thread.
        This itself runs on any thread, one at a time with `drop_adapters`; what these return is called in their order.
        `name` is for messages. Raises SluiceError for one that does not fit the model; nothing has changed then."""
        ...

    def drop_adapters(self, numbers: Collection[int]) -> Callable[[], None]:
        """Prepare, as `read_adapter`, to free adapters that no further step uses."""
        ...


@runtime_checkable
class BlockRunner(Runner, Protocol):
    """A runner whose KV blocks can be copied out and back in, bit by bit."""

    block_bytes: int
    """Bytes of one block: keys and values of all layers, with the scales of a quantized cache."""
    block_identity: str
    """Text that changes with everything that the bytes of a block depend on, beside the model's files: the library's
    version, the types and the layout."""

    def read_blocks(self, blocks: Sequence[int], contents: Sequence[ByteArray]) -> None:
        """Copy each block to the array in its place of `contents`, each [block_bytes]."""
        ...

    def write_blocks(self, blocks: Sequence[int], contents: Sequence[ByteArray]) -> None:
        """Copy to each block what `read_blocks` has read, of this block or another."""
        ...
