"""Opens a model's folder, and runs its steps on the device."""

import logging
from pathlib import Path

import torch

from sluice.engine.config import EngineConfig, Task
from sluice.engine.model_folder import served_task
from sluice.engine.models.architectures import find_architecture, read_decoder_config
from sluice.engine.models.config.decoder_config import DecoderConfig
from sluice.engine.models.kernels import Context
from sluice.engine.models.text_model import (
    check_causal,
    choose_max_model_len,
    compute_hidden,
    compute_logits,
    log_longrope,
)
from sluice.engine.models.weights.assembled import assemble
from sluice.engine.models.weights.files import NONE, map_files, stored_quantization, weight_files
from sluice.engine.models.weights.names import TextModelTensors
from sluice.engine.models.weights.scaled import attach_scales
from sluice.engine.runners.torch.adapters import DeviceAdapters
from sluice.engine.runners.torch.cache import PagedKvCache
from sluice.engine.runners.torch.experts import choose_grouped
from sluice.engine.runners.torch.fp8 import FP8, Fp8Use, choose_fp8
from sluice.engine.runners.torch.kernels import TorchKernels
from sluice.engine.runners.torch.parallel import Ranks, RankWeights, Shares, share_config
from sluice.engine.runners.torch.rank_kernels import RankKernels
from sluice.engine.runners.torch.runtime import TORCH
from sluice.engine.runners.torch.step import DeviceStep
from sluice.engine.runners.torch.weights import DeviceWeights, MappedWeights, WeightSource
from sluice.errors import ErrorCode, SluiceError, invalid

logger = logging.getLogger(__name__)


