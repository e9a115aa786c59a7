"""A checkpoint's tensors under the names that a text model gives them."""

import openvino as ov

from engine.runners.openvino.weights.checkpoint import Checkpoint

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
_PLAIN = ("model.", "lm_head.")
_WITH_OTHERS = (("language_model.model.", "language_model.lm_head."), ("model.language_model.", "lm_head."))
"""What the text model's names begin with where the checkpoint holds another for images beside it."""


class Tensors:
    """Finds the text model by its embedding."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._beginnings = _PLAIN
        for beginnings in _WITH_OTHERS:
            if EMBEDDING.replace(_PLAIN[0], beginnings[0]) in checkpoint.tensors:
                self._beginnings = beginnings

    @property
    def has_head_of_its_own(self) -> bool:
        """Whether an LM head is stored, in a checkpoint of several models: their configurations are vague on it."""
        return self._beginnings != _PLAIN and self._stored(HEAD) in self._checkpoint.tensors

    def constant(self, name: str, shape: tuple[int, ...]) -> ov.Node:
        """See `Checkpoint.constant`."""
        return self._checkpoint.constant(self._stored(name), shape)

    def _stored(self, name: str) -> str:
        for plain, beginning in zip(_PLAIN, self._beginnings, strict=True):
            if name.startswith(plain):
                return beginning + name.removeprefix(plain)
        return name
