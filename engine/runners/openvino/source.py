"""Opens a model's folder as the graph that a runner compiles."""

import logging
from enum import Enum, auto
from pathlib import Path

import openvino as ov

from sluice.engine.config import EngineConfig, Task
from sluice.engine.model_folder import served_task
from sluice.engine.models.architectures import ARCHITECTURES, check_stateless, read_decoder_config, read_model_type
from sluice.engine.models.text_model import check_causal, choose_max_model_len, log_longrope
from sluice.engine.models.weights.assembled import write_assembled
from sluice.engine.models.weights.files import NONE, QUANTIZATIONS, weight_files
from sluice.engine.runners.openvino.convert import can_convert, convert
from sluice.engine.runners.openvino.graph.adapters import AdapterInputs
from sluice.engine.runners.openvino.graph.experts import FEW_EXPERTS
from sluice.engine.runners.openvino.graph.model import Decoder, build_model
from sluice.engine.runners.openvino.graph.paged_attention import check_cache_dtype
from sluice.engine.runners.openvino.ir import IR_GRAPH, has_ir, open_ir
from sluice.engine.runners.openvino.weights.checkpoint import CheckpointWeights
from sluice.engine.runners.openvino.weights.compression import compress
from sluice.errors import ErrorCode, SluiceError, invalid

logger = logging.getLogger(__name__)


class FolderKind(Enum):
    """Kinds of model folders."""

    CHECKPOINT = auto()
    IR = auto()
    CONVERTIBLE = auto()
    """A checkpoint that our graphs do not support, but optimum-intel can convert."""


def open_decoder(config: EngineConfig, core: ov.Core, kind: ov.Type = ov.Type.f32) -> Decoder:
    """Open the graph of `config.model_path`, weights quantized as configured. `kind` is the type of the computation,
    which LoRA adapters have too. Raises NOT_FOUND for missing files,
    INVALID for a damaged checkpoint or unfit limits, UNIMPLEMENTED for a model that cannot be built."""
    check_quantization(config.quantization)
    directory = Path(config.model_path)
    try:
        folder_kind, reason = identify_folder(directory)
    except SluiceError as error:
        if error.code is ErrorCode.UNIMPLEMENTED and served_task(config) is Task.EMBED:
            error.template += ". --runtime vllm embeds with more models, BERT and other encoders among them"
        raise
    logger.info("runtime openvino, on the CPU: %s %s", directory, reason)
    match folder_kind:
        case FolderKind.CHECKPOINT:
            return _build(config, directory, kind)
        case FolderKind.IR:
            return _open_ir(config, directory, core)
        case FolderKind.CONVERTIBLE:
            return _open_ir(config, convert(directory, config.quantization, cache_folder(config) / "converted"), core)


def identify_folder(directory: Path) -> tuple[FolderKind, str]:
    """Return the kind of a folder, by its files, and the reason for the log. Raises NOT_FOUND or INVALID for a folder
    without a model, UNIMPLEMENTED for a model that our graphs do not support if nothing is installed to convert it."""
    if has_ir(directory):
        return FolderKind.IR, f"holds an OpenVINO IR ({IR_GRAPH})"
    model_type = read_model_type(directory)
    check_stateless(model_type)
    if model_type not in ARCHITECTURES and can_convert():
        return (
            FolderKind.CONVERTIBLE,
            f"is of type {model_type}, for which there is no graph here: optimum-intel converts it",
        )
    try:
        read_decoder_config(directory)
    except SluiceError as error:
        if error.code is not ErrorCode.UNIMPLEMENTED or not can_convert():
            raise
        return (
            FolderKind.CONVERTIBLE,
            f"is more than the graph for {model_type} covers ({error}): optimum-intel converts it",
        )
    return FolderKind.CHECKPOINT, f"is a HuggingFace checkpoint of type {model_type}"


def check_folder(directory: Path) -> FolderKind:
    """Return the kind of a folder. Raises as `identify_folder`, and as `open_decoder` for a checkpoint whose tensors do
    not fit its config.json."""
    kind, _ = identify_folder(directory)
    if kind is FolderKind.CHECKPOINT:
        has_head = served_task(EngineConfig(model_path=str(directory))) is not Task.EMBED
        build_model(read_decoder_config(directory), CheckpointWeights.open(directory), has_head=has_head)
    return kind


