"""Assembles decoders: grouped-query self-attention in the variants of the families, and the stacks of blocks."""

from collections.abc import Callable
from dataclasses import dataclass

from sluice.engine.models.config.config_file import ConfigFile
from sluice.engine.models.config.decoder_config import DecoderConfig
from sluice.engine.models.kernels import Context, HeadNorm, HeadRotation, Heads, Kernels, Scores, Tensor
from sluice.engine.models.layers import Mlp, Norm, RmsNorm, add_and_norm, gated_mlp, rms_norm
from sluice.engine.models.weights.names import PLAIN_NAMES, TensorNames

QueryKeyValue = tuple[Tensor, Tensor, Tensor]
Projection = Callable[[Context, Tensor, int], QueryKeyValue]
"""(context, x, layer) -> query, key and value, each [num_tokens, heads * head_dim]."""
HeadStep = Callable[[Context, Tensor, str], Tensor]
"""(context, heads, name of the layer's tensors + `.q` or `.k`) -> heads."""
Attention = Callable[[Context, Tensor, int], Tensor]
"""(context, x, layer) -> what is added to x."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """The way a model family reads its `config.json`, and the way its decoder is built."""

    configure: Callable[[ConfigFile], DecoderConfig]
    decoder: Callable[[Context, Tensor], Tensor]
    """(context, token embeddings [num_tokens, hidden_size]) -> hidden states before the LM head, same shape."""
    names: TensorNames = PLAIN_NAMES


# -- self-attention


def attention(
    context: Context,
    x: Tensor,
    layer: int,
    *,
    project: Projection | None = None,
    heads_step: HeadStep | None = None,
    last_step: HeadStep | None = None,
) -> Tensor:
    """Project, rotate queries and keys, attend, project back. `project` replaces the usual three matrices; `heads_step`
    is applied to each query and key head before it is rotated, `last_step` after."""
    config, kernels, name = context.config, context.kernels, tensors_prefix(layer)
    query, key, value = (project or projections)(context, x, layer)
    heads, scores = Heads(config.num_heads, config.num_kv_heads, config.head_dim), scores_of(context, layer)
    rope = config.layers[layer].rope
    if rope is None or last_step is not None:
        query = _position(context, query, layer, f"{name}.q", heads_step, last_step)
        key = _position(context, key, layer, f"{name}.k", heads_step, last_step)
        attended = kernels.attend(query, key, value, layer, heads, scores)
    else:
        norm, step = _head_norm(context, name, heads_step)
        query, key = kernels.split_heads(query, config.head_dim), kernels.split_heads(key, config.head_dim)
        if step is not None:
            query, key = step(context, query, f"{name}.q"), step(context, key, f"{name}.k")
        attended = kernels.attend_rotated(query, key, value, layer, heads, scores, HeadRotation(rope, norm))
    return project_back(context, attended, layer)


def attend_rotated(
    kernels: Kernels,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer: int,
    heads: Heads,
    scores: Scores,
    rotation: HeadRotation,
) -> Tensor:
    """Attend as `Kernels.attend_rotated`, by the operations that it is made of."""
    norm = rotation.norm
    if norm is not None:
        query = kernels.rms_norm(query, norm.query, norm.eps, offset=norm.offset)
        key = kernels.rms_norm(key, norm.key, norm.eps, offset=norm.offset)
    query, key = (kernels.join_heads(kernels.rotate(each, rotation.rope)) for each in (query, key))
    return kernels.attend(query, key, value, layer, heads, scores)


def scores_of(context: Context, layer: int) -> Scores:
    """Return the options of a layer's attention."""
    config = context.config
    return Scores(
        config.attention_scale,
        config.attention_softcap,
        config.layers[layer].window,
        f"{tensors_prefix(layer)}.sinks" if config.has_sinks else None,
    )


def _head_norm(context: Context, name: str, heads_step: HeadStep | None) -> tuple[HeadNorm | None, HeadStep | None]:
    """Return a step as a norm that the kernel of attention takes, or else the step itself."""
    if not isinstance(heads_step, NormedHeads) or not isinstance(heads_step.norm, RmsNorm):
        return None, heads_step
    eps, offset = context.config.norm_eps, heads_step.norm.offset
    return HeadNorm(f"{name}.q_norm", f"{name}.k_norm", eps, offset), None


