"""One request to BLS: texts to tokens, tokens to more tokens, and those to text."""

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np

from pipelines.llm.parameters import excludes_input
from pipelines.stages.handing_on import Handing
from pipelines.stages.postprocessing import OUTPUT, PostprocessingModel
from pipelines.stages.written_text import DecodedText, DetokenizedText, GrowingText, StoppedText
from pipelines.text.text_rows import text_rows, text_tensor
from serving.backends.ensemble.shapes import fitted
from serving.job import InferJob
from serving.model import Model, infer_one, infer_stream
from serving.request import InferRequest, InferResponse
from serving.spec import ModelSpec
from serving.tensors.tensor import Tensor
from sluice.errors import ErrorCode, SluiceError

TEXT = "text_output"
_STOP_WORDS = "stop_words"


@dataclass(frozen=True, slots=True)
class Callees:
    """The models that BLS calls."""

    preprocessing: Model
    token_model: Model
    postprocessing: Model


class BlsRun:
    """Answers one job. Cancelling its task cancels what it waits for."""

    def __init__(self, job: InferJob, spec: ModelSpec, callees: Callees, *, streams: bool, accumulates: bool) -> None:
        self._job = job
        self._spec = spec
        self._callees = callees
        self._streams = streams
        self._accumulates = accumulates
        self._is_batched = spec.max_batch_size > 0
        self._handing = Handing.of(job.request, spec)
        self._token_rows = self._handing.num_rows if callees.token_model.spec.max_batch_size > 0 else 0
        self._stop_words = self._rows_of(_STOP_WORDS) if _STOP_WORDS in job.request.inputs else None

    async def answer(self) -> None:
        """Raises SluiceError, also in mid-stream."""
        callees = self._callees
        prepared = await infer_one(callees.preprocessing, self._handing.to_preprocessing(callees.preprocessing))
        asked = self._handing.to_token_model(callees.token_model, callees.preprocessing, prepared)
        await (self._stream(asked) if self._streams else self._answer_whole(asked))

    # -- a stream

    async def _stream(self, asked: InferRequest) -> None:
        beams: list[_Beam] = []
        async with aclosing(infer_stream(self._callees.token_model, asked)) as responses:
            async for response in responses:
                pieces = await self._pieces(response, beams)
                is_final = response.is_final or (bool(beams) and all(beam.is_stopped for beam in beams))
                if is_final:
                    self._job.infer_ended_ns = perf_counter_ns()
                if any(pieces) or is_final:
                    shown = [beam.text for beam in beams] if self._accumulates else pieces
                    self._job.respond(self._response(response, [shown], is_final=is_final))
                if is_final:
                    return

    async def _pieces(self, response: InferResponse, beams: "list[_Beam]") -> list[str]:
        """What each beam's text has become longer by."""
        if response.error is not None:
            raise response.error
        sequences = self._sequences(response)
        while len(beams) < len(sequences):
            beams.append(_Beam(self._growing_text(), self._words_of(0)))
        sequences += [[]] * (len(beams) - len(sequences))
        return [await beam.feed(ids, is_last=response.is_final) for beam, ids in zip(beams, sequences, strict=True)]

    def _sequences(self, response: InferResponse) -> list[list[int]]:
        """The token ids of each beam; none in a response that only tells the end."""
        tensors = {each.name: each for each in response.outputs}
        if "output_ids" not in tensors:
            return []
        tokens, lengths = (tensor.array for tensor in self._tokens_in(tensors))
        rows = tokens.reshape(lengths.size, tokens.shape[-1])
        return [row[:length].tolist() for row, length in zip(rows, lengths.ravel(), strict=True)]

    def _growing_text(self) -> GrowingText:
        model = self._callees.postprocessing
        detokenizer = model.detokenizer() if isinstance(model, PostprocessingModel) else None
        return DetokenizedText(detokenizer) if detokenizer is not None else DecodedText(self._decode)

    async def _decode(self, token_ids: Sequence[int]) -> str:
        tokens = Tensor.of("output_ids", np.array([[token_ids]], np.int32))
        lengths = Tensor.of("sequence_length", np.array([[len(token_ids)]], np.int32))
        [text] = await self._decoded(tokens, lengths, 1)
        return text

    # -- one response

    async def _answer_whole(self, asked: InferRequest) -> None:
        responses = []
        async with aclosing(infer_stream(self._callees.token_model, asked)) as stream:
            async for response in stream:
                if response.error is not None:
                    raise response.error
                if response.outputs:
                    responses.append(response)
        if not responses or (len(responses) > 1 and not self._spec.is_decoupled):
            raise self._wrong_answer(f"gave {len(responses)} responses to a request that does not stream")
        self._job.infer_ended_ns = perf_counter_ns()
        for index, response in enumerate(responses, 1):
            texts = await self._whole_texts(response)
            self._job.respond(self._response(response, texts, is_final=index == len(responses)))

    async def _whole_texts(self, response: InferResponse) -> list[list[str]]:
        """The texts of each row's beams."""
        tensors = {each.name: each for each in response.outputs}
        texts = await self._decoded(*self._tokens_in(tensors), self._token_rows)
        rows = self._rows_in(tensors)
        num_beams = max(len(texts) // len(rows), 1)
        return [
            [self._shown(row, text) for text in texts[index * num_beams : (index + 1) * num_beams]]
            for index, row in enumerate(rows)
        ]

    async def _decoded(self, tokens: Tensor, lengths: Tensor, num_rows: int) -> list[str]:
        model = self._callees.postprocessing
        answer = await infer_one(model, self._handing.to_postprocessing(model, tokens, lengths, num_rows))
        texts = next((each for each in answer.outputs if each.name == OUTPUT), None)
        if texts is None:
            raise SluiceError(ErrorCode.INTERNAL, f"model '{model.name}' gave no {OUTPUT}")
        return [text.decode(errors="replace") for text in texts.array.ravel().tolist()]

    def _rows_in(self, tensors: dict[str, Tensor]) -> list[int]:
        """Which rows of the request the response is of: all, or the one that it names."""
        num_rows = self._handing.num_rows or 1
        num_there = tensors["sequence_length"].shape[0] if self._token_rows else 1
        if num_there == num_rows or "batch_index" not in tensors:
            return list(range(num_there))
        return [int(tensors["batch_index"].array.flat[0])]

    def _shown(self, row: int, text: str) -> str:
        text = StoppedText.whole(text, self._words_of(row))
        excludes = self._handing.excludes_prompt(row)
        if excludes is None:
            excludes = excludes_input(self._callees.token_model.config)
        return text if excludes else self._rows_of("text_input")[row][0] + text

    # -- both

    def _rows_of(self, name: str) -> list[list[str]]:
        return text_rows(self._job.request, name, is_batched=self._is_batched)

    def _tokens_in(self, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Sequences and their lengths."""
        if "output_ids" not in tensors or "sequence_length" not in tensors:
            raise self._wrong_answer("gave no output_ids with their sequence_length")
        return tensors["output_ids"], tensors["sequence_length"]

    def _words_of(self, row: int) -> list[str]:
        return self._stop_words[row] if self._stop_words is not None else []

    def _response(self, response: InferResponse, texts: Sequence[Sequence[str]], *, is_final: bool) -> InferResponse:
        """`texts` with what else the token model's response has and this model declares."""
        wanted = self._job.request.requested_outputs or tuple(self._spec.outputs)
        outputs = []
        if TEXT in wanted:
            rows = [[text.encode() for text in row] or [b""] for row in texts]
            outputs.append(text_tensor(TEXT, rows, is_batched=self._is_batched))
        for tensor in response.outputs:
            spec = self._spec.outputs.get(tensor.name)
            if spec is not None and tensor.name in wanted:
                batched = self._is_batched
                outputs.append(fitted(tensor, spec.dims, is_batching=batched, batch_size=self._token_rows))
        return InferResponse(outputs, is_final=is_final)

    def _wrong_answer(self, what: str) -> SluiceError:
        return SluiceError(ErrorCode.INTERNAL, f"model '{self._callees.token_model.name}' {what}")


class _Beam:
    """One sequence of a stream, and its text so far."""

    def __init__(self, growing: GrowingText, stop_words: Sequence[str]) -> None:
        self._growing = growing
        self._stopped = StoppedText(stop_words)
        self.text = ""

    @property
    def is_stopped(self) -> bool:
        return self._stopped.is_stopped

    async def feed(self, token_ids: Sequence[int], *, is_last: bool) -> str:
        """The text that these tokens add; with the last ones also what was kept back."""
        if self.is_stopped:
            return ""
        piece = self._stopped.feed(await self._growing.feed(token_ids))
        if is_last:
            piece += self._stopped.feed(await self._growing.flush()) + self._stopped.flush()
        self.text += piece
        return piece
