"""Phi-3 and Phi-4-mini: Llama with fused matrices, heads that turn in part, and LongRoPE."""

from functools import partial

import msgspec

from engine.runners.openvino.architectures.family import Family
from engine.runners.openvino.config.config_file import ConfigFile, base_config, with_window
from engine.runners.openvino.config.decoder_config import ModelConfig
from engine.runners.openvino.graph.layers import fused_gated_mlp
from engine.runners.openvino.graph.self_attention import attention, fused_projections
from engine.runners.openvino.graph.stacks import pre_norm


class _Fields(msgspec.Struct, frozen=True):
    sliding_window: int | None = None


def configure(file: ConfigFile) -> ModelConfig:
    file = file.with_defaults(rms_norm_eps=1e-5, original_max_position_embeddings=4096)
    return with_window(base_config(file, partial=1.0), file.read(_Fields).sliding_window)


_attention = partial(attention, project=fused_projections)
FAMILY = Family(configure, partial(pre_norm, attention=_attention, mlp=fused_gated_mlp))
