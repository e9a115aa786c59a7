"""NVIDIA's `postprocessing` stage: token ids to text."""

from collections.abc import Iterator

import numpy as np
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import SluiceError, invalid
from sluice.pipelines.stages.stage import PASSED_THROUGH, Outputs, StageModel
from sluice.pipelines.text.detokenizer import Detokenizer
from sluice.pipelines.text.tokenizer import Tokenizer
from sluice.serving.request import InferRequest
from sluice.serving.tensors.tensor import Array

TOKENS, LENGTHS, OUTPUT = "TOKENS_BATCH", "SEQUENCE_LENGTH", "OUTPUT"


class PostprocessingModel(StageModel):
    """Decodes each sequence as a whole text.

    A streaming ensemble sends it the tokens of one response at a time. Where tokens depend on their neighbours, the
    text loses spaces that way, as in Triton. BLS keeps the tokens before and gets the text right.
    """

    def __init__(self, config: ModelConfig, version: int, tokenizer: Tokenizer, *, skips_special: bool) -> None:
        """Take the tokenizer. With `skips_special` control tokens are not part of the text."""
        super().__init__(config, version)
        self._tokenizer = tokenizer
        self._skips_special = skips_special

    def detokenizer(self) -> Detokenizer | None:
        """Return a detokenizer for one sequence; None where control tokens are shown, which it would leave out."""
        return self._tokenizer.detokenizer() if self._skips_special else None

    def _size(self, request: InferRequest) -> int:
        return request.inputs[TOKENS].num_elements

    def _outputs(self, request: InferRequest) -> Outputs:
        tokens, lengths = request.inputs[TOKENS].array, request.inputs[LENGTHS].array
        if not self._is_batched:
            tokens, lengths = tokens[np.newaxis], lengths[np.newaxis]
        _check(request, tokens, lengths)
        # One dimension for rows and beams together, as NVIDIA's stage has it, whose clients read element 0 as a text.
        texts = np.array([self._text(ids) for ids in _sequences(tokens, lengths)], np.object_)
        return {OUTPUT: texts if self._is_batched else texts[np.newaxis]} | self._passed_through(request)

    def _passed_through(self, request: InferRequest) -> Outputs:
        given = {f"OUT_{name}": request.inputs[name].array for name in PASSED_THROUGH & request.inputs.keys()}
        return given if self._is_batched else {name: array[np.newaxis] for name, array in given.items()}

    def _text(self, token_ids: list[int]) -> bytes:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skips_special).encode()


def _sequences(tokens: Array, lengths: Array) -> Iterator[list[int]]:
    """Yield the sequences of tokens [rows, beams, longest] with lengths [rows, beams], row by row."""
    for ids, length in zip(tokens.reshape(lengths.size, tokens.shape[-1]), lengths.ravel(), strict=True):
        yield ids[:length].tolist()


def _check(request: InferRequest, tokens: Array, lengths: Array) -> None:
    if lengths.shape != tokens.shape[:-1]:
        message = f"must have a length for each sequence of {TOKENS} {list(tokens.shape)}, got {list(lengths.shape)}"
        raise _wrong(request, LENGTHS, message)
    if lengths.size and not 0 <= lengths.min() <= lengths.max() <= tokens.shape[-1]:
        raise _wrong(request, LENGTHS, f"must be between 0 and the {tokens.shape[-1]} tokens of {TOKENS}")
    if tokens.size and tokens.min() < 0:
        raise _wrong(request, TOKENS, f"must hold token ids, got {tokens.min()}")


def _wrong(request: InferRequest, name: str, message: str) -> SluiceError:
    return invalid(name, f"{request.log_prefix}input '{name}' {message}")