class TorchModel:
    """A text model on a device. Its weights are read by its first pass."""

    def __init__(
        self,
        config: DecoderConfig,
        source: WeightSource,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        fp8: Fp8Use = Fp8Use.NEVER,
        groups_experts: bool = False,
        is_embedder: bool = False,
        has_adapters: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        """`config` is that of the whole model; with `ranks` this is a part of it."""
        self.config = config
        self.max_model_len = max_model_len
        self.dtype = dtype
        self.device = device
        self.is_embedder = is_embedder
        self.adapters = DeviceAdapters(source.module, dtype, device) if has_adapters else None
        self._has_own_head = source.has_own_head
        self._kernels: TorchKernels
        if ranks is None:
            self._weights = DeviceWeights(source, dtype, device, fp8)
            self._kernels = _kernels_for(device)(
                config, self._weights, max_model_len, self.adapters, groups_experts=groups_experts
            )
        else:
            shares = Shares(config, ranks)
            self.config = config = share_config(config, ranks.size)
            self._weights = DeviceWeights(RankWeights(source, shares, ranks), dtype, device, fp8)
            self._kernels = _rank_kernels_for(device)(
                config, self._weights, max_model_len, shares, ranks, groups_experts=groups_experts
            )
        self.can_be_captured = config.experts is None or groups_experts
        """Whether the host issues a step's kernels without waiting for numbers from the device."""
        self._context = Context(config, self._kernels)

    @property
    def row_size(self) -> int:
        return self.config.hidden_size if self.is_embedder else self.config.vocab_size

    @property
    def quantization(self) -> str:
        """How weights are compressed, which is known after the first pass."""
        return FP8 if self._weights.are_scaled else NONE

    def run(self, step: DeviceStep, cache: PagedKvCache) -> torch.Tensor:
        """Return the logits of the sampled rows, [num_sampled, vocab_size]; hidden states of a model of embeddings."""
        self._kernels.step, self._kernels.cache = step, cache
        with torch.inference_mode():
            return self._compute()

    def _compute(self) -> torch.Tensor:
        hidden: torch.Tensor = compute_hidden(self._context)
        if self.is_embedder:
            return hidden
        logits: torch.Tensor = compute_logits(self._context, hidden, has_own_head=self._has_own_head)
        return logits


def _kernels_for(device: torch.device) -> type[TorchKernels]:
    if device.type != "cuda":
        return TorchKernels
    from sluice.engine.runners.torch.cuda_kernels import CudaKernels  # imports Triton, which a torch for CPUs lacks

    return CudaKernels


def _rank_kernels_for(device: torch.device) -> type[RankKernels]:
    if device.type != "cuda":
        return RankKernels
    from sluice.engine.runners.torch.cuda_kernels import RankCudaKernels

    return RankCudaKernels


def open_checkpoint(config: EngineConfig) -> tuple[DecoderConfig, MappedWeights, TextModelTensors]:
    """Return the configuration and the weights of `config.model_path`. Raises NOT_FOUND for missing files, INVALID for
    a damaged checkpoint, UNIMPLEMENTED for one that is stored in a type that torch's kernels here do not take."""
    directory = Path(config.model_path)
    decoder_config = read_decoder_config(directory, takes_fp8=True)
    files = weight_files(directory)
    if (stored := stored_quantization(files)) != NONE:
        message = f"the weights of {directory} are stored in {stored}, which is not supported on torch; serve the "
        message += "checkpoint that it was made of, or use --runtime openvino"
        raise SluiceError(ErrorCode.UNIMPLEMENTED, message, param="model_path")
    tensors = assemble(attach_scales(map_files(files)))
    names = TextModelTensors(tensors, find_architecture(decoder_config.model_type).names)
    names.check_num_layers(decoder_config)
    return decoder_config, MappedWeights(tensors, names), names


def make_model(
    config: EngineConfig,
    decoder_config: DecoderConfig,
    source: WeightSource,
    dtype: torch.dtype,
    device: torch.device,
    ranks: Ranks | None = None,
) -> TorchModel:
    """Return the model as `config` wants it served. Raises INVALID for limits that do not fit it."""
    is_embedder = served_task(config) is Task.EMBED
    if is_embedder:
        check_causal(Path(config.model_path), "torch")
        if config.lora_modules:
            raise SluiceError(
                ErrorCode.UNIMPLEMENTED, "a model of embeddings takes no LoRA adapters", param="lora_modules"
            )
    settings = TORCH.settings.check(config.runtime_settings)
    experts = decoder_config.experts if ranks is None else share_config(decoder_config, ranks.size).experts
    grouped = choose_grouped(experts, decoder_config.hidden_size, settings.get("grouped_experts"), dtype, device)
    longest = choose_max_model_len(
        config.max_model_len, decoder_config.max_position_embeddings, decoder_config.longest_context
    )
    log_longrope(decoder_config, longest)
    has_adapters = not is_embedder and (config.enable_lora or bool(config.lora_modules))
    return TorchModel(
        decoder_config,
        source,
        longest,
        dtype,
        device,
        fp8=choose_fp8(config.quantization, device),
        groups_experts=grouped,
        is_embedder=is_embedder,
        has_adapters=has_adapters,
        ranks=ranks,
    )


def check_parallel(config: EngineConfig) -> None:
    """Raise UNIMPLEMENTED for layers that are to be divided among devices, and for what ranks of a model lack."""
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if (size := getattr(config, name)) < 1:
            raise invalid(name, f"{name} must be at least 1, got {size}")
    if config.pipeline_parallel_size > 1:
        message = f"pipeline_parallel_size {config.pipeline_parallel_size} is not supported on torch, which divides "
        message += "every layer among GPUs; use tensor_parallel_size, or --runtime vllm"
        raise SluiceError(ErrorCode.UNIMPLEMENTED, message, param="pipeline_parallel_size")
    if config.tensor_parallel_size > 1 and (config.enable_lora or config.lora_modules):
        message = f"LoRA adapters are not supported with tensor_parallel_size {config.tensor_parallel_size} on torch; "
        message += "use 1, or --runtime vllm"
        raise SluiceError(
            ErrorCode.UNIMPLEMENTED, message, param="lora_modules" if config.lora_modules else "enable_lora"
        )
