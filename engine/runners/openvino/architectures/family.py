"""What a model family is."""

from collections.abc import Callable
from dataclasses import dataclass

import openvino as ov

from engine.runners.openvino.config.config_file import ConfigFile
from engine.runners.openvino.config.decoder_config import ModelConfig
from engine.runners.openvino.graph.layers import Context


@dataclass(frozen=True, slots=True)
class Family:
    """How a family reads its `config.json`, and how its decoder is put together."""

    configure: Callable[[ConfigFile], ModelConfig]
    decoder: Callable[[Context, ov.Node], ov.Node]
    """(context, token embeddings [num_tokens, hidden_size]) -> hidden states before the LM head, same shape."""
