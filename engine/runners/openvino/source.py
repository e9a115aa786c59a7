"""From a model's folder to the graph that a runner compiles."""

import logging
from enum import Enum, auto
from pathlib import Path

import openvino as ov

from engine.config import EngineConfig
from engine.runners.openvino.architectures import ARCHITECTURES, read_decoder_config, read_model_type
from engine.runners.openvino.convert import can_convert, convert
from engine.runners.openvino.graph.model import Decoder, build_model, choose_max_model_len
from engine.runners.openvino.graph.paged_attention import check_cache_dtype
from engine.runners.openvino.ir import IR_GRAPH, has_ir, open_ir
from engine.runners.openvino.weights.checkpoint import CheckpointWeights, weight_files
from engine.runners.openvino.weights.compression import NONE, QUANTIZATIONS, compress
from sluice.errors import ErrorCode, SluiceError, invalid

logger = logging.getLogger(__name__)


class FolderKind(Enum):
    """What a model's folder holds."""

    CHECKPOINT = auto()
    IR = auto()
    CONVERTIBLE = auto()
    """A checkpoint for which there is no graph of ours."""


def open_decoder(config: EngineConfig, core: ov.Core) -> Decoder:
    """The graph of `config.model_path`, with its weights as asked.

    Raises SluiceError: NOT_FOUND for missing files, INVALID for a damaged checkpoint or limits that do not go
    with it, UNIMPLEMENTED for a model that cannot be built.
    """
    check_quantization(config.quantization)
    directory = Path(config.model_path)
    kind, reason = identify_folder(directory)
    logger.info("runtime openvino, on the CPU: %s %s", directory, reason)
    match kind:
        case FolderKind.CHECKPOINT:
            return _build(config, directory)
        case FolderKind.IR:
            return _open_ir(config, directory, core)
        case FolderKind.CONVERTIBLE:
            return _open_ir(config, convert(directory, config.quantization, cache_folder(config) / "converted"), core)


def identify_folder(directory: Path) -> tuple[FolderKind, str]:
    """How a folder is loaded, by its files, and why.

    Raises SluiceError: NOT_FOUND or INVALID for a folder that is no model's, UNIMPLEMENTED for a model that
    our graphs do not cover, where nothing is installed to convert it.
    """
    if has_ir(directory):
        return FolderKind.IR, f"holds an OpenVINO IR ({IR_GRAPH})"
    model_type = read_model_type(directory)
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


def _build(config: EngineConfig, directory: Path) -> Decoder:
    model_config = read_decoder_config(directory)
    check_cache_dtype(model_config, config.kv_cache_dtype)
    max_model_len = choose_max_model_len(
        config.max_model_len, model_config.max_position_embeddings, model_config.longest_context
    )
    weights = open_weights(directory, config.quantization, cache_folder(config))
    return Decoder(
        model=build_model(model_config, weights, max_model_len),
        weights=weights,
        model_type=model_config.model_type,
        vocab_size=model_config.vocab_size,
        eos_token_ids=model_config.eos_token_ids,
        max_model_len=max_model_len,
        quantization=weights.quantization,
    )


def _open_ir(config: EngineConfig, directory: Path, core: ov.Core) -> Decoder:
    decoder = open_ir(directory, core, config.max_model_len)
    if config.quantization not in (NONE, decoder.quantization):
        raise invalid(
            "quantization",
            f"quantization is {config.quantization}, but the weights of this IR are stored as they are "
            f"({decoder.quantization}); export it again with --weight-format {config.quantization}",
        )
    return decoder


def check_quantization(quantization: str) -> None:
    """Raises SluiceError(INVALID) for an unknown one."""
    known = (NONE, *QUANTIZATIONS)
    if quantization not in known:
        raise invalid("quantization", f"quantization must be one of {', '.join(known)}, got {quantization!r}")


def open_weights(directory: Path, quantization: str, cache: Path) -> CheckpointWeights:
    """A directory's weights, compressed where asked; as they are stored where `sluice build` compressed them.

    Raises SluiceError INVALID where that was otherwise than asked.
    """
    weights = CheckpointWeights.open(directory)
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
    """Where files may be kept that are made once from a checkpoint."""
    return Path.home() / ".cache" / "sluice" if config.cache_path is None else Path(config.cache_path)
