"""The tensors of a text model, and whether they and config.json are about the same model."""

import logging
import re
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from sluice.engine.models.config.decoder_config import DecoderConfig
from sluice.engine.models.weights.assembled import Weight
from sluice.engine.models.weights.files import SCALES, ZEROS
from sluice.engine.models.weights.mapped import FLOAT_TYPES, StoredTensor
from sluice.errors import invalid

logger = logging.getLogger(__name__)

EMBEDDING = "model.embed_tokens.weight"
POSITIONS = "model.embed_positions.weight"
HEAD, HEAD_BIAS = "lm_head.weight", "lm_head.bias"
_PLAIN = ("model.", "lm_head.")
_OTHER_PREFIXES = (
    ("language_model.model.", "language_model.lm_head."),
    ("model.language_model.", "lm_head."),
    ("", "lm_head."),
)
"""Prefixes of the text model's names in a checkpoint that has an image model beside it, and in one without a head."""
_SHOWN = 2

_HARMLESS = re.compile(
    r"rotary_emb\.inv_freq$"  # frequencies of the rope, which older transformers stored: config.json implies them
    r"|\.(attn|attention)\.(masked_)?bias$"  # causal masks (GPT-2, GPT-NeoX)
    r"|\.[kv]_scale$"  # scales of an fp8 KV cache, which the cache here does not have
    r"|^(model\.)?mtp[._]"  # layers that draft tokens (MTP), which no text depends on
    r"|(^|\.)(vision_tower|vision_model|vision_encoder|visual|multi_modal_projector|patch_merger)\."  # image model
)
"""Matches tensors that the graph may leave out without a change of the text."""


_ROUTER = re.compile(r"\.(gate|router|router\.layer)$")


def is_router(name: str) -> bool:
    """Return whether a projection, by its plain name, chooses experts."""
    return bool(_ROUTER.search(name))


class TensorNames(msgspec.Struct, frozen=True):
    """The names of a family's tensors, where they are not those of a plain text model."""

    body: str = "model."
    """Prefix of all tensors but the LM head's."""
    head: str = "lm_head."
    layers: str = "layers"
    norm: str = "norm"
    """The norm after the last layer."""
    parts: dict[str, str] = {}
    """Parts of plain names and those that the family has in their place, in the order in which they are replaced."""

    def of_module(self, module: str) -> str:
        """Return the family's name of a plain one that begins with `model.`."""
        inner = module.removeprefix(_PLAIN[0]).replace("layers.", f"{self.layers}.")
        if inner.startswith("norm"):
            return self.body + self.norm + inner.removeprefix("norm")
        for plain, own in self.parts.items():
            inner = inner.replace(plain, own)
        return self.body + inner


PLAIN_NAMES = TensorNames()


class TextModelTensors:
    """The names of a checkpoint's `tensors` by those of a plain text model, which is found by its embedding. It
    remembers which of them were asked for."""

    def __init__(self, tensors: Mapping[str, Weight], names: TensorNames = PLAIN_NAMES) -> None:
        self._tensors = tensors
        self._names = names
        self._layer_number = re.compile(rf"{names.layers}\.(\d+)\.")
        self._used: set[str] = set()
        self._prefixes = (names.body, names.head)
        for prefixes in _OTHER_PREFIXES:
            if names.of_module(EMBEDDING).replace(names.body, prefixes[0], 1) in tensors:
                self._prefixes = prefixes

    @property
    def has_own_head(self) -> bool:
        """Whether the checkpoint has an LM head that is not its embedding, whatever config.json says: transformers uses
        it then, and the configurations of several models in one are vague."""
        head, embedding = self._stored_name(HEAD), self._stored_name(EMBEDDING)
        tensors = self._tensors
        return head in tensors and not all(
            _are_equal(tensors.get(head + suffix), tensors.get(embedding + suffix)) for suffix in ("", SCALES, ZEROS)
        )

    def use(self, name: str) -> str:
        """Return the stored name of a tensor that the model needs, whether the checkpoint has it or not."""
        stored_name = self._stored_name(name)
        self._used.add(stored_name)
        return stored_name

    def module(self, name: str) -> str:
        """Return the family's name of a projection, by which LoRA adapters know it."""
        return self._names.of_module(name)

    def check_num_layers(self, config: DecoderConfig) -> None:
        """Raise INVALID if the checkpoint has tensors of more or fewer layers than config.json says. Layers that draft
        tokens (MTP) follow the others, and may be missing."""
        layers = {name: layer for name in self._tensors if (layer := self._layer(name)) is not None}
        stored = max(layers.values(), default=-1) + 1
        if config.num_layers <= stored <= config.num_layers + config.num_draft_layers:
            return
        message = f"config.json: num_hidden_layers is {config.num_layers}, but the checkpoint has tensors of {stored}"
        if stored < config.num_layers:
            raise invalid("model_path", f"{message} layers; correct it, or complete the download")
        first = config.num_layers + config.num_draft_layers
        left = sorted(name for name, layer in layers.items() if layer >= first)
        raise invalid("model_path", f"{message} layers, and {_counted(left)} would not be used")

    def check_leftovers(self, config: DecoderConfig) -> None:
        """Check the tensors that no part of the graph asked for. Raises INVALID if some belong to layers, which then
        compute something else than they were trained for; logs a warning about others that are not known to be
        harmless."""
        names = [name for name in self._leftovers() if not self._is_harmless(name, config)]
        of_layers = [name for name in names if self._layer(name) is not None]
        if of_layers:
            raise invalid(
                "model_path",
                f"a model of type {config.model_type} by this config.json has no use for {_counted(of_layers)} of its "
                "layers; model_type, or a field such as attention_bias, is of another model",
            )
        if names:
            logger.warning("the checkpoint has %s that the model does not use", _counted(names))

    def _leftovers(self) -> list[str]:
        """Return the names of the tensors that are neither used nor a part of one that is, sorted."""
        stored = self._tensors
        compressed = [name for name in self._used if name in stored and stored[name].dtype not in FLOAT_TYPES]
        parts = {f"{name}{suffix}" for name in compressed for suffix in (SCALES, ZEROS)}
        return sorted(name for name in stored if name not in self._used and name not in parts)

    def _is_harmless(self, name: str, config: DecoderConfig) -> bool:
        if name == self._stored_name(HEAD):  # the embedding, stored again
            return True
        layer = self._layer(name)
        return bool(_HARMLESS.search(name)) or (layer is not None and layer >= config.num_layers)

    def _layer(self, name: str) -> int | None:
        """Return the number of the layer that a stored tensor belongs to; None for one outside of the layers."""
        prefix = self._prefixes[0]
        found = self._layer_number.match(name, len(prefix)) if name.startswith(prefix) else None
        return None if found is None else int(found[1])

    def _stored_name(self, name: str) -> str:
        body, head = self._prefixes
        if name.startswith(_PLAIN[1]):
            return head + name.removeprefix(_PLAIN[1])
        return body + self._names.of_module(name).removeprefix(self._names.body)


def _are_equal(one: Weight | None, other: Weight | None) -> bool:
    if not isinstance(one, StoredTensor) or not isinstance(other, StoredTensor):
        return one is other
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    pairs = zip(one.array(), other.array(), strict=True)  # by rows, because the first of them tell most others apart
    return all(np.array_equal(row, same) for row, same in pairs)


def _counted(names: Sequence[str]) -> str:
    """Return how many tensors there are, with the first of them as examples."""
    return f"{len(names)} tensor{'s' * (len(names) > 1)} ({', '.join(names[:_SHOWN])}{', …' * (len(names) > _SHOWN)})"
