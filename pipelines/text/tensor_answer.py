"""The responses of a model over tensors as the events of a text."""

from collections.abc import Iterator

import msgspec

from engine.types import FinishReason
from pipelines.text.citations import cite
from pipelines.text.sources import Source, decoded
from pipelines.text.types import Retrieval, TextDetail, TextEvent
from serving.request import InferResponse
from serving.tensors.tensor import Tensor
from sluice.errors import ErrorCode, SluiceError

SOURCES, DROPPED = "sources", "dropped"
"""Outputs that tell what was retrieved: a source as JSON in each element, "" where there are fewer."""
FINISH_REASON = "finish_reason"
NUM_INPUT_TOKENS, NUM_OUTPUT_TOKENS, NUM_CACHED_TOKENS = "num_input_tokens", "num_output_tokens", "num_cached_tokens"
_COUNTS = (NUM_INPUT_TOKENS, NUM_OUTPUT_TOKENS, NUM_CACHED_TOKENS)
TOLD = frozenset({SOURCES, DROPPED, FINISH_REASON, *_COUNTS})
"""The outputs that are read beside the text."""


class TensorAnswer:
    """Makes the events of one request, whose responses it sees in order."""

    def __init__(self, model: str, output: str) -> None:
        """`output` is the tensor with the text."""
        self._model = model
        self._output = output
        self._texts: list[str] = []
        self._retrieval: Retrieval | None = None
        self._finish_reason = FinishReason.STOP
        self._counts = dict.fromkeys(_COUNTS, 0)

    def events(self, response: InferResponse) -> Iterator[TextEvent]:
        """What a response tells. Raises its error, and INTERNAL for sources that are none."""
        if response.error is not None:
            raise response.error
        tensors = {tensor.name: tensor for tensor in response.outputs}
        if self._note_retrieved(tensors):
            yield _event("", TextDetail(retrieval=self._retrieval))
        self._note_end(tensors)
        text = "".join(_texts(tensors.get(self._output)))
        if text:
            self._texts.append(text)
        if response.is_final:
            yield self._last(text)
        elif text:
            yield _event(text)

    def _note_retrieved(self, tensors: dict[str, Tensor]) -> bool:
        if tensors.keys().isdisjoint((SOURCES, DROPPED)):
            return False
        before = self._retrieval or Retrieval()
        self._retrieval = Retrieval(
            sources=self._sources(tensors[SOURCES]) if SOURCES in tensors else before.sources,
            dropped=self._sources(tensors[DROPPED]) if DROPPED in tensors else before.dropped,
        )
        return True

    def _sources(self, tensor: Tensor) -> tuple[Source, ...]:
        try:
            return tuple(decoded(element) for element in tensor.array.ravel() if element)
        except msgspec.DecodeError as error:
            message = f"model '{self._model}' gave an element of '{tensor.name}' that is no source: {error}"
            raise SluiceError(ErrorCode.INTERNAL, message) from None

    def _note_end(self, tensors: dict[str, Tensor]) -> None:
        for name in _COUNTS:
            if name in tensors:
                self._counts[name] = int(tensors[name].array.flat[0])
        told = "".join(_texts(tensors.get(FINISH_REASON)))
        if told:
            self._finish_reason = FinishReason.LENGTH if told == FinishReason.LENGTH else FinishReason.STOP

    def _last(self, text: str) -> TextEvent:
        counts, detail = self._counts, None
        if self._retrieval is not None:
            detail = TextDetail(retrieval=self._with_citations(self._retrieval))
        return TextEvent(
            text=text,
            num_tokens=counts[NUM_OUTPUT_TOKENS],
            prompt_tokens=counts[NUM_INPUT_TOKENS],
            completion_tokens=counts[NUM_OUTPUT_TOKENS],
            finish_reason=self._finish_reason,
            cached_tokens=counts[NUM_CACHED_TOKENS],
            detail=detail,
        )

    def _with_citations(self, retrieval: Retrieval) -> Retrieval:
        citations = cite("".join(self._texts), retrieval.sources)
        return msgspec.structs.replace(retrieval, citations=tuple(citations))


def _event(text: str, detail: TextDetail | None = None) -> TextEvent:
    return TextEvent(text=text, num_tokens=0, prompt_tokens=0, completion_tokens=0, detail=detail)


def _texts(tensor: Tensor | None) -> Iterator[str]:
    if tensor is not None:
        for element in tensor.array.ravel():
            yield element.decode(errors="replace")
