"""LFM2: short convolutions in most layers, attention with normalized heads in the others. LFM2-MoE: with experts.

A token of a convolution needs the inputs of the few before it. Those are kept in the KV cache, half of each as a key
and half as a value: so they are shared, freed and computed again with the blocks of their tokens, as any other layer's,
at the price of more memory than the last few inputs of each sequence would take.
"""

from functools import partial

import msgspec
from msgspec.structs import replace

from sluice.engine.models.architectures.experts import read_experts, with_experts
from sluice.engine.models.config.config_file import FULL, ConfigFile, PositiveInt, base_config, unsupported
from sluice.engine.models.config.decoder_config import DecoderConfig
from sluice.engine.models.decoder import Architecture, NormedHeads, attention, pre_norm
from sluice.engine.models.experts import experts_mlp, gated_experts, sigmoid_router
from sluice.engine.models.kernels import Context, Heads, Tensor
from sluice.engine.models.layers import Mlp, gated_mlp, rms_norm
from sluice.engine.models.weights.names import TensorNames
from sluice.errors import ErrorCode, SluiceError, invalid


def short_convolution(context: Context, x: Tensor, layer: int) -> Tensor:
    """Return out(c * convolution(b * v)), where b, c and v are projections of x."""
    config, kernels, name = context.config, context.kernels, f"model.layers.{layer}.conv"
    size, bias = config.hidden_size, config.convolution_bias
    both = kernels.linear(x, f"{name}.in_proj", 3 * size, bias=bias)
    before, after, values = (kernels.part(both, each * size, (each + 1) * size) for each in range(3))
    total = kernels.convolve(kernels.multiply(before, values), layer, f"{name}.conv.weight")
    if bias:
        total = kernels.add(total, kernels.weight(f"{name}.conv.bias", (size,)))
    return kernels.linear(kernels.multiply(after, total), f"{name}.out_proj", size, bias=bias)


def cache_heads(config: DecoderConfig) -> Heads:
    """Return the heads that hold half of an input. The number of query heads and the size are those of the layers with
    attention, because the nodes of a graph share buffers that are made for the first: with other numbers OpenVINO
    2026.4 writes beyond them. Raises UNIMPLEMENTED if half an input does not fit."""
    count, rest = divmod(config.hidden_size // 2, config.head_dim)
    if rest or config.num_heads % count:
        message = (
            f"hidden_size {config.hidden_size} with {config.num_heads} heads of {config.head_dim} is not supported"
        )
        raise SluiceError(
            ErrorCode.UNIMPLEMENTED,
            f"{message} in this family; half of it must be heads, whose number divides that of the attention",
            param="model_path",
        )
    return Heads(config.num_heads, count, config.head_dim)


_CONVOLUTION = "conv"


class _Lfm2Fields(msgspec.Struct, frozen=True):
    norm_eps: float = 1e-5
    conv_bias: bool = False
    conv_L_cache: PositiveInt = 3
    block_ff_dim: PositiveInt | None = None
    block_multiple_of: PositiveInt = 256
    block_ffn_dim_multiplier: float | None = 1.0
    block_auto_adjust_ff_dim: bool = True
    full_attn_idxs: list[int] | None = None
    layer_types: list[str] | None = None
    tie_embedding: bool | None = None


def configure_lfm2(file: ConfigFile) -> DecoderConfig:
    fields, file = file.read(_Lfm2Fields), file.with_defaults(tie_word_embeddings=True)
    if fields.tie_embedding is not None:
        file = file.with_values(tie_word_embeddings=fields.tie_embedding)
    config = base_config(file, theta=1_000_000.0)
    kinds = _kinds(fields, config.num_layers)
    return replace(
        config,
        norm_eps=fields.norm_eps,
        intermediate_size=_intermediate_size(fields, fields.block_ff_dim or config.intermediate_size),
        layers=tuple(
            replace(layer, is_convolution=kind == _CONVOLUTION)
            for layer, kind in zip(config.layers, kinds, strict=False)
        ),
        convolution_size=fields.conv_L_cache,
        convolution_bias=fields.conv_bias,
    )


def _kinds(fields: _Lfm2Fields, num_layers: int) -> list[str]:
    attending = range(num_layers) if fields.full_attn_idxs is None else fields.full_attn_idxs
    kinds = fields.layer_types or [FULL if layer in attending else _CONVOLUTION for layer in range(num_layers)]
    if len(kinds) < num_layers:
        raise invalid("model_path", f"config.json: layer_types names {len(kinds)} layers of {num_layers}")
    for kind in kinds:
        if kind not in (FULL, _CONVOLUTION):
            raise unsupported(f"layer type {kind!r} is not supported; supported: {FULL}, {_CONVOLUTION}")
    return kinds


def _intermediate_size(fields: _Lfm2Fields, stated: int) -> int:
    """Return the features between the matrices of an MLP, which config.json states before they are cut and rounded."""
    if not fields.block_auto_adjust_ff_dim:
        return stated
    size = int(2 * stated / 3)
    if fields.block_ffn_dim_multiplier is None:
        return size
    return -(-int(fields.block_ffn_dim_multiplier * size) // fields.block_multiple_of) * fields.block_multiple_of


_attention = partial(attention, heads_step=NormedHeads(rms_norm))


def _decoder(context: Context, x: Tensor, mlp: Mlp = gated_mlp) -> Tensor:
    def mix(context: Context, x: Tensor, layer: int) -> Tensor:
        if context.config.layers[layer].is_convolution:
            return short_convolution(context, x, layer)
        return _attention(context, x, layer)

    return pre_norm(context, x, attention=mix, mlp=mlp)


_NAMES = TensorNames(
    norm="embedding_norm",
    parts={
        "input_layernorm": "operator_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.o_proj": "self_attn.out_proj",
        "q_norm": "q_layernorm",
        "k_norm": "k_layernorm",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "mlp.": "feed_forward.",
    },
)
LFM2 = Architecture(configure_lfm2, _decoder, _NAMES)


# -- LFM2-MoE: experts after the first layers


class _Lfm2MoeFields(msgspec.Struct, frozen=True):
    moe_intermediate_size: PositiveInt = 1792
    num_dense_layers: int = 2
    use_expert_bias: bool = True
    routed_scaling_factor: float = 1.0
    norm_topk_prob: bool = True


def configure_lfm2_moe(file: ConfigFile) -> DecoderConfig:
    file = file.with_defaults(num_experts_per_tok=4, num_experts=32).with_values(block_auto_adjust_ff_dim=False)
    config, fields = configure_lfm2(file), file.read(_Lfm2MoeFields)
    experts = replace(
        read_experts(file, size=fields.moe_intermediate_size, is_normalized=fields.norm_topk_prob),
        weight_scale=fields.routed_scaling_factor,
        has_bias=fields.use_expert_bias,
    )
    return with_experts(config, experts, [layer >= fields.num_dense_layers for layer in range(config.num_layers)])


_router = partial(sigmoid_router, bias="expert_bias", eps=1e-6)
LFM2_MOE = Architecture(
    configure_lfm2_moe, partial(_decoder, mlp=partial(experts_mlp, router=_router, body=gated_experts)), _NAMES
)
