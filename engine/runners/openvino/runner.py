"""The `Runner` of OpenVINO on the CPU."""

import logging
import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov

from sluice.engine.arrays import ByteArray, FloatArray, IntArray
from sluice.engine.config import EngineConfig
from sluice.engine.models.weights.files import NONE
from sluice.engine.runners.base import Logits, Runner, RunnerInfo, StepBatch
from sluice.engine.runners.cache_size import check_cache_limits, choose_num_blocks
from sluice.engine.runners.openvino.adapters import AdapterStacks
from sluice.engine.runners.openvino.cache import CacheLayout, KvCache
from sluice.engine.runners.openvino.graph.adapters import AdapterInputs
from sluice.engine.runners.openvino.graph.model import MAX_CONTEXT_LEN, STEP_INPUTS, Decoder
from sluice.engine.runners.openvino.graph.paged_attention import BLOCK_SIZE
from sluice.engine.runners.openvino.source import open_decoder
from sluice.engine.sampling.cores import Cores
from sluice.engine.sampling.host_logits import HostLogits
from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.machine import available_bytes, num_cores

logger = logging.getLogger(__name__)

DEVICE = "CPU"
_COMPUTE_TYPES = {"bf16": ov.Type.bf16, "f32": ov.Type.f32}
_CACHE_TYPES = {**_COMPUTE_TYPES, "u8": ov.Type.u8}
_INITIAL_CAPACITY = 1024
"""Initial length of an input vector."""

UNPADDED_ROWS = 32
"""Up to this many rows, a step is bound by reading the weights, whatever its size."""
FINE_ROWS = 64
FINE, COARSE = 4, 16
"""Numbers of rows that are fast are multiples of FINE up to FINE_ROWS, and of COARSE beyond."""
COMPRESSED_ROWS = 2
"""Least rows of a step in f32 with compressed weights: the kernel for a single row adds in another order, and would
give a sequence other logits alone than in a batch."""
_COPIED = 128
"""Rows of scores that take about as much memory as the copies of keys and values."""
MAX_PADDED_SIZE = 1 << 17
"""Sequences times blocks times rows of a part: about 130 MB of scores in a model of eight heads."""


class OpenVinoRunner(Runner):
    """A model with its KV blocks on the CPU. `decoder` owns the memory that the compiled constants point into. The
    session's cache has one block more than `info` says, to which padding writes."""

    def __init__(
        self, session: "InferenceSession", decoder: Decoder, info: RunnerInfo, num_threads: int | None = None
    ) -> None:
        """`num_threads` compute on the logits, by default one for each core."""
        self._session = session
        self._decoder = decoder
        self.info = info
        self.block_bytes = session.layout.block_bytes
        cpu = ",".join(cpu_capabilities())  # kernels of another CPU round differently
        self.block_identity = f"{ov.get_version()} {info.dtype} {info.quantization} {cpu} {session.layout.description}"
        self._scratch_block = info.num_blocks
        self._cores = Cores(num_threads)
        is_compressed = decoder.quantization != NONE
        self._least_rows = COMPRESSED_ROWS if is_compressed and info.dtype == "f32" else 1

    def run(self, batch: StepBatch) -> Logits:
        """Run one forward pass, or several of a model that pads its sequences; see `Runner.run`."""
        parts = split_batch(batch) if self._decoder.pads_sequences else []
        return HostLogits(self._run_parts(batch, parts) if len(parts) > 1 else self._run_part(batch), self._cores)

    def _run_parts(self, batch: StepBatch, parts: list[tuple[StepBatch, IntArray]]) -> FloatArray:
        logits = np.empty((len(batch.sampled_rows), self.info.row_size), np.float32)
        for part, sampled in parts:
            logits[sampled] = self._run_part(part)
        return logits

    def _run_part(self, batch: StepBatch) -> FloatArray:
        num_sampled = len(batch.sampled_rows)
        if 0 < num_sampled < self._least_rows:  # the last layer has only the rows that sample
            rows = np.resize(batch.sampled_rows, self._least_rows)
            return self._session.run(self._pad(replace(batch, sampled_rows=rows)))[:num_sampled]
        return self._session.run(self._pad(batch))

    def _pad(self, batch: StepBatch) -> StepBatch:
        return pad_batch(batch, self._scratch_block, self._least_rows)

    def read_adapter(self, number: int, name: str, folder: Path) -> Callable[[], None]:
        """See `Runner.read_adapter`."""
        if self._session.adapters is None:
            message = f"LoRA adapter {name} cannot be loaded: this model was started without room for adapters"
            raise SluiceError(ErrorCode.UNIMPLEMENTED, message, param="lora_modules")
        return self._session.adapters.read(number, name, folder)

    def drop_adapters(self, numbers: Collection[int]) -> Callable[[], None]:
        """See `Runner.drop_adapters`."""
        assert self._session.adapters is not None
        return self._session.adapters.drop(numbers)

    def read_blocks(self, blocks: Sequence[int], contents: Sequence[ByteArray]) -> None:
        """See `Runner.read_blocks`."""
        self._session.cache.read_blocks(blocks, contents)

    def write_blocks(self, blocks: Sequence[int], contents: Sequence[ByteArray]) -> None:
        """See `Runner.write_blocks`."""
        self._session.cache.write_blocks(blocks, contents)

    def close(self) -> None:
        """Free the model and the cache, and with them the logits that `run` returned last."""
        self._cores.close()
        del self._session, self._decoder


