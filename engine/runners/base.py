"""The executor's interface to a runtime: run one ragged batch, return the logits of the sampled rows.

The logits stay where the runtime computed them. The sampler asks for what it needs: the most likely tokens, draws,
edits, log probabilities. Its parameters come as arrays on the host, for many rows at once.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum, auto
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sluice.engine.arrays import ByteArray, Doubles, FloatArray, Ids, IntArray, Mask, Rows
from sluice.engine.types import TokenLogprob
from sluice.errors import ErrorCode, SluiceError


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


# -- what the sampler asks of logits

NO_TOP_K = 2**31
"""Value of top_k if it is off: more than any vocabulary has."""


class Statistic(IntEnum):
    """The statistic of all tokens' weights that a row's draw needs."""

    NOTHING = auto()
    """The filters keep the likeliest tokens, whatever the others weigh."""
    TOTAL = auto()
    """Their sum: top_p keeps a share of it."""
    MEAN = auto()
    """Their sum and the mean of their logarithm: typical_p keeps those near to it."""
    CHUNKS = auto()
    """The sum of each chunk: without a filter, any token may be drawn."""


@dataclass(frozen=True, slots=True)
class Draws:
    """The parameters of the rows that draw at random, one entry a row; all arrays are [n]."""

    rows: Rows
    """Rows of the logits."""
    sharpness: FloatArray
    """1 / temperature."""
    top_k: NDArray[np.intp]
    """NO_TOP_K if it is off."""
    top_p: Doubles
    min_p: Doubles
    typical_p: Doubles
    uniform: Doubles
    """The random number of the token to draw, in [0, 1)."""
    wanted: NDArray[np.intp]
    """A `Statistic` for each row."""

    def select(self, which: Rows | Mask | slice) -> "Draws":
        """Return the entries `which`."""
        return Draws(*(getattr(self, name)[which] for name in _DRAW_FIELDS))

    @property
    def has_top_k(self) -> Mask:
        return self.top_k < NO_TOP_K


_DRAW_FIELDS = tuple(each.name for each in fields(Draws))


class TokenMask(Protocol):
    """A set of tokens that may come next."""

    def apply(self, row: FloatArray) -> None:
        """Set the logits [vocab_size] of all other tokens to -inf, in place."""
        ...

    def pack(self, vocab_size: int) -> IntArray:
        """Return one bit for each token, [ceil(vocab_size / 32)]: bit i % 32 of word i // 32 is set if i may come."""
        ...


@dataclass(frozen=True, slots=True)
class Places:
    """Some logits: that of token `token_ids[i]` in row `rows[i]`, with a number for each."""

    rows: Rows
    token_ids: IntArray
    values: FloatArray
    """[n]; empty where all are treated alike."""


@dataclass(frozen=True, slots=True)
class Edits:
    """Edits of logits, in the order in which they apply, which is that of transformers. A place occurs once in each of
    the first three."""

    added: Places | None = None
    """Logits to which a value is added."""
    repeated: Places | None = None
    """Logits divided by a value if they are positive, else multiplied (CTRL, arXiv 1909.05858; as in transformers)."""
    subtracted: Places | None = None
    """Logits from which a value is subtracted."""
    allowed: Places | None = None
    """Each row that occurs here keeps these tokens alone; all others get -inf."""
    banned: Places | None = None
    """Logits that become -inf."""
    masks: Sequence[tuple[int, TokenMask]] = field(default_factory=list)
    """Rows, each with the tokens that it keeps."""


