"""A whole text model: the embeddings of a step's tokens, the family's decoder, the LM head, and the limits that are the
same on every runner."""

import logging
from pathlib import Path

from sluice.engine.model_folder import read_json
from sluice.engine.models.architectures import find_architecture
from sluice.engine.models.config.decoder_config import DecoderConfig
from sluice.engine.models.config.rope import LongRope
from sluice.engine.models.decoder import scaled
from sluice.engine.models.kernels import Context, Tensor
from sluice.engine.models.weights.names import EMBEDDING, HEAD, HEAD_BIAS, POSITIONS
from sluice.errors import ErrorCode, SluiceError, invalid

logger = logging.getLogger(__name__)


def compute_hidden(context: Context) -> Tensor:
    """Return the hidden states of the sampled rows before the LM head, [num_sampled, hidden_size]."""
    config, kernels = context.config, context.kernels
    embedding = kernels.embed_tokens(EMBEDDING, (config.vocab_size, config.hidden_size))
    embedded = scaled(context, embedding, config.embedding_scale)
    if config.has_position_embeddings:
        shape = (config.max_position_embeddings, config.hidden_size)
        embedded = kernels.add(embedded, kernels.embed_positions(POSITIONS, shape))
    return kernels.sampled(find_architecture(config.model_type).decoder(context, embedded))


def compute_logits(context: Context, hidden: Tensor, *, has_own_head: bool) -> Tensor:
    """Return the logits [num_sampled, vocab_size] of what `compute_hidden` returns. With `has_own_head` the checkpoint
    has a head that is not its embedding, whatever config.json says."""
    config, kernels = context.config, context.kernels
    if config.tie_word_embeddings and has_own_head:
        logger.warning("the model has an LM head of its own, though by config.json it is tied to the embedding")
    name = HEAD if has_own_head or not config.tie_word_embeddings else EMBEDDING
    logits = kernels.project(hidden, name, config.vocab_size, HEAD_BIAS if config.head_bias else None)
    return kernels.softcapped(scaled(context, logits, config.logit_scale), config.logit_softcap)


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
