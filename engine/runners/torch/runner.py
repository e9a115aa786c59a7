"""The `Runner` of torch, on a GPU or on the CPU."""

import logging
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np
import torch

from sluice.engine.arrays import ByteArray
from sluice.engine.config import EngineConfig
from sluice.engine.models.architectures import read_decoder_config
from sluice.engine.models.weights.files import NONE
from sluice.engine.runners.base import Draws, LaunchedStep, Logits, Runner, RunnerInfo, StepBatch
from sluice.engine.runners.cache_size import check_cache_limits, choose_num_blocks
from sluice.engine.runners.torch.cache import PagedKvCache, block_bytes, page_shapes
from sluice.engine.runners.torch.device import (
    CUDA_SHARE,
    DTYPES,
    check_cache_dtype,
    choose_device,
    choose_dtype,
    describe,
    set_threads,
    upload,
)
from sluice.engine.runners.torch.graphs import DecodeGraphs
from sluice.engine.runners.torch.logits import DeviceLogits, fused_draw, wrap_logits
from sluice.engine.runners.torch.memory import DeviceMemory, measure_free, memory_of, run_step
from sluice.engine.runners.torch.model import TorchModel, check_parallel, make_model, open_checkpoint
from sluice.engine.runners.torch.parallel import Ranks
from sluice.engine.runners.torch.runtime import TORCH
from sluice.engine.runners.torch.step import BLOCK_SIZE, ChosenTokens, make_step
from sluice.engine.runners.torch.weights import WeightSource
from sluice.engine.sampling.cores import Cores
from sluice.errors import ErrorCode, SluiceError, invalid

logger = logging.getLogger(__name__)


class TorchRunner(Runner):
    """A model with its KV blocks on a device. The cache has one block more than `info` says, to which padding
    writes."""

    def __init__(
        self,
        model: TorchModel,
        cache: PagedKvCache,
        info: RunnerInfo,
        graphs: DecodeGraphs | None,
        *,
        looks_ahead: bool = False,
    ) -> None:
        self.looks_ahead = looks_ahead
        self._last: ChosenTokens | None = None
        """The tokens of the step that was launched last."""
        self._model = model
        self._cache = cache
        self._graphs = graphs
        self._cores = Cores(torch.get_num_threads())
        self._fused_draw = fused_draw(model.device)
        self.info = info
        self.block_bytes = cache.block_bytes
        self.block_identity = f"torch {torch.__version__} {describe(model.device)} {info.dtype} {info.quantization} "
        self.block_identity += cache.description

    def run(self, batch: StepBatch) -> Logits:
        """See `Runner.run`."""
        rows = self.compute(batch)
        if rows.is_cuda:  # the loop learns from the time that this takes
            torch.cuda.current_stream(rows.device).synchronize()
        return wrap_logits(rows, self._cores, self._fused_draw)

    def launch(self, batch: StepBatch, draws: Draws | None) -> LaunchedStep:
        """See `Runner.launch`."""
        is_unknown = bool((batch.token_ids < 0).any())
        rows = self.compute(batch, self._last if is_unknown else None)
        self._last = ChosenTokens(*DeviceLogits(rows, self._fused_draw).choose(draws))
        return self._last.wait

    def compute(self, batch: StepBatch, last: ChosenTokens | None = None) -> torch.Tensor:
        """Run one forward pass. Returns the logits on the device. `last` has the tokens of the step before, where the
        batch has rows of that in their place."""
        if self._graphs is None or not self._graphs.takes(batch):
            step = make_step(batch, self._model.device)
            if last is not None:
                step.token_ids = last.put_into(step.token_ids)
            return self._model.run(step, self._cache)
        rows = self._graphs.run(batch, last)
        if np.array_equal(batch.sampled_rows, np.arange(len(rows))):
            return rows
        return rows[upload(batch.sampled_rows, rows.device)]

    def read_adapter(self, number: int, name: str, folder: Path) -> Callable[[], None]:
        """See `Runner.read_adapter`."""
        if self._model.adapters is None:
            message = f"LoRA adapter {name} cannot be loaded: this model was started without room for adapters"
            raise SluiceError(ErrorCode.UNIMPLEMENTED, message, param="lora_modules")
        return self._model.adapters.read(number, name, folder)

    def drop_adapters(self, numbers: Collection[int]) -> Callable[[], None]:
        """See `Runner.drop_adapters`."""
        assert self._model.adapters is not None
        return self._model.adapters.drop(numbers)

    def read_blocks(self, blocks: Sequence[int], contents: Sequence[ByteArray]) -> None:
        """See `Runner.read_blocks`."""
        self._cache.read_blocks(blocks, contents)

    def write_blocks(self, blocks: Sequence[int], contents: Sequence[ByteArray]) -> None:
        """See `Runner.write_blocks`."""
        self._cache.write_blocks(blocks, contents)

    def close(self) -> None:
        """Free the model and the cache."""
        self._cores.close()
        del self._graphs, self._model, self._cache


