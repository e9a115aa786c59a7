"""The requests that BLS sends to the models it calls, made of the tensors of its own request."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from sluice.pipelines.stages.stage import BLS
from sluice.serving.backends.ensemble.graph import fit_shape
from sluice.serving.model import Model
from sluice.serving.request import InferRequest, InferResponse
from sluice.serving.spec import ModelSpec
from sluice.serving.tensors.tensor import Tensor

_PREPROCESSING_INPUTS = {
    "text_input": "QUERY",
    "max_tokens": "REQUEST_OUTPUT_LEN",
    "decoder_text_input": "DECODER_QUERY",
    "bad_words": "BAD_WORDS_DICT",
    "stop_words": "STOP_WORDS_DICT",
    "embedding_bias_words": "EMBEDDING_BIAS_WORDS",
    "embedding_bias_weights": "EMBEDDING_BIAS_WEIGHTS",
    "end_id": "END_ID",
    "pad_id": "PAD_ID",
}
"""Inputs of preprocessing by the input of BLS that they are made of."""
_TOKEN_MODEL_INPUTS = {
    "INPUT_ID": ("input_ids",),
    "REQUEST_INPUT_LEN": ("input_lengths",),
    "REQUEST_OUTPUT_LEN": ("request_output_len", "max_tokens"),
    "BAD_WORDS_IDS": ("bad_words_list",),
    "STOP_WORDS_IDS": ("stop_words_list",),
    "EMBEDDING_BIAS": ("embedding_bias",),
    "OUT_END_ID": ("end_id",),
    "OUT_PAD_ID": ("pad_id",),
    "DECODER_INPUT_ID": ("decoder_input_ids",),
    "REQUEST_DECODER_INPUT_LEN": ("decoder_input_lengths",),
}
"""Names of a token model's input by the output of preprocessing that it is made of, in order of preference."""
_OPTIONAL = {
    "REQUEST_INPUT_LEN": "",
    "OUT_END_ID": "end_id",
    "OUT_PAD_ID": "pad_id",
    "STOP_WORDS_IDS": "",
    "DECODER_INPUT_ID": "decoder_text_input",
    "REQUEST_DECODER_INPUT_LEN": "decoder_text_input",
}
"""Outputs of preprocessing that a token model may lack, unless the client sent the input that they are made of.

Stop words are searched in the text too."""
_LISTS = frozenset({"STOP_WORDS_IDS", "BAD_WORDS_IDS", "EMBEDDING_BIAS"})
"""Outputs of preprocessing that are left out where they are empty."""
_RENAMED = {
    "top_k": ("runtime_top_k", "top_k"),
    "top_p": ("runtime_top_p", "top_p"),
    "length_penalty": ("len_penalty", "length_penalty"),
    "stream": ("streaming", "stream"),
    "min_tokens": ("min_tokens", "min_length"),
    "min_length": ("min_tokens", "min_length"),
    "seed": ("seed", "random_seed"),
    "random_seed": ("seed", "random_seed"),
}
"""Names of a token model's input by the input of BLS, where they differ, in order of preference."""
_EXCLUDES = "exclude_input_in_output"

_Named = tuple[str, Tensor]


@dataclass(frozen=True, slots=True)
class BlsRequest:
    """A request to BLS. `inputs` have their declared dims; `num_rows` is 0 where the BLS model does not batch."""

    request: InferRequest
    inputs: Mapping[str, Tensor]
    num_rows: int

    @classmethod
    def parse(cls, request: InferRequest, spec: ModelSpec) -> "BlsRequest":
        """Parse a checked request to the model with this specification."""
        num_rows = request.batch_size if spec.max_batch_size > 0 else 0
        leading = (num_rows,) if num_rows else ()
        inputs = {
            name: tensor if spec.inputs[name].reshape is None else tensor.reshaped((*leading, *spec.inputs[name].dims))
            for name, tensor in request.inputs.items()
        }
        return cls(request, inputs, num_rows)

    def to_preprocessing(self, model: Model) -> InferRequest:
        given = [(name, self.inputs[own]) for own, name in _PREPROCESSING_INPUTS.items() if own in self.inputs]
        return self._request(model, [self._fitted(model, name, tensor, self.num_rows) for name, tensor in given])

    def to_token_model(self, model: Model, preprocessing: Model, prepared: InferResponse) -> InferRequest:
        """Return the request to the token model: prompt and words as `prepared`, the rest as the client sent it.

        Its output must not begin with the prompt.
        """
        rows = self.num_rows if preprocessing.spec.max_batch_size > 0 else 0
        tensors = [self._fitted(model, name, tensor, rows) for name, tensor in self._prepared(model, prepared)]
        tensors += [
            self._fitted(model, _find_name(model, _RENAMED.get(own, (own,))), tensor, self.num_rows)
            for own, tensor in self.inputs.items()
            if own not in _PREPROCESSING_INPUTS and own not in BLS.other_inputs and own != _EXCLUDES
        ]
        parameters = {key: value for key, value in self.request.parameters.items() if key != _EXCLUDES}
        if _EXCLUDES in model.spec.inputs:
            excludes = Tensor.of(_EXCLUDES, np.ones((self.num_rows, 1) if self.num_rows else (1,), np.bool_))
            tensors.append(self._fitted(model, _EXCLUDES, excludes, self.num_rows))
        else:
            parameters[_EXCLUDES] = True
        return replace(self._request(model, tensors), parameters=parameters)

    def excludes_prompt(self, row: int) -> bool | None:
        """Return the client's `exclude_input_in_output` for a row, or None where it sent none."""
        given = self.inputs.get(_EXCLUDES)
        if given is not None:
            return bool(given.array.ravel()[row])
        return bool(self.request.parameters[_EXCLUDES]) if _EXCLUDES in self.request.parameters else None

    def to_postprocessing(self, model: Model, tokens: Tensor, lengths: Tensor, rows: int) -> InferRequest:
        """Return the request to postprocessing. `rows` is 0 for tensors of a model that does not batch."""
        tensors = [("TOKENS_BATCH", tokens), ("SEQUENCE_LENGTH", lengths)]
        return self._request(model, [self._fitted(model, name, tensor, rows) for name, tensor in tensors])

    def _prepared(self, model: Model, prepared: InferResponse) -> Iterable[_Named]:
        """Yield the outputs of preprocessing under the names of the token model's inputs."""
        for tensor in prepared.outputs:
            name = _find_name(model, _TOKEN_MODEL_INPUTS.get(tensor.name, ()))
            is_needed = name in model.spec.inputs or _OPTIONAL.get(tensor.name, name) in self.inputs
            is_empty = tensor.name in _LISTS and not tensor.num_elements
            if name and not is_empty and (is_needed or tensor.name not in _OPTIONAL):
                yield name, tensor

    def _fitted(self, model: Model, name: str, tensor: Tensor, rows: int) -> _Named:
        spec = model.spec.inputs.get(name)
        if spec is None:  # the model's own check reports an unknown input
            return name, tensor
        return name, fit_shape(tensor, spec.dims, is_batching=model.spec.max_batch_size > 0, batch_size=rows)

    def _request(self, model: Model, tensors: Iterable[_Named]) -> InferRequest:
        inputs = {name: tensor.renamed(name) for name, tensor in tensors}
        return replace(self.request, inputs=inputs, requested_outputs=(), batch_size=1)


def _find_name(model: Model, names: tuple[str, ...]) -> str:
    """Return the first of the names that is an input of the model, else the first name; "" without names."""
    return next((name for name in names if name in model.spec.inputs), names[0] if names else "")