def project_back(context: Context, attended: Tensor, layer: int) -> Tensor:
    """Apply the output projection of attention."""
    name, config = f"{tensors_prefix(layer)}.o_proj", context.config
    return context.kernels.linear(attended, name, config.hidden_size, bias=config.output_bias)


def tensors_prefix(layer: int) -> str:
    """Return the common prefix of the names of a layer's attention weights."""
    return f"model.layers.{layer}.self_attn"


def projections(context: Context, x: Tensor, layer: int) -> QueryKeyValue:
    """Project to query, key and value by a matrix each."""
    names = [f"{tensors_prefix(layer)}.{letter}_proj" for letter in "qkv"]
    query, key, value = context.kernels.linears(x, names, _sizes(context), bias=context.config.qkv_bias)
    return query, key, value


def fused_projections(context: Context, x: Tensor, layer: int) -> QueryKeyValue:
    """Project to query, key and value by one matrix."""
    kernels, (query, key, value) = context.kernels, _sizes(context)
    total = query + key + value
    fused = kernels.linear(x, f"{tensors_prefix(layer)}.qkv_proj", total, bias=context.config.qkv_bias)
    return (
        kernels.part(fused, 0, query),
        kernels.part(fused, query, query + key),
        kernels.part(fused, query + key, total),
    )


def heads_of_three(context: Context, x: Tensor, layer: int) -> QueryKeyValue:
    """Project to query, key and value by one matrix, whose rows are those of each head in turn (GPT-NeoX)."""
    config, kernels = context.config, context.kernels
    count, size = config.num_heads, config.head_dim
    fused = kernels.linear(x, f"{tensors_prefix(layer)}.heads_qkv_proj", 3 * count * size, bias=config.qkv_bias)
    by_head = kernels.split_heads(fused, 3 * size)
    query, key, value = (kernels.join_heads(kernels.part(by_head, each * size, (each + 1) * size)) for each in range(3))
    return query, key, value


def normed_projections(norm: Norm) -> Projection:
    """Return a projection whose query and key are each normalized as a whole, over all heads."""

    def project(context: Context, x: Tensor, layer: int) -> QueryKeyValue:
        query, key, value = projections(context, x, layer)
        name = tensors_prefix(layer)
        return norm(context, query, f"{name}.q_norm"), norm(context, key, f"{name}.k_norm"), value

    return project


@dataclass(frozen=True, slots=True)
class NormedHeads:
    """A step that normalizes each query and key head by itself."""

    norm: Norm

    def __call__(self, context: Context, heads: Tensor, name: str) -> Tensor:
        return self.norm(context, heads, f"{name}_norm")


def optionally_normed_heads(norm: Norm) -> HeadStep:
    """Return a step that normalizes each query and key head, if config.json has that option."""
    return lambda context, heads, name: norm(context, heads, f"{name}_norm") if context.config.has_head_norms else heads


def paired_neighbours(context: Context, heads: Tensor, name: str) -> Tensor:
    """Reorder the components that are rotated, for families that rotate neighbours. Queries and keys are reordered
    alike, so their products do not change."""
    config = context.config
    rope = next(layer.rope for layer in config.layers if layer.rope is not None)
    return context.kernels.uninterleave(heads, rope.rotary_dim(config.head_dim))


def grown_queries(context: Context, heads: Tensor, name: str) -> Tensor:
    """Scale query heads by their position; key heads do not change."""
    growth, kernels = context.config.query_growth, context.kernels
    if growth is None or not name.endswith(".q"):
        return heads
    turns = kernels.floor(kernels.divide(kernels.positions, growth.period))
    factor = kernels.add(kernels.multiply(kernels.log(kernels.add(turns, 1.0)), growth.rate), 1.0)
    return kernels.multiply(heads, factor)


def _position(
    context: Context, x: Tensor, layer: int, name: str, heads_step: HeadStep | None, last_step: HeadStep | None
) -> Tensor:
    """Split queries or keys into heads, apply `heads_step`, rotate them and apply `last_step`. The shape does not
    change."""
    rope, kernels = context.config.layers[layer].rope, context.kernels
    if rope is None and heads_step is None and last_step is None:
        return x
    heads = kernels.split_heads(x, context.config.head_dim)
    if heads_step is not None:
        heads = heads_step(context, heads, name)
    if rope is not None:
        heads = kernels.rotate(heads, rope)
    if last_step is not None:
        heads = last_step(context, heads, name)
    return kernels.join_heads(heads)


