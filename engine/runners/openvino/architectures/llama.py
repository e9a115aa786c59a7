"""Llama: pre-norm blocks of grouped-query attention and SwiGLU."""

import openvino as ov
from openvino import opset13 as ops

from engine.runners.openvino.layers import Context, attention, mlp, rms_norm


def decoder(context: Context, x: ov.Node) -> ov.Node:
    size = context.config.hidden_size
    for layer in range(context.config.num_layers):
        name = f"model.layers.{layer}"
        normed = rms_norm(context, x, f"{name}.input_layernorm", size)
        x = ops.add(x, attention(context, normed, layer))
        normed = rms_norm(context, x, f"{name}.post_attention_layernorm", size)
        x = ops.add(x, mlp(context, normed, layer))
    return rms_norm(context, x, "model.norm", size)
