"""Classifies texts with a model of the repository whose output has labels."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.pipelines.encoding.encoder import prepare_inputs, split_batches
from sluice.pipelines.encoding.signature import Inputs, choose_inputs, find_tokenizer
from sluice.serving.backend import ModelLookup
from sluice.serving.model import Model, infer_one
from sluice.serving.request import InferRequest
from sluice.serving.spec import TensorSpec

ACTIVATION = "classification_activation"
"""Parameter of a model: how its output becomes probabilities. By default softmax; of a single class sigmoid."""
Scores = NDArray[np.float32]


def _softmax(logits: Scores) -> Scores:
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))


def _sigmoid(logits: Scores) -> Scores:
    return np.asarray(0.5 * (1 + np.tanh(0.5 * logits)))  # which overflows nowhere


_ACTIVATIONS: dict[str, Callable[[Scores], Scores]] = {
    "softmax": _softmax,
    "sigmoid": _sigmoid,
    "none": lambda logits: logits,
}


@dataclass(frozen=True, slots=True)
class Classes:
    """The scores [texts, classes] and the classes' labels, and how many tokens the model saw: 0 where the server has no
    tokenizer for the model."""

    labels: list[str]
    scores: Scores
    num_tokens: int


class TextClassifier:
    """Classifies texts with the model `name`, which it looks up on every call so that a reload takes effect."""

    max_model_len = None

    def __init__(self, models: ModelLookup, name: str) -> None:
        self.name = name
        self._models = models

    @property
    def created(self) -> int:
        """When the model was loaded, in seconds since 1970. Raises as the lookup does."""
        return self._models.find(self.name).created

    async def classify(
        self, inputs: Inputs, label: Callable[[int], str], *, truncate_to: int | None = None, activates: bool = True
    ) -> Classes:
        """Classify texts or token ids. Without `activates` the scores are the model's own numbers. Raises as
        `prepare_inputs`; INVALID for a model that classifies no texts; and the model's own errors."""
        model = self._models.find(self.name)
        output = _find_output(model)
        if output is None:
            raise invalid("model", f"model {self.name!r} has no output with labels (label_filename)")
        taken = choose_inputs(model, self._models)
        tokenizer = find_tokenizer(model, self._models)
        rows, num_tokens = await prepare_inputs(
            tokenizer, inputs, label, takes_ids=taken.takes_ids, truncate_to=truncate_to
        )
        scores = np.zeros((len(rows), 0), np.float32)
        for batch in split_batches(rows, taken.max_rows):
            built = await taken.build_batch(cast(Inputs, [rows[index] for index in batch]))
            response = await infer_one(model, InferRequest(built.inputs, requested_outputs=(output.name,)))
            found = np.asarray(response.outputs[0].array, np.float32).reshape(len(batch), -1)
            if not scores.size:
                scores = np.zeros((len(rows), found.shape[1]), np.float32)
            scores[batch] = found
        if not np.isfinite(scores).all():
            raise SluiceError(ErrorCode.INTERNAL, f"model '{self.name}' gave a score that is no number")
        labels = [*model.labels[output.name]][: scores.shape[1]]
        labels += [f"LABEL_{index}" for index in range(len(labels), scores.shape[1])]
        return Classes(labels, _choose_activation(model, scores.shape[1])(scores) if activates else scores, num_tokens)


def is_classifier(model: Model, models: ModelLookup) -> bool:
    """Whether the model classifies texts: it takes them or their tokens, and its output has labels."""
    if _find_output(model) is None:
        return False
    try:
        choose_inputs(model, models)
    except SluiceError:
        return False
    return True


def _find_output(model: Model) -> TensorSpec | None:
    outputs = list(model.spec.outputs.values())
    is_one = len(outputs) == 1 and len(outputs[0].dims) == 1 and outputs[0].data_type.dtype.kind == "f"
    return outputs[0] if is_one and model.labels.get(outputs[0].name) else None


def _choose_activation(model: Model, num_classes: int) -> Callable[[Scores], Scores]:
    default = "softmax" if num_classes > 1 else "sigmoid"
    parameters = model.config.parameters
    name = parameters[ACTIVATION].string_value if ACTIVATION in parameters else default
    if name not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise invalid("model", f"parameter '{ACTIVATION}' of model '{model.name}' must be one of {known}, got {name!r}")
    return _ACTIVATIONS[name]
