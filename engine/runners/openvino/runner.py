"""OpenVINO on the CPU behind the `Runner` protocol."""

import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov

from engine.config import EngineConfig
from engine.errors import invalid
from engine.runners.base import FloatArray, IntArray, RunnerInfo, StepBatch
from engine.runners.openvino.architectures import architecture
from engine.runners.openvino.attention import BLOCK_SIZE
from engine.runners.openvino.cache import KvCache, block_bytes, choose_num_blocks
from engine.runners.openvino.checkpoint import Checkpoint
from engine.runners.openvino.graph import MAX_CONTEXT_LEN, STEP_INPUTS, build_model
from engine.runners.openvino.model_config import ModelConfig, read_model_config, read_model_type

logger = logging.getLogger(__name__)

_DEVICE = "CPU"
_TYPES = {"bf16": ov.Type.bf16, "f32": ov.Type.f32}
_INITIAL_CAPACITY = 1024


class OpenVinoRunner:
    """A compiled decoder, its KV blocks and one inference request. Used from one thread.

    `weights` are the maps that the model's constants point into.
    """

    def __init__(self, compiled: ov.CompiledModel, weights: Checkpoint, info: RunnerInfo) -> None:
        self._info = info
        self._weights = weights
        self._request = compiled.create_infer_request()
        self._inputs = {name: _InputVector(self._request, name) for name in STEP_INPUTS}
        self._max_context_len = np.zeros((), np.int32)
        self._request.set_tensor(MAX_CONTEXT_LEN, ov.Tensor(self._max_context_len, shared_memory=True))
        self._cache = KvCache(compiled, info.num_blocks)
        for name, tensor in self._cache.tensors.items():
            self._request.set_tensor(name, tensor)

    @property
    def info(self) -> RunnerInfo:
        return self._info

    def run(self, batch: StepBatch) -> FloatArray:
        """See `Runner.run`. The logits are a view of OpenVINO's output buffer."""
        self._max_context_len[...] = batch.max_context_len
        for name, vector in self._inputs.items():
            vector.write(getattr(batch, name))
        self._request.infer(share_outputs=True)
        logits: FloatArray = self._request.get_output_tensor(0).data
        return logits

    def warm_up(self) -> None:
        """Run one token, so that the runtime holds the weights in its own layout, and release the checkpoint's pages.

        It writes to block 0, which no sequence owns yet.
        """
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
        self._weights.release_pages()

    def close(self) -> None:
        """Free the model and the cache, and with them the logits that `run` returned last."""
        del self._request, self._inputs, self._cache, self._weights


class _InputVector:
    """One input of changing length. To resize a tensor set once is several times cheaper than to set a new one."""

    def __init__(self, request: ov.InferRequest, name: str) -> None:
        self._tensor = ov.Tensor(ov.Type.i32, ov.Shape([_INITIAL_CAPACITY]))
        request.set_tensor(name, self._tensor)

    def write(self, values: IntArray) -> None:
        self._tensor.shape = [len(values)]
        self._tensor.data[:] = values


def load_runner(config: EngineConfig) -> OpenVinoRunner:
    """Build, compile and warm up the model at `config.model_path`.

    Raises SluiceError: NOT_FOUND for missing files, INVALID for a damaged checkpoint or limits that do
    not go with it, UNIMPLEMENTED for a model the graph builder does not know, UNAVAILABLE for another
    OpenVINO than the tested one.
    """
    started = time.monotonic()
    directory = Path(config.model_path)
    architecture(read_model_type(directory))  # an unknown family is said to be that, whatever else it lacks
    model_config = read_model_config(directory)
    core = ov.Core()
    dtype = _choose_dtype(config.dtype, core)
    info = _runner_info(config, model_config, dtype)
    weights = Checkpoint(directory)
    compiled = core.compile_model(build_model(model_config, weights), _DEVICE, _properties(config, dtype))
    runner = OpenVinoRunner(compiled, weights, info)
    runner.warm_up()
    logger.info("loaded %s in %.2f s: %s", directory, time.monotonic() - started, _summary(info))
    return runner


def _summary(info: RunnerInfo) -> str:
    num_tokens = info.num_blocks * info.block_size
    return (
        f"{info.model_type}, {info.dtype}, context {info.max_model_len} tokens; KV cache {info.num_blocks} blocks of "
        f"{info.block_size}: {num_tokens} tokens, {num_tokens / info.max_model_len:.1f} full-length requests"
    )


def _choose_dtype(dtype: str, core: ov.Core) -> str:
    has_bf16 = "BF16" in core.get_property(_DEVICE, "OPTIMIZATION_CAPABILITIES")
    if dtype == "auto":
        return "bf16" if has_bf16 else "f32"
    if dtype not in _TYPES:
        raise invalid("dtype", f"dtype must be auto, {' or '.join(_TYPES)}, got {dtype!r}")
    if dtype == "bf16" and not has_bf16:
        raise invalid("dtype", "dtype is bf16, which this CPU does not have; use f32 or auto")
    return dtype


def _runner_info(config: EngineConfig, model_config: ModelConfig, dtype: str) -> RunnerInfo:
    return RunnerInfo(
        runtime="openvino",
        model_type=model_config.model_type,
        dtype=dtype,
        vocab_size=model_config.vocab_size,
        eos_token_ids=model_config.eos_token_ids,
        max_model_len=_choose_max_model_len(config.max_model_len, model_config.max_position_embeddings),
        block_size=BLOCK_SIZE,
        num_blocks=choose_num_blocks(config, block_bytes(model_config, _TYPES[dtype])),
    )


def _choose_max_model_len(asked: int | None, most: int) -> int:
    if asked is None:
        return most
    if not 1 <= asked <= most:
        raise invalid("max_model_len", f"max_model_len must be 1 to {most}, what the model was made for; got {asked}")
    return asked


def _properties(config: EngineConfig, dtype: str) -> dict[str, Any]:
    properties: dict[str, Any] = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": _TYPES[dtype],
        "KV_CACHE_PRECISION": _TYPES[dtype],
    }
    if config.num_threads is not None:
        if config.num_threads < 1:
            raise invalid("num_threads", f"num_threads must be at least 1, got {config.num_threads}")
        properties["INFERENCE_NUM_THREADS"] = config.num_threads
    return properties
