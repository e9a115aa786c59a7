"""A whole text model: the embeddings of a step's tokens, the family's decoder, the LM head."""

import logging

from sluice.engine.models.architectures import find_architecture
from sluice.engine.models.decoder import scaled
from sluice.engine.models.kernels import Context, Tensor
from sluice.engine.models.weights.names import EMBEDDING, HEAD, HEAD_BIAS, POSITIONS

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
