"""One file for each model family; a family is the function that makes its decoder's graph."""

from collections.abc import Callable

import openvino as ov

from engine.errors import ErrorCode, SluiceError
from engine.runners.openvino.architectures import llama, qwen3
from engine.runners.openvino.layers import Context

Architecture = Callable[[Context, ov.Node], ov.Node]
"""(context, token embeddings [num_tokens, hidden_size]) -> hidden states before the LM head, same shape."""

ARCHITECTURES: dict[str, Architecture] = {"llama": llama.decoder, "qwen3": qwen3.decoder}


def architecture(model_type: str) -> Architecture:
    """The family called `model_type` in config.json. Raises SluiceError(UNIMPLEMENTED) for others."""
    try:
        return ARCHITECTURES[model_type]
    except KeyError:
        raise SluiceError(
            ErrorCode.UNIMPLEMENTED,
            f"model_type {model_type!r} is not supported; supported: {', '.join(sorted(ARCHITECTURES))}",
            param="model_path",
        ) from None
