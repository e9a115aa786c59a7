"""The limits of a model that is to be served, which are the same on every runner."""

import logging
from pathlib import Path

from sluice.engine.model_folder import read_json
from sluice.engine.models.config.decoder_config import DecoderConfig
from sluice.engine.models.config.rope import LongRope
from sluice.errors import ErrorCode, SluiceError, invalid

logger = logging.getLogger(__name__)


def choose_max_model_len(requested: int | None, default: int, most: int | None = None) -> int:
    """Return the requested length, or the default. Raises INVALID if the model does not support it. `most` is more than
    the `default` for a model that can be stretched beyond it."""
    if requested is None:
        return default
    most = default if most is None else most
    if not 1 <= requested <= most:
        message = f"max_model_len must be 1 to {most}, what the model was made for; got {requested}"
        raise invalid("max_model_len", message)
    return requested


def check_causal(directory: Path, title: str) -> None:
    """Raise UNIMPLEMENTED for a model of embeddings whose tokens see those after them. `title` is the runtime's."""
    fields = read_json(directory / "config.json")
    if fields.get("use_bidirectional_attention") or fields.get("is_causal") is False:
        message = f"{directory} has bidirectional attention; {title} embeds with causal language models alone"
        message += "; use --runtime vllm"
        raise SluiceError(ErrorCode.UNIMPLEMENTED, message, param="model_path")


def log_longrope(config: DecoderConfig, max_model_len: int) -> None:
    """Log which factors all sequences get, because short prompts change by the choice."""
    rope = config.layers[0].rope
    if isinstance(rope, LongRope):
        logger.info(
            "longrope: %s for every sequence, because max_model_len is %d and original_max_position_embeddings %d",
            "long_factor" if rope.is_long(max_model_len) else "short_factor",
            max_model_len,
            rope.original_max_position_embeddings,
        )
