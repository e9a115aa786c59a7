"""Families like `llama` with normalized heads: Apertus, Hunyuan; and GLM 4, whose norms are elsewhere."""

from functools import partial

import msgspec
import numpy as np
from msgspec.structs import replace

from sluice.engine.models.architectures.llama import configure_llama
from sluice.engine.models.config.config_file import ConfigFile, base_config, rope_section
from sluice.engine.models.config.decoder_config import DecoderConfig
from sluice.engine.models.config.rope import DEFAULT_THETA, DefaultRope
from sluice.engine.models.decoder import (
    Architecture,
    NormedHeads,
    attention,
    paired_neighbours,
    pre_norm,
    sandwich_norm,
)
from sluice.engine.models.kernels import Context, Tensor
from sluice.engine.models.layers import fused_gated_mlp, plain_mlp, rms_norm
from sluice.engine.models.weights.names import TensorNames

# -- Apertus: an ungated MLP, whose activation xIELU has parameters in each layer

_XIELU = "xielu"
_APERTUS_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12_000_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def configure_apertus(file: ConfigFile) -> DecoderConfig:
    file = file.with_defaults(hidden_act=_XIELU, rms_norm_eps=1e-5)
    if not rope_section(file.fields):
        file = file.with_values(rope_scaling=_APERTUS_ROPE)
    bias = file.flag("attention_bias")
    return replace(base_config(file, own_activation=_XIELU), qkv_bias=bias, output_bias=bias)


def _apertus_mlp(context: Context, x: Tensor, layer: int) -> Tensor:
    config, kernels, name = context.config, context.kernels, f"model.layers.{layer}.mlp"
    if config.activation != _XIELU:
        return plain_mlp(context, x, layer)
    wide = _xielu(context, kernels.linear(x, f"{name}.up_proj", config.intermediate_size), f"{name}.act_fn")
    return kernels.linear(wide, f"{name}.down_proj", config.hidden_size)


def _xielu(context: Context, x: Tensor, name: str) -> Tensor:
    """Apply xIELU: a parabola above 0, an exponential below it."""
    above, below = (_softplus(_scalar(context, f"{name}.alpha_{sign}")) for sign in "pn")
    beta, eps = (_scalar(context, f"{name}.{part}", ()) for part in ("beta", "eps"))
    kernels = context.kernels
    straight = kernels.multiply(x, beta)
    parabola = kernels.multiply(kernels.multiply(x, x), above)
    exponential = kernels.subtract(kernels.subtract(kernels.exp(kernels.minimum(x, eps)), 1.0), x)
    curved = kernels.select(kernels.greater(x, 0.0), parabola, kernels.multiply(exponential, beta + below))
    return kernels.add(curved, straight)


def _scalar(context: Context, name: str, shape: tuple[int, ...] = (1,)) -> float:
    return float(context.kernels.values(name, shape).reshape(()))


def _softplus(value: float) -> float:
    return float(np.logaddexp(0, value))


_APERTUS_NAMES = TensorNames(
    parts={"input_layernorm": "attention_layernorm", "post_attention_layernorm": "feedforward_layernorm"}
)
_apertus_attention = partial(attention, heads_step=NormedHeads(rms_norm))
_apertus_decoder = partial(pre_norm, attention=_apertus_attention, mlp=_apertus_mlp)
APERTUS = Architecture(configure_apertus, _apertus_decoder, _APERTUS_NAMES)


# -- Hunyuan: heads are normalized after they are rotated; a fixed stretch of the rope


class _AlphaField(msgspec.Struct, frozen=True):
    alpha: float | None = None


def configure_hunyuan(file: ConfigFile) -> DecoderConfig:
    section = rope_section(file.fields)
    config = configure_llama(file.with_defaults(rms_norm_eps=1e-5))
    alpha = ConfigFile(section, file.path).read(_AlphaField).alpha
    if not alpha or (section.get("rope_type") or section.get("type")) != "dynamic":
        return config
    theta = section.get("rope_theta") or file.fields.get("rope_theta") or DEFAULT_THETA
    rope = DefaultRope(rope_theta=theta * alpha ** (config.head_dim / (config.head_dim - 2)))
    return replace(config, layers=tuple(replace(layer, rope=rope) for layer in config.layers))


_HUNYUAN_NAMES = TensorNames(parts={"q_norm": "query_layernorm", "k_norm": "key_layernorm"})
_hunyuan_attention = partial(attention, last_step=NormedHeads(rms_norm))
HUNYUAN = Architecture(configure_hunyuan, partial(pre_norm, attention=_hunyuan_attention), _HUNYUAN_NAMES)


# -- GLM 4: half of each head is rotated, by neighbours. Its newer models have norms before and after attention and MLP


def configure_glm(file: ConfigFile) -> DecoderConfig:
    file = file.with_defaults(head_dim=128, rms_norm_eps=1.5625e-7, attention_bias=True)
    return replace(base_config(file, partial=0.5), qkv_bias=file.flag("attention_bias"))


_GLM4_NAMES = TensorNames(
    parts={
        "post_attention_layernorm": "post_self_attn_layernorm",
        "pre_feedforward_layernorm": "post_attention_layernorm",
        "post_feedforward_layernorm": "post_mlp_layernorm",
    }
)
_glm_attention = partial(attention, heads_step=paired_neighbours)
GLM = Architecture(configure_glm, partial(pre_norm, attention=_glm_attention, mlp=fused_gated_mlp))
_glm4_decoder = partial(sandwich_norm, norm=rms_norm, attention=_glm_attention, mlp=fused_gated_mlp)
GLM4 = Architecture(configure_glm, _glm4_decoder, _GLM4_NAMES)
