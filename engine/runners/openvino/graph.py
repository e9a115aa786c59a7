"""A checkpoint as an OpenVINO model: the inputs of one step in, logits of the rows that sample out."""

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from engine.runners.openvino.architectures import architecture
from engine.runners.openvino.attention import PagedInputs
from engine.runners.openvino.checkpoint import Checkpoint
from engine.runners.openvino.layers import Context, rotation
from engine.runners.openvino.model_config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
STEP_INPUTS = (
    "token_ids",
    "position_ids",
    "past_lens",
    "subsequence_begins",
    "block_indices",
    "block_indices_begins",
    "sampled_rows",
)
"""Vector inputs, named as the fields of `StepBatch`; all i32. Beside them stand the scalar and the caches."""
MAX_CONTEXT_LEN = "max_context_len"
_KEY_CACHE, _VALUE_CACHE = "key_cache.", "value_cache."


def build_model(config: ModelConfig, weights: Checkpoint) -> ov.Model:
    """The graph. Its inputs: STEP_INPUTS [-1] i32, MAX_CONTEXT_LEN [] i32, `key_cache.N` and `value_cache.N`,
    whose type and shape the compiler settles. Its output: logits [num_sampled, vocab_size] f32.

    Raises SluiceError where the checkpoint is not what config.json says, or not supported.
    """
    decoder = architecture(config.model_type)
    step = {name: _parameter(name, [-1], ov.Type.i32) for name in STEP_INPUTS}
    max_context_len = _parameter(MAX_CONTEXT_LEN, [], ov.Type.i32)
    caches = tuple((_cache(f"{_KEY_CACHE}{i}"), _cache(f"{_VALUE_CACHE}{i}")) for i in range(config.num_layers))
    paged = PagedInputs(
        past_lens=step["past_lens"],
        subsequence_begins=step["subsequence_begins"],
        block_indices=step["block_indices"],
        block_indices_begins=step["block_indices_begins"],
        max_context_len=max_context_len,
    )
    context = Context(config, weights, paged, rotation(config, step["position_ids"]), caches)
    embedding = weights.constant(EMBEDDING, (config.vocab_size, config.hidden_size))
    zero = ops.constant(np.int32(0))
    hidden = decoder(context, ops.gather(embedding, step["token_ids"], zero))
    sampled = ops.gather(hidden, step["sampled_rows"], zero)
    logits = ops.matmul(sampled, _head(config, weights, embedding), False, True)
    parameters = [*step.values(), max_context_len, *(cache for pair in caches for cache in pair)]
    return ov.Model([ops.result(logits)], parameters, config.model_type)


def is_cache(name: str) -> bool:
    """Whether the input `name` is a layer's key or value cache."""
    return name.startswith((_KEY_CACHE, _VALUE_CACHE))


def _head(config: ModelConfig, weights: Checkpoint, embedding: ov.Node) -> ov.Node:
    if config.tie_word_embeddings:
        return embedding
    return weights.constant("lm_head.weight", (config.vocab_size, config.hidden_size))


def _cache(name: str) -> ov.Node:
    return _parameter(name, [-1, -1, -1, -1], ov.Type.dynamic)


def _parameter(name: str, shape: list[int], kind: ov.Type) -> ov.Node:
    parameter = ops.parameter(ov.PartialShape(shape), kind, name=name)
    parameter.output(0).get_tensor().set_names({name})
    return parameter