def load_runner(config: EngineConfig, ranks: Ranks | None = None, *, memory: DeviceMemory | None = None) -> TorchRunner:
    """Read the model at `config.model_path`, or with `ranks` this rank's part of it, onto the device, then allocate its
    KV cache. Raises NOT_FOUND for missing files, INVALID for a damaged checkpoint or limits that do not fit it,
    UNIMPLEMENTED for a model or an option that this runner does not have, UNAVAILABLE for a device that is not there or
    is too small. `memory` is the device's."""
    started = time.monotonic()
    assert config.tensor_parallel_size == (1 if ranks is None else ranks.size), "`group.load_runner` starts ranks"
    device, dtype = _check(config)
    if ranks is not None and device.type == "cuda":
        device = torch.device("cuda", ranks.rank)
    decoder_config, weights, names = open_checkpoint(config)
    model = make_model(config, decoder_config, weights, DTYPES[dtype], device, ranks)

    def after_first_pass() -> None:
        names.check_leftovers(decoder_config)
        weights.release()

    runner = _start(config, model, dtype, after_first_pass, ranks, memory)
    whose = "" if ranks is None else f"rank {ranks.rank} of {ranks.size}, "
    seconds, summary = time.monotonic() - started, whose + _summary(runner, device)
    logger.info("loaded %s in %.2f s: %s", config.model_path, seconds, summary)
    return runner


def load_with(config: EngineConfig, source: WeightSource) -> TorchRunner:
    """Load a runner whose shape is that of `config.model_path` and whose weights are others, such as random ones."""
    device, dtype = _check(config)
    decoder_config = read_decoder_config(Path(config.model_path), takes_fp8=True)
    return _start(config, make_model(config, decoder_config, source, DTYPES[dtype], device), dtype, lambda: None)


def _check(config: EngineConfig) -> tuple[torch.device, str]:
    """Return the device and the type of the computation."""
    check_parallel(config)
    check_cache_limits(config)
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    check_cache_dtype(config.kv_cache_dtype, dtype)
    set_threads(config)
    return device, dtype


def _start(
    config: EngineConfig,
    model: TorchModel,
    dtype: str,
    after_first_pass: Callable[[], None],
    ranks: Ranks | None = None,
    memory: DeviceMemory | None = None,
) -> TorchRunner:
    memory = memory or memory_of(model.device)
    try:
        run_step(model, 1, 1)  # which reads the weights
        after_first_pass()
        return _with_cache(config, model, dtype, memory, ranks)
    except torch.OutOfMemoryError as error:
        reason = str(error).partition(". ")[0]
        message = f"the memory of {describe(model.device)} does not hold {config.model_path}: {reason}"
        raise SluiceError(ErrorCode.UNAVAILABLE, message, param="model_path") from error


def _with_cache(
    config: EngineConfig, model: TorchModel, dtype: str, memory: DeviceMemory, ranks: Ranks | None
) -> TorchRunner:
    shapes = page_shapes(model.config)
    num_blocks = choose_num_blocks(
        config,
        block_bytes(shapes, model.dtype),
        BLOCK_SIZE,
        model.max_model_len,
        measure_free(config, model, memory),
        CUDA_SHARE if memory.keeps_freed else None,
    )
    if ranks is not None:
        num_blocks = ranks.least(num_blocks)
    cache = PagedKvCache(shapes, num_blocks + 1, model.dtype, model.device)
    info = RunnerInfo(
        runtime="torch",
        model_type=model.config.model_type,
        dtype=dtype,
        vocab_size=model.config.vocab_size,
        eos_token_ids=model.config.eos_token_ids,
        max_model_len=model.max_model_len,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        kv_cache_dtype=dtype,
        quantization=model.quantization,
        embedding_size=model.config.hidden_size if model.is_embedder else 0,
    )
    is_cuda = model.device.type == "cuda"
    looks_ahead = TORCH.settings.check(config.runtime_settings).get("lookahead", is_cuda) and not model.is_embedder
    graphs = _make_graphs(config, model, cache, num_blocks)
    return TorchRunner(model, cache, info, graphs, looks_ahead=looks_ahead)


def _make_graphs(config: EngineConfig, model: TorchModel, cache: PagedKvCache, spare_block: int) -> DecodeGraphs | None:
    """Return the graphs of decode steps, if there are to be some. Raises INVALID for those that cannot be captured,
    UNAVAILABLE where there is no memory left for them."""
    asked = TORCH.settings.check(config.runtime_settings).get("graphs")
    if model.device.type == "cuda" and not model.can_be_captured:
        if asked:
            message = "graphs cannot be captured where experts are multiplied one by one; leave graphs out, or see "
            raise invalid("graphs", f"{message}grouped_experts")
        return None
    if not (model.device.type == "cuda" if asked is None else asked):
        return None
    try:
        return DecodeGraphs(model, cache, spare_block, config.max_num_seqs)
    except torch.OutOfMemoryError as error:
        message = f"there is no memory for CUDA graphs of {config.max_num_seqs} sequences beside the KV cache: "
        message += f"{str(error).partition('. ')[0]}; lower kv_cache_memory_fraction, num_blocks or max_num_seqs"
        raise SluiceError(ErrorCode.UNAVAILABLE, message, param="kv_cache_memory_fraction") from error


def _summary(runner: TorchRunner, device: torch.device) -> str:
    info = runner.info
    num_tokens = info.num_blocks * info.block_size
    size_mib = info.num_blocks * runner.block_bytes >> 20
    compressed = "" if info.quantization == NONE else f" weights in {info.quantization},"
    return (
        f"{info.model_type}, {info.dtype},{compressed} on {describe(device)}; context {info.max_model_len} tokens; "
        f"KV cache {size_mib} MiB, {info.num_blocks} blocks of {info.block_size}: {num_tokens} tokens, "
        f"{num_tokens / info.max_model_len:.1f} full-length requests"
    )