def load_runner(config: EngineConfig) -> OpenVinoRunner:
    """Build, compile and warm up the model at `config.model_path`, then allocate its KV cache. Raises NOT_FOUND for
    missing files, INVALID for a damaged checkpoint or limits that do not fit it, UNIMPLEMENTED for a model that the
    graph builder does not know, UNAVAILABLE for an OpenVINO other than the tested one."""
    started = time.monotonic()
    core = ov.Core()
    dtype = choose_dtype(config.dtype, core)
    cache_dtype = choose_cache_dtype(config.kv_cache_dtype, dtype)
    properties = compile_properties(config, dtype, cache_dtype)
    check_cache_limits(config)
    decoder = open_decoder(config, core, _COMPUTE_TYPES[dtype])
    session = InferenceSession(core.compile_model(decoder.model, DEVICE, properties), decoder.adapters)
    session.warm_up()
    if decoder.weights is not None:
        decoder.weights.release_pages()
    free_bytes = int(config.memory_share * available_bytes())
    num_blocks = choose_num_blocks(config, session.layout.block_bytes, BLOCK_SIZE, decoder.max_model_len, free_bytes)
    session.set_num_blocks(num_blocks + 1)
    info = RunnerInfo(
        runtime="openvino",
        model_type=decoder.model_type,
        dtype=dtype,
        vocab_size=decoder.vocab_size,
        eos_token_ids=decoder.eos_token_ids,
        max_model_len=decoder.max_model_len,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        kv_cache_dtype=session.layout.dtype,
        quantization=decoder.quantization,
        embedding_size=decoder.embedding_size,
    )
    size_bytes = num_blocks * session.layout.block_bytes
    logger.info("loaded %s in %.2f s: %s", config.model_path, time.monotonic() - started, _summary(info, size_bytes))
    return OpenVinoRunner(session, decoder, info, config.num_threads)


def _summary(info: RunnerInfo, size_bytes: int) -> str:
    num_tokens = info.num_blocks * info.block_size
    return (
        f"{info.model_type}, {info.dtype}, weights compressed: {info.quantization}, context {info.max_model_len} "
        f"tokens; KV cache {size_bytes >> 20} MiB in {info.kv_cache_dtype}, {info.num_blocks} blocks of "
        f"{info.block_size}: {num_tokens} tokens, {num_tokens / info.max_model_len:.1f} full-length requests"
    )


