"""A checkpoint as an OpenVINO model: the inputs of one step in, logits of the rows that sample out."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from engine.runners.openvino.architectures import find_architecture
from engine.runners.openvino.config.decoder_config import DecoderConfig
from engine.runners.openvino.config.rope import Rope
from engine.runners.openvino.graph.layers import Context, Rotation, rotation
from engine.runners.openvino.graph.nodes import scaled, softcapped
from engine.runners.openvino.graph.paged_attention import PagedInputs
from engine.runners.openvino.weights.checkpoint import EMBEDDING, HEAD, CheckpointWeights, TextModelTensors
from sluice.errors import invalid


class Weights(Protocol):
    """The memory that a graph's constants point into; it must live as long as the compiled model."""

    def release_pages(self) -> None:
        """Give resident pages back to the system; touched again, they are read from their file."""
        ...


@dataclass(frozen=True, slots=True)
class Decoder:
    """A paged-attention graph with the inputs and the output that `build_model` describes."""

    model: ov.Model
    weights: Weights
    model_type: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    """Longest prompt + output of one sequence, in tokens."""
    quantization: str
    """Type of the weights in memory, where they are compressed: none, int8, int4."""


def choose_max_model_len(asked: int | None, default: int, most: int | None = None) -> int:
    """What is asked for within what the model was made for. Raises SluiceError(INVALID).

    `most` is more than the `default` where the model can be stretched beyond it.
    """
    if asked is None:
        return default
    most = default if most is None else most
    if not 1 <= asked <= most:
        raise invalid("max_model_len", f"max_model_len must be 1 to {most}, what the model was made for; got {asked}")
    return asked


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


def build_model(config: DecoderConfig, weights: CheckpointWeights, max_model_len: int | None = None) -> ov.Model:
    """The graph. Its inputs: STEP_INPUTS [-1] i32, MAX_CONTEXT_LEN [] i32, `key_cache.N` and `value_cache.N`,
    whose type and shape the compiler settles. Its output: logits [num_sampled, vocab_size] f32.
    `max_model_len` is the longest sequence it will see (see `rope`); default: what the model was made for.

    Raises SluiceError where the checkpoint is not what config.json says, or not supported.
    """
    decoder = find_architecture(config.model_type).decoder
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
    rotations = _rotations(config, max_model_len or config.max_position_embeddings, step["position_ids"])
    tensors = TextModelTensors(weights)
    context = Context(config, tensors, paged, step["position_ids"], rotations, caches)
    embedding = tensors.constant(EMBEDDING, (config.vocab_size, config.hidden_size))
    zero = ops.constant(np.int32(0))
    embedded = scaled(ops.gather(embedding, step["token_ids"], zero), config.embedding_scale)
    hidden = decoder(context, embedded)
    sampled = ops.gather(hidden, step["sampled_rows"], zero)
    logits = ops.matmul(sampled, _head(config, tensors, embedding), False, True)
    parameters = [*step.values(), max_context_len, *(cache for pair in caches for cache in pair)]
    logits = softcapped(scaled(logits, config.logit_scale), config.logit_softcap)
    return ov.Model([ops.result(logits)], parameters, config.model_type)


def is_cache(name: str) -> bool:
    """Whether the input `name` is a layer's key or value cache."""
    return name.startswith((_KEY_CACHE, _VALUE_CACHE))


def _rotations(config: DecoderConfig, max_model_len: int, position_ids: ov.Node) -> dict[Rope, Rotation]:
    ropes = {layer.rope for layer in config.layers if layer.rope is not None}
    return {rope: rotation(rope, config.head_dim, max_model_len, position_ids) for rope in ropes}


def _head(config: DecoderConfig, tensors: TextModelTensors, embedding: ov.Node) -> ov.Node:
    if config.tie_word_embeddings and not tensors.has_head_of_its_own:
        return embedding
    return tensors.constant(HEAD, (config.vocab_size, config.hidden_size))


def _cache(name: str) -> ov.Node:
    return _parameter(name, [-1, -1, -1, -1], ov.Type.dynamic)


def _parameter(name: str, shape: list[int], kind: ov.Type) -> ov.Node:
    parameter = ops.parameter(ov.PartialShape(shape), kind, name=name)
    parameter.output(0).get_tensor().set_names({name})
    return parameter
