"""Builds the OpenVINO model of a checkpoint: the inputs of one step in, logits of the sampled rows out."""

from dataclasses import dataclass

import openvino as ov
from openvino import opset13 as ops

from sluice.engine.models.architectures import find_architecture
from sluice.engine.models.config.decoder_config import DecoderConfig
from sluice.engine.models.kernels import Context
from sluice.engine.models.text_model import compute_hidden, compute_logits
from sluice.engine.models.weights.names import TextModelTensors
from sluice.engine.runners.openvino.graph.adapters import AdapterInputs, named_parameter
from sluice.engine.runners.openvino.graph.kernels import GraphKernels
from sluice.engine.runners.openvino.graph.paged_attention import PagedInputs
from sluice.engine.runners.openvino.weights.checkpoint import CheckpointWeights, NamedWeights

STEP_INPUTS = (
    "token_ids",
    "position_ids",
    "past_lens",
    "subsequence_begins",
    "block_indices",
    "block_indices_begins",
    "sampled_rows",
)
"""Names of the vector inputs, all i32, which are fields of `StepBatch`. A scalar and the caches are inputs too."""
MAX_CONTEXT_LEN = "max_context_len"
_KEY_CACHE, _VALUE_CACHE = "key_cache.", "value_cache."


@dataclass(frozen=True, slots=True)
class Decoder:
    """A paged-attention graph with the inputs and the output of `build_model`, and its limits."""

    model: ov.Model
    weights: CheckpointWeights | None
    """The memory that the graph's constants point into; it must live as long as the compiled model. None where OpenVINO
    maps it itself."""
    model_type: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    """Most tokens of one sequence, prompt and output together."""
    quantization: str
    """Compression of the weights in memory: none, int8, int4."""
    embedding_size: int = 0
    """Elements of the hidden states that the graph gives in the place of logits; 0 where it gives logits."""
    adapters: AdapterInputs | None = None
    """The graph's inputs for LoRA adapters; None in one without."""
    pads_sequences: bool = False
    """Whether attention takes memory for as many tokens and blocks of each sequence of a step as the longest has."""


def build_model(
    config: DecoderConfig,
    weights: CheckpointWeights,
    max_model_len: int | None = None,
    *,
    has_head: bool = True,
    adapters: AdapterInputs | None = None,
    pads_values: bool = False,
) -> ov.Model:
    """Build the graph. One that `has_head` False returns hidden states [num_sampled, hidden_size] for logits. With
    `adapters`, its projections have inputs for LoRA adapters, which are added there.

    Inputs: STEP_INPUTS [-1] i32, MAX_CONTEXT_LEN [] i32, `key_cache.N` and `value_cache.N`, whose type and shape the
    compiler chooses. Output: logits [num_sampled, vocab_size] f32. `max_model_len` is the length of the longest
    sequence (see `rope`), by default what the model was made for. For `pads_values` see `GraphKernels`.

    Raises SluiceError if the checkpoint does not match its config.json, or is not supported.
    """
    step = {name: named_parameter(name, [-1], ov.Type.i32) for name in STEP_INPUTS}
    max_context_len = named_parameter(MAX_CONTEXT_LEN, [], ov.Type.i32)
    caches = tuple((_cache(f"{_KEY_CACHE}{i}"), _cache(f"{_VALUE_CACHE}{i}")) for i in range(config.num_layers))
    paged = PagedInputs(
        past_lens=step["past_lens"],
        subsequence_begins=step["subsequence_begins"],
        block_indices=step["block_indices"],
        block_indices_begins=step["block_indices_begins"],
        max_context_len=max_context_len,
    )
    names = TextModelTensors(weights.tensors, find_architecture(config.model_type).names)
    names.check_num_layers(config)
    longest = max_model_len or config.max_position_embeddings
    named = NamedWeights(weights, names)
    kernels = GraphKernels(config, named, step, paged, caches, longest, adapters=adapters, pads_values=pads_values)
    context = Context(config, kernels)
    output = compute_hidden(context)
    if has_head:
        output = compute_logits(context, output, has_own_head=names.has_own_head)
    else:
        output = ops.convert(output, "f32")
    names.check_leftovers(config)
    parameters = [*step.values(), max_context_len, *(cache for pair in caches for cache in pair)]
    parameters += adapters.parameters if adapters is not None else []
    return ov.Model([ops.result(output)], parameters, config.model_type)


def is_cache(name: str) -> bool:
    """Return whether the input `name` is a layer's key or value cache."""
    return name.startswith((_KEY_CACHE, _VALUE_CACHE))


def _cache(name: str) -> ov.Node:
    return named_parameter(name, [-1, -1, -1, -1], ov.Type.dynamic)