class InferenceSession:
    """A compiled decoder, for one thread. It starts with a cache of one block, enough for `warm_up`. A graph with
    inputs for adapters has a second request over the same tensors: steps without adapters take the first one, whose
    stacks have none."""

    def __init__(self, compiled: ov.CompiledModel, inputs: AdapterInputs | None = None) -> None:
        self.layout = CacheLayout.of(compiled)
        self._requests = [compiled.create_infer_request() for _ in range(1 if inputs is None else 2)]
        self._empty: AdapterStacks | None = None
        self.adapters: AdapterStacks | None = None
        if inputs is not None:
            self._empty, self.adapters = (AdapterStacks(each, inputs.shapes, inputs.kind) for each in self._requests)
        self._inputs = {name: _InputVector(self._requests, name) for name in STEP_INPUTS}
        self._max_context_len = np.zeros((), np.int32)
        for request in self._requests:
            request.set_tensor(MAX_CONTEXT_LEN, ov.Tensor(self._max_context_len, shared_memory=True))
        self.set_num_blocks(1)

    def set_num_blocks(self, num_blocks: int) -> None:
        """Allocate a cache of that size. The content of the last one is lost."""
        self.cache = KvCache(self.layout, num_blocks)
        for request in self._requests:
            for name, tensor in self.cache.tensors.items():
                request.set_tensor(name, tensor)

    def run(self, batch: StepBatch) -> FloatArray:
        """Return logits [num_sampled, row_size], a view of OpenVINO's output buffer."""
        self._max_context_len[...] = batch.max_context_len
        for name, vector in self._inputs.items():
            vector.write(getattr(batch, name))
        request = self._requests[0 if batch.adapters is None else 1]
        if (stacks := self._empty if batch.adapters is None else self.adapters) is not None:
            stacks.set_mask(batch.adapters, len(batch.token_ids))
        request.infer(share_outputs=True)
        logits: FloatArray = request.get_output_tensor(0).data
        return logits

    def warm_up(self) -> None:
        """Run one token, which writes to block 0, so that the runtime has the weights in its own layout."""
        none = np.zeros(1, np.int32)
        begins = np.array([0, 1], np.int32)
        self.run(
            StepBatch(
                token_ids=none,
                position_ids=none,
                past_lens=none,
                subsequence_begins=begins,
                block_indices=none,
                block_indices_begins=begins,
                sampled_rows=none,
                max_context_len=1,
            )
        )


class _InputVector:
    """An input of varying length. Resizing its tensor is several times cheaper than setting a new one."""

    def __init__(self, requests: Sequence[ov.InferRequest], name: str) -> None:
        self._tensor = ov.Tensor(ov.Type.i32, ov.Shape([_INITIAL_CAPACITY]))
        for request in requests:
            request.set_tensor(name, self._tensor)

    def write(self, values: IntArray) -> None:
        self._tensor.shape = [len(values)]
        self._tensor.data[:] = values


# -- padding of a step to a number of tokens that suits the matrix kernels
#
# oneDNN's bf16 kernels work on tiles of 16 rows. A number of rows that does not divide well, such as 37 or 61, takes 20
# to 30 % longer than the next one that does, and each new number is compiled when it first occurs.


def pad_batch(batch: StepBatch, scratch_block: int, least_rows: int = 1) -> StepBatch:
    """Add up to 15 sequences of one token each to `batch`, so that it has `least_rows`. They are not sampled, and all
    write to `scratch_block`."""
    num_tokens = len(batch.token_ids)
    added = max(num_padding(num_tokens), least_rows - num_tokens)
    if not added:
        return batch
    none, more = np.zeros(added, np.int32), np.arange(1, added + 1, dtype=np.int32)
    return StepBatch(
        token_ids=np.concatenate((batch.token_ids, none)),
        position_ids=np.concatenate((batch.position_ids, none)),
        past_lens=np.concatenate((batch.past_lens, none)),
        subsequence_begins=np.concatenate((batch.subsequence_begins, num_tokens + more)),
        block_indices=np.concatenate((batch.block_indices, none + scratch_block)),
        block_indices_begins=np.concatenate((batch.block_indices_begins, len(batch.block_indices) + more)),
        sampled_rows=batch.sampled_rows,
        max_context_len=batch.max_context_len,
        adapters=None if batch.adapters is None else np.concatenate((batch.adapters, none)),
    )


def num_padding(num_tokens: int) -> int:
    """Return how many tokens to add to a step of `num_tokens` to make its size fast."""
    if num_tokens <= UNPADDED_ROWS:
        return 0
    return -num_tokens % (FINE if num_tokens <= FINE_ROWS else COARSE)


# -- parts of a step, for attention that pads sequences to the longest


def split_batch(batch: StepBatch) -> list[tuple[StepBatch, IntArray]]:
    """Split a step into parts whose padded attention takes at most MAX_PADDED_SIZE, or that have one sequence.

    Returns each part with the indices of its sampled rows among those of `batch`.
    """
    num_new, num_blocks = np.diff(batch.subsequence_begins), np.diff(batch.block_indices_begins)
    parts: list[list[int]] = [[]]
    for sequence in np.lexsort((num_blocks, num_new)):
        grown = [*parts[-1], int(sequence)]
        if len(grown) > 1 and len(grown) * num_blocks[grown].max() * (num_new[grown].max() + _COPIED) > MAX_PADDED_SIZE:
            parts.append([int(sequence)])
        else:
            parts[-1] = grown
    return [_part(batch, np.sort(np.array(part))) for part in parts] if len(parts) > 1 else []


