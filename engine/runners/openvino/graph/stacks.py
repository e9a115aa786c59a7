"""How blocks of attention and MLP are stacked into a decoder. The arrangements differ in where the norms stand."""

from collections.abc import Callable

import openvino as ov
from openvino import opset13 as ops

from engine.runners.openvino.graph.layers import Context, Mlp, Norm, gated_mlp, rms_norm
from engine.runners.openvino.graph.nodes import scaled
from engine.runners.openvino.graph.self_attention import attention

Attention = Callable[[Context, ov.Node, int], ov.Node]
"""(context, x, layer) -> what is added to x."""


def pre_norm(
    context: Context, x: ov.Node, *, attention: Attention = attention, mlp: Mlp = gated_mlp, norm: Norm = rms_norm
) -> ov.Node:
    """Llama's: attention and MLP each read a normalised copy of the stream."""
    for layer in range(context.config.num_layers):
        name = f"model.layers.{layer}"
        x = _add(context, x, attention(context, norm(context, x, f"{name}.input_layernorm"), layer))
        x = _add(context, x, mlp(context, norm(context, x, f"{name}.post_attention_layernorm"), layer))
    return norm(context, x, "model.norm")


def post_norm(context: Context, x: ov.Node, *, attention: Attention, norm: Norm = rms_norm) -> ov.Node:
    """OLMo 2's: what attention and MLP give is normalised before it is added."""
    for layer in range(context.config.num_layers):
        name = f"model.layers.{layer}"
        x = _add(context, x, norm(context, attention(context, x, layer), f"{name}.post_attention_layernorm"))
        x = _add(context, x, norm(context, gated_mlp(context, x, layer), f"{name}.post_feedforward_layernorm"))
    return norm(context, x, "model.norm")


def sandwich_norm(context: Context, x: ov.Node, *, norm: Norm, attention: Attention = attention) -> ov.Node:
    """Gemma 2's: a norm before and after both."""
    for layer in range(context.config.num_layers):
        name = f"model.layers.{layer}"
        attended = attention(context, norm(context, x, f"{name}.input_layernorm"), layer)
        x = _add(context, x, norm(context, attended, f"{name}.post_attention_layernorm"))
        widened = gated_mlp(context, norm(context, x, f"{name}.pre_feedforward_layernorm"), layer)
        x = _add(context, x, norm(context, widened, f"{name}.post_feedforward_layernorm"))
    return norm(context, x, "model.norm")


def _add(context: Context, x: ov.Node, update: ov.Node) -> ov.Node:
    return ops.add(x, scaled(update, context.config.residual_scale))