class Logits(Protocol):
    """The logits of a step [num_rows, row_size], wherever they are. Used from the runner's thread. All arrays that come
    in and go out are the host's. A method's work on a device is done when it returns numbers."""

    @property
    def num_rows(self) -> int: ...

    def argmax(self, rows: Rows) -> tuple[Ids, FloatArray]:
        """Return the id of the largest logit of each of `rows` [n], and that logit. The id is the smallest one among
        equals. Where the logit is not finite, or no number, the row has no meaningful token."""
        ...

    def draw(self, draws: Draws) -> tuple[Ids, FloatArray]:
        """Draw token ids [n] from the softmax of each row at its temperature, after its filters. Returns also the
        largest logits, as `argmax` does. The same random number draws the same token on every device, unless rounding
        decides."""
        ...

    def argmax_and_draw(self, rows: Rows, draws: Draws) -> tuple[Ids, FloatArray]:
        """Return what `argmax` of `rows` [m] returns, and behind it what `draw` does, [m + n], in one wait."""
        ...

    def edit(self, edits: Edits) -> None:
        """Change logits in place."""
        ...

    def take(self, rows: Rows) -> "Logits":
        """Return a copy of `rows`, which may repeat, for edits that must not reach the original."""
        ...

    def logprobs(self, rows: Rows, token_ids: NDArray[np.integer], num_top: Sequence[int]) -> list[TokenLogprob]:
        """Return the log probabilities of `token_ids` [n] in `rows` [n] under the softmax of the logits, each with the
        `num_top[i]` most likely tokens: the likeliest first, smaller ids first among equals."""
        ...

    def read(self, rows: Rows | None = None) -> FloatArray:
        """Return `rows` [n] on the host, [n, row_size] float32; by default all. It may be a view of the logits: it is
        valid as long as they are, and what is written to it may change them."""
        ...


LaunchedStep = Callable[[], tuple[Ids, FloatArray]]
"""Waits for a step that the device works on. Returns the token of each sampled row [num_sampled], and the row's largest
logit: where that is not finite, or no number, the row has no meaningful token. Raises if the step failed."""


class Runner(ABC):
    """A model on a device with its KV blocks. Used from one thread. What only some runners do has a default here."""

    info: RunnerInfo

    @abstractmethod
    def run(self, batch: StepBatch) -> Logits:
        """Run one forward pass and wait for its end: forecasts learn from how long this takes. Returns logits
        [num_sampled, row_size]. They may be in the runtime's own buffer: they are valid until the next `run`, and the
        caller may edit them."""

    @abstractmethod
    def close(self) -> None:
        """Free the device memory. `run` must not be called afterwards."""

    # -- LoRA adapters, known by numbers of 1 or more that the executor never gives out twice

    def read_adapter(self, number: int, name: str, folder: Path) -> Callable[[], None]:
        """Read PEFT's adapter in `folder`, and return what puts it into use between two steps, on the runner's thread.
        This itself runs on any thread, one at a time with `drop_adapters`; what these return is called in their order.
        `name` is for messages. Raises SluiceError for one that does not fit the model; nothing has changed then."""
        message = f"the runtime {self.info.runtime} has no LoRA adapters; {name} cannot be loaded"
        raise SluiceError(ErrorCode.UNIMPLEMENTED, message, param="lora_modules")

    def drop_adapters(self, numbers: Collection[int]) -> Callable[[], None]:
        """Prepare, as `read_adapter`, to free adapters that no further step uses."""
        raise NotImplementedError

    # -- lookahead: what such a runner is asked for takes effect in order. A step, or a copy of blocks, sees what the
    # steps launched before it write, and writes after them.

    looks_ahead = False
    """Whether the loop launches its next step before the tokens of the last one are known."""

    def launch(self, batch: StepBatch, draws: Draws | None) -> LaunchedStep:
        """Launch a step, and do not wait for it. Each row gets its most likely token; those of `draws` draw theirs.

        A token id of `batch` below 0 is not known yet: -1 - r stands for the token of row r of the step that was
        launched last. The executor waits for a step before it launches the next but one."""
        raise NotImplementedError

    # -- copies of KV blocks, bit by bit

    block_bytes = 0
    """Bytes of one block: keys and values of all layers, with the scales of a quantized cache. 0 where blocks cannot be
    copied."""
    block_identity = ""
    """Text that changes with everything that the bytes of a block depend on, beside the model's files: the library's
    version, the types and the layout."""

    def read_blocks(self, blocks: Sequence[int], contents: Sequence[ByteArray]) -> None:
        """Copy each block to the array in its place of `contents`, each [block_bytes]."""
        raise NotImplementedError

    def write_blocks(self, blocks: Sequence[int], contents: Sequence[ByteArray]) -> None:
        """Copy to each block what `read_blocks` has read, of this block or another."""
        raise NotImplementedError