def _part(batch: StepBatch, sequences: IntArray) -> tuple[StepBatch, IntArray]:
    tokens, begins = _pick_spans(batch.subsequence_begins, sequences)
    blocks, block_begins = _pick_spans(batch.block_indices_begins, sequences)
    sampled = np.flatnonzero(np.isin(batch.sampled_rows, tokens)).astype(np.int32)
    past_lens = batch.past_lens[sequences]
    part = StepBatch(
        token_ids=batch.token_ids[tokens],
        position_ids=batch.position_ids[tokens],
        past_lens=past_lens,
        subsequence_begins=begins,
        block_indices=batch.block_indices[blocks],
        block_indices_begins=block_begins,
        sampled_rows=np.searchsorted(tokens, batch.sampled_rows[sampled]).astype(np.int32),
        max_context_len=int((past_lens + np.diff(begins)).max()),
        adapters=None if batch.adapters is None else batch.adapters[tokens],
    )
    return part, sampled


def _pick_spans(begins: IntArray, sequences: IntArray) -> tuple[IntArray, IntArray]:
    """Return the indices in the spans of the `sequences`, which ascend, and where each span begins among them."""
    spans = [np.arange(begins[each], begins[each + 1], dtype=np.int32) for each in sequences]
    return np.concatenate(spans), np.cumsum([0, *map(len, spans)], dtype=np.int32)


# -- types of the computation and of the KV cache


def cpu_capabilities() -> tuple[str, ...]:
    """Return the types in which the CPU computes natively, in the plugin's words: FP32, BF16, INT8, ..."""
    return tuple(ov.Core().get_property(DEVICE, "OPTIMIZATION_CAPABILITIES"))


def choose_dtype(dtype: str, core: ov.Core) -> str:
    """Choose the type of the computation. Raises SluiceError INVALID if it is unknown or the CPU lacks it."""
    has_bf16 = "BF16" in core.get_property(DEVICE, "OPTIMIZATION_CAPABILITIES")
    if dtype == "auto":
        return "bf16" if has_bf16 else "f32"
    if dtype not in _COMPUTE_TYPES:
        raise invalid("dtype", f"dtype must be auto, {' or '.join(_COMPUTE_TYPES)}, got {dtype!r}")
    if dtype == "bf16" and not has_bf16:
        raise invalid("dtype", "dtype is bf16, which this CPU does not have; use f32 or auto")
    return dtype


def choose_cache_dtype(kv_cache_dtype: str, dtype: str) -> str:
    """Choose the cache's type for a computation in `dtype`: the same or u8. Raises INVALID for others."""
    if kv_cache_dtype == "auto":
        return dtype
    if kv_cache_dtype not in _CACHE_TYPES:
        known = ", ".join(_CACHE_TYPES)
        raise invalid("kv_cache_dtype", f"kv_cache_dtype must be one of auto, {known}, got {kv_cache_dtype!r}")
    if kv_cache_dtype not in (dtype, "u8"):
        raise invalid(
            "kv_cache_dtype",
            f"kv_cache_dtype must be {dtype}, as the computation is, or u8, got {kv_cache_dtype}; dtype sets the "
            "computation's type",
        )
    return kv_cache_dtype


def compile_properties(config: EngineConfig, dtype: str, cache_dtype: str) -> dict[str, Any]:
    """Return the plugin's properties for the compilation. Raises SluiceError INVALID for less than one thread."""
    properties: dict[str, Any] = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": _COMPUTE_TYPES[dtype],
        "KV_CACHE_PRECISION": _CACHE_TYPES[cache_dtype],
    }
    if config.num_threads is not None:
        if config.num_threads < 1:
            raise invalid("num_threads", f"num_threads must be at least 1, got {config.num_threads}")
        properties["INFERENCE_NUM_THREADS"] = config.num_threads
    elif (cores := num_cores()) < len(os.sched_getaffinity(0)):  # OpenVINO itself does not see a container's limit
        properties["INFERENCE_NUM_THREADS"] = cores
    return properties