def _sizes(context: Context) -> tuple[int, int, int]:
    config = context.config
    kv_size = config.num_kv_heads * config.head_dim
    return config.num_heads * config.head_dim, kv_size, kv_size


# -- stacks of blocks, which differ in where the norms are


def pre_norm(
    context: Context, x: Tensor, *, attention: Attention = attention, mlp: Mlp = gated_mlp, norm: Norm = rms_norm
) -> Tensor:
    """Build Llama's stack: attention and MLP each read a normalized copy of the stream."""
    normed = norm(context, x, _first_norm(context, 0))
    for layer in range(context.config.num_layers):
        between = f"model.layers.{layer}.post_attention_layernorm"
        x, normed = _add_and_norm(context, x, attention(context, normed, layer), norm, between)
        x, normed = _add_and_norm(context, x, mlp(context, normed, layer), norm, _first_norm(context, layer + 1))
    return normed


def post_norm(context: Context, x: Tensor, *, attention: Attention, norm: Norm = rms_norm) -> Tensor:
    """Build OLMo 2's stack: the outputs of attention and MLP are normalized before they are added."""
    for layer in range(context.config.num_layers):
        name = f"model.layers.{layer}"
        x = _add(context, x, norm(context, attention(context, x, layer), f"{name}.post_attention_layernorm"))
        x = _add(context, x, norm(context, gated_mlp(context, x, layer), f"{name}.post_feedforward_layernorm"))
    return norm(context, x, "model.norm")


def sandwich_norm(
    context: Context, x: Tensor, *, norm: Norm, attention: Attention = attention, mlp: Mlp = gated_mlp
) -> Tensor:
    """Build Gemma 2's stack: a norm before and after both attention and MLP."""
    normed = norm(context, x, _first_norm(context, 0))
    for layer in range(context.config.num_layers):
        name = f"model.layers.{layer}"
        attended = norm(context, attention(context, normed, layer), f"{name}.post_attention_layernorm")
        x, normed = _add_and_norm(context, x, attended, norm, f"{name}.pre_feedforward_layernorm")
        widened = norm(context, mlp(context, normed, layer), f"{name}.post_feedforward_layernorm")
        x, normed = _add_and_norm(context, x, widened, norm, _first_norm(context, layer + 1))
    return normed


def parallel(
    context: Context,
    x: Tensor,
    *,
    attention: Attention = attention,
    mlp: Mlp = gated_mlp,
    norm: Norm = rms_norm,
    mlp_norm: str = "input_layernorm",
) -> Tensor:
    """Build GPT-J's stack: attention and MLP read the same stream, normalized once or each by itself."""
    normed = norm(context, x, _first_norm(context, 0))
    for layer in range(context.config.num_layers):
        read = normed if mlp_norm == "input_layernorm" else norm(context, x, f"model.layers.{layer}.{mlp_norm}")
        updates = context.kernels.add(attention(context, normed, layer), mlp(context, read, layer))
        x, normed = _add_and_norm(context, x, updates, norm, _first_norm(context, layer + 1))
    return normed


def _first_norm(context: Context, layer: int) -> str:
    """Return the name of the norm that `layer` begins with; behind the last layer, of that behind them all."""
    return f"model.layers.{layer}.input_layernorm" if layer < context.config.num_layers else "model.norm"


def _add(context: Context, x: Tensor, update: Tensor) -> Tensor:
    return context.kernels.add(x, scaled(context, update, context.config.residual_scale))


def _add_and_norm(context: Context, x: Tensor, update: Tensor, norm: Norm, name: str) -> tuple[Tensor, Tensor]:
    """Return the stream with an update, and that normalized. x must not be read any more."""
    return add_and_norm(context, x, scaled(context, update, context.config.residual_scale), norm, name)


def scaled(context: Context, x: Tensor, factor: float) -> Tensor:
    """Return x * factor; x itself if the factor is 1."""
    return x if factor == 1 else context.kernels.multiply(x, factor)