def _build(config: EngineConfig, directory: Path, kind: ov.Type) -> Decoder:
    is_embedder = served_task(config) is Task.EMBED
    if is_embedder:
        check_causal(directory, "OpenVINO")
        _refuse_adapters(config, "a model of embeddings")
    has_adapters = not is_embedder and (config.enable_lora or bool(config.lora_modules))
    adapters = AdapterInputs(kind) if has_adapters else None
    model_config = read_decoder_config(directory)
    check_cache_dtype(model_config, config.kv_cache_dtype)
    max_model_len = choose_max_model_len(
        config.max_model_len, model_config.max_position_embeddings, model_config.longest_context
    )
    log_longrope(model_config, max_model_len)
    weights = open_weights(directory, config.quantization, cache_folder(config))
    model = build_model(
        model_config,
        weights,
        max_model_len,
        has_head=not is_embedder,
        adapters=adapters,
        pads_values=config.kv_cache_dtype == "u8",
    )
    return Decoder(
        model=model,
        weights=weights,
        model_type=model_config.model_type,
        vocab_size=model_config.vocab_size,
        eos_token_ids=model_config.eos_token_ids,
        max_model_len=max_model_len,
        quantization=weights.quantization,
        embedding_size=model_config.hidden_size if is_embedder else 0,
        adapters=adapters,
        pads_sequences=model_config.attention_softcap is not None,
    )


def _refuse_adapters(config: EngineConfig, what: str) -> None:
    if config.lora_modules:
        message = f"LoRA adapters take a HuggingFace checkpoint of {', '.join(ARCHITECTURES)}; this is {what}"
        raise SluiceError(ErrorCode.UNIMPLEMENTED, message, param="lora_modules")


def _open_ir(config: EngineConfig, directory: Path, core: ov.Core) -> Decoder:
    if served_task(config) is Task.EMBED:
        message = f"embeddings come from HuggingFace checkpoints of {', '.join(ARCHITECTURES)}, not from OpenVINO IRs"
        raise SluiceError(ErrorCode.UNIMPLEMENTED, message, param="model_path")
    _refuse_adapters(config, "an OpenVINO IR, whose graph is fixed")
    decoder = open_ir(directory, core, config.max_model_len)
    if config.quantization not in (NONE, decoder.quantization):
        raise invalid(
            "quantization",
            f"quantization is {config.quantization}, but the weights of this IR are stored as they are "
            f"({decoder.quantization}); export it again with --weight-format {config.quantization}",
        )
    return decoder


def check_quantization(quantization: str) -> None:
    """Check the name of a quantization. Raises SluiceError INVALID for an unknown one."""
    known = (NONE, *QUANTIZATIONS)
    if quantization not in known:
        raise invalid("quantization", f"quantization must be one of {', '.join(known)}, got {quantization!r}")


def open_weights(directory: Path, quantization: str, cache: Path) -> CheckpointWeights:
    """Open a directory's weights, compressed as requested, or as stored if `sluice build` has compressed them. Raises
    INVALID if they are stored in another quantization than the requested one."""
    weights = CheckpointWeights.open(directory)
    if weights.quantization == quantization == NONE:
        files = weight_files(directory)
        return CheckpointWeights(write_assembled(weights.tensors, files, cache / "assembled", FEW_EXPERTS))
    if quantization in (NONE, weights.quantization):
        return weights
    if weights.quantization != NONE:
        raise invalid(
            "quantization",
            f"quantization is {quantization}, but the weights of {directory} are stored in {weights.quantization}; "
            "build it again from the checkpoint that it was made of",
        )
    folder = cache / "compressed"
    compressed = compress(weights.tensors, weight_files(directory), quantization, folder)
    return CheckpointWeights(weights.tensors, compressed, quantization)


def cache_folder(config: EngineConfig) -> Path:
    """Return the folder of files that are made once from a checkpoint."""
    return Path.home() / ".cache" / "sluice" if config.cache_path is None else Path(config.cache_path)
