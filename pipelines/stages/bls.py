"""NVIDIA's `tensorrt_llm_bls`: a text model that calls preprocessing, a token model and postprocessing."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter_ns

import numpy as np
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.llm.parameters import excludes_input
from sluice.pipelines.llm.values import find_most_sequences, gives_several, is_streamed, streams_one_row
from sluice.pipelines.stages.bls_requests import BlsRequest
from sluice.pipelines.stages.stage import BLS, OUTPUT, PostprocessingModel
from sluice.pipelines.text.detokenizer import REPLACEMENT_CHARACTER, Detokenizer
from sluice.pipelines.text.stream import Called, StopStrings
from sluice.pipelines.text.tensor_model import read_text_rows
from sluice.serving.backend import ModelLookup
from sluice.serving.backends.ensemble.graph import fit_shape
from sluice.serving.job import InferJob
from sluice.serving.model import Model, ResponseStream, infer_one
from sluice.serving.request import InferRequest, InferResponse
from sluice.serving.spec import ModelSpec, build_spec
from sluice.serving.task_model import RequestTasks
from sluice.serving.tensors.tensor import Tensor

Decode = Callable[[list[int]], Awaitable[str]]
"""Returns the text of a whole sequence."""
TEXT = "text_output"
_STOP_WORDS, _SEQUENCE_INDEX = "stop_words", "sequence_index"


class BeamText:
    """The text of one beam of a stream: what its tokens add, and the whole so far in `text`."""

    def __init__(self, text: "Detokenizer | DecodedText", stop_words: Sequence[str]) -> None:
        self._incremental = text
        self._cutter = StopWordCutter(stop_words)
        self.text = ""

    @property
    def is_stopped(self) -> bool:
        return self._cutter.is_stopped

    async def decode(self, token_ids: Sequence[int]) -> None:
        """Do what `feed` has to wait for."""
        if isinstance(self._incremental, DecodedText) and not self.is_stopped:
            await self._incremental.decode(token_ids)

    def feed(self, token_ids: Sequence[int], *, is_last: bool) -> str:
        """Add tokens and return the text that they add; with the last ones also the text kept back."""
        if self.is_stopped:
            return ""
        piece = self._cutter.feed(self._incremental.feed(token_ids))
        if is_last:
            piece += self._cutter.feed(self._incremental.flush()) + self._cutter.flush()
        self.text += piece
        return piece


class DecodedText:
    """A detokenizer by a model that only decodes whole sequences: it gets all tokens again for each new piece."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._token_ids: list[int] = []
        self._text = ""
        self._num_shown = 0

    async def decode(self, token_ids: Sequence[int]) -> None:
        """Have the model decode the tokens so far, with these. To be awaited before `feed`."""
        if token_ids:
            self._token_ids += token_ids
            self._text = await self._decode(self._token_ids)

    def feed(self, token_ids: Sequence[int]) -> str:
        return self.flush() if token_ids and not self._text.endswith(REPLACEMENT_CHARACTER) else ""

    def flush(self) -> str:
        new = self._text[self._num_shown :]
        self._num_shown += len(new)
        return new


class StopWordCutter:
    """Cuts a text off after its first stop word, which stays part of the text, as in NVIDIA's BLS."""

    def __init__(self, words: Sequence[str]) -> None:
        """Raise SluiceError INVALID for too many or too long words."""
        self._stop = StopStrings(tuple(word for word in words if word))

    @property
    def is_stopped(self) -> bool:
        return self._stop.matched is not None

    def feed(self, piece: str) -> str:
        if self.is_stopped:
            return ""
        return self._stop.feed(piece) + (self._stop.matched or "")

    def flush(self) -> str:
        return "" if self.is_stopped else self._stop.flush()

    @classmethod
    def cut(cls, text: str, words: Sequence[str]) -> str:
        """Return a whole text up to and including its first stop word."""
        cutter = cls(words)
        return cutter.feed(text) + cutter.flush()


@dataclass(frozen=True, slots=True)
class BlsSettings:
    """Names of the called models. `accumulates`: each response of a stream has the whole text so far."""

    token_model: str
    preprocessing: str
    postprocessing: str
    accumulates: bool


@dataclass(frozen=True, slots=True)
class CalledModels:
    """The models that BLS calls."""

    preprocessing: Model
    token_model: Model
    postprocessing: Model


class BlsModel(Model):
    """Calls three models by name, whatever backend serves them. A stream has a response for each piece of text."""

    def __init__(self, config: ModelConfig, version: int, models: ModelLookup, settings: BlsSettings) -> None:
        super().__init__(config, build_spec(config, version))
        self._lookup = models
        self._settings = settings
        self._tasks = RequestTasks(self.spec)

    def is_decoupled_for(self, request: InferRequest) -> bool:
        return is_streamed(request, self.spec) or gives_several(request, self.spec)

    async def close(self) -> None:
        self.retire()
        await self._tasks.cancel_all()

    def _start(self, job: InferJob) -> None:
        request = job.request
        BLS.refuse_unsupported(request)
        streams = streams_one_row(request, self.spec, request.batch_size)
        run = BlsRun(job, self.spec, self._find_models(), streams=streams, accumulates=self._settings.accumulates)
        self._tasks.start(job, partial(self._run, job, run))

    async def _run(self, job: InferJob, run: "BlsRun") -> None:
        job.compute_started_ns = job.infer_started_ns = perf_counter_ns()
        await run.answer()

    def _find_models(self) -> CalledModels:
        names = self._settings
        return CalledModels(*map(self._find, (names.preprocessing, names.token_model, names.postprocessing)))

    def _find(self, name: str) -> Model:
        try:
            return self._lookup.find(name)
        except SluiceError as error:
            message = f"model '{self.name}' calls '{name}', which does not serve: {error.message}"
            raise SluiceError(ErrorCode.UNAVAILABLE, message) from error


class BlsRun:
    """Answers one job. Cancelling its task cancels the called models' requests. It takes the responses of a stream as
    their consumer, which is not ready while a model decodes their tokens."""

    def __init__(
        self, job: InferJob, spec: ModelSpec, models: CalledModels, *, streams: bool, accumulates: bool
    ) -> None:
        self._job = job
        self._spec = spec
        self._models = models
        self._streams = streams
        self._accumulates = accumulates
        self._is_batched = spec.max_batch_size > 0
        self._request = BlsRequest.parse(job.request, spec)
        self._token_rows = self._request.num_rows if models.token_model.spec.max_batch_size > 0 else 0
        self._stop_words = self._rows_of(_STOP_WORDS) if _STOP_WORDS in job.request.inputs else None
        self._beams: dict[int, list[BeamText]] = {}
        """The texts of a stream's sequences, by their indices."""
        self._num_left = find_most_sequences(job.request)
        self._is_decoded = isinstance(self._incremental_text(), DecodedText)
        self._undecoded: InferResponse | None = None
        self._stream: ResponseStream
        """The responses of the token model."""

    async def answer(self) -> None:
        """Answer the job. Raises SluiceError, also in mid-stream."""
        models = self._models
        prepared = await infer_one(models.preprocessing, self._request.to_preprocessing(models.preprocessing))
        request = self._request.to_token_model(models.token_model, models.preprocessing, prepared)
        self._stream = ResponseStream(models.token_model, request)
        await (self._stream.pass_to(self) if self._streams else self._answer_whole())

    def take(self, response: InferResponse) -> bool:
        """Take a response of a stream. Raises its error."""
        if self._job.infer_ended_ns:
            return True  # the last sequence has stopped
        if response.error is not None:
            raise response.error
        if self._is_decoded:
            self._undecoded = response
            return False
        self._respond(response)
        return True

    async def ready(self) -> None:
        assert self._undecoded is not None, "it made the stream wait"
        for beam, token_ids in self._tokens_of_beams(self._undecoded):
            await beam.decode(token_ids)
        self._respond(self._undecoded)

    def _respond(self, response: InferResponse) -> None:
        """Respond with the text that a response adds. The last sequence to stop ends the stream."""
        number, fed = _sequence_index(response), self._tokens_of_beams(response)
        beams = [beam for beam, _ in fed]
        was_stopped = _are_stopped(beams)
        pieces = [beam.feed(token_ids, is_last=response.is_final) for beam, token_ids in fed]
        self._num_left -= _are_stopped(beams) and not was_stopped
        is_final = response.is_final or self._num_left == 0
        if is_final:
            self._job.infer_ended_ns = perf_counter_ns()
            self._end_others(number)
        if any(pieces) or is_final:
            self._job.respond(self._response(response, [self._shown_pieces(beams, pieces)], is_final=is_final))
        if is_final:
            self._stream.end()

    def _end_others(self, number: int) -> None:
        """Respond with the text kept back in the sequences but `number`, whose own ends no tensor of NVIDIA's marks."""
        for other, beams in self._beams.items():
            pieces = [beam.feed([], is_last=True) for beam in beams] if other != number else []
            if any(pieces):
                place = Tensor.of(_SEQUENCE_INDEX, np.full((1, 1) if self._token_rows else (1,), other, np.int32))
                shown = self._shown_pieces(beams, pieces)
                self._job.respond(self._response(InferResponse([place]), [shown], is_final=False))

    def _shown_pieces(self, beams: list[BeamText], pieces: list[str]) -> list[str]:
        return [beam.text for beam in beams] if self._accumulates else pieces

    def _tokens_of_beams(self, response: InferResponse) -> list[tuple[BeamText, list[int]]]:
        """Return the beams of the response's sequence, each with the tokens that it adds."""
        beams, sequences = self._beams.setdefault(_sequence_index(response), []), self._sequences(response)
        while len(beams) < len(sequences):
            beams.append(BeamText(self._incremental_text(), self._stop_words_of(0)))
        sequences += [[]] * (len(beams) - len(sequences))
        return list(zip(beams, sequences, strict=True))

    def _sequences(self, response: InferResponse) -> list[list[int]]:
        """Return the token ids of each beam; an empty list for a response without tokens, at the end of a stream."""
        tensors = {each.name: each for each in response.outputs}
        if "output_ids" not in tensors:
            return []
        tokens, lengths = (tensor.array for tensor in self._tokens_in(tensors))
        rows = tokens.reshape(lengths.size, tokens.shape[-1])
        return [row[:length].tolist() for row, length in zip(rows, lengths.ravel(), strict=True)]

    def _incremental_text(self) -> Detokenizer | DecodedText:
        model = self._models.postprocessing
        detokenizer = model.detokenizer() if isinstance(model, PostprocessingModel) else None
        return DecodedText(self._decode) if detokenizer is None else detokenizer

    async def _decode(self, token_ids: Sequence[int]) -> str:
        tokens = Tensor.of("output_ids", np.array([[token_ids]], np.int32))
        lengths = Tensor.of("sequence_length", np.array([[len(token_ids)]], np.int32))
        [text] = await self._decoded(tokens, lengths, 1)
        return text

    async def _answer_whole(self) -> None:
        responses: list[InferResponse] = []

        def collect(response: InferResponse) -> None:
            if response.error is not None:
                raise response.error
            if response.outputs:
                responses.append(response)

        await self._stream.pass_to(Called(collect))
        if not responses or (len(responses) > 1 and not self._spec.is_decoupled):
            raise self._wrong_answer(f"gave {len(responses)} responses to a request that does not stream")
        self._job.infer_ended_ns = perf_counter_ns()
        for index, response in enumerate(responses, 1):
            texts = await self._whole_texts(response)
            self._job.respond(self._response(response, texts, is_final=index == len(responses)))

    async def _whole_texts(self, response: InferResponse) -> list[list[str]]:
        """Return the texts of each row's beams."""
        tensors = {each.name: each for each in response.outputs}
        texts = await self._decoded(*self._tokens_in(tensors), self._token_rows)
        rows = self._rows_in(tensors)
        num_beams = max(len(texts) // len(rows), 1)
        return [
            [self._shown(row, text) for text in texts[index * num_beams : (index + 1) * num_beams]]
            for index, row in enumerate(rows)
        ]

    async def _decoded(self, tokens: Tensor, lengths: Tensor, num_rows: int) -> list[str]:
        model = self._models.postprocessing
        answer = await infer_one(model, self._request.to_postprocessing(model, tokens, lengths, num_rows))
        texts = next((each for each in answer.outputs if each.name == OUTPUT), None)
        if texts is None:
            raise SluiceError(ErrorCode.INTERNAL, f"model '{model.name}' gave no {OUTPUT}")
        return [text.decode(errors="replace") for text in texts.array.ravel().tolist()]

    def _rows_in(self, tensors: dict[str, Tensor]) -> list[int]:
        """Return the rows of the request that the response answers: all, or the one in its `batch_index`."""
        num_rows = self._request.num_rows or 1
        num_answered = tensors["sequence_length"].shape[0] if self._token_rows else 1
        if num_answered == num_rows or "batch_index" not in tensors:
            return list(range(num_answered))
        return [int(tensors["batch_index"].array.flat[0])]

    def _shown(self, row: int, text: str) -> str:
        text = StopWordCutter.cut(text, self._stop_words_of(row))
        excludes = self._request.excludes_prompt(row)
        if excludes is None:
            excludes = excludes_input(self._models.token_model.config)
        return text if excludes else self._rows_of("text_input")[row][0] + text

    def _rows_of(self, name: str) -> list[list[str]]:
        return read_text_rows(self._job.request, name, is_batched=self._is_batched)

    def _tokens_in(self, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the tensors of the sequences and of their lengths."""
        if "output_ids" not in tensors or "sequence_length" not in tensors:
            raise self._wrong_answer("gave no output_ids with their sequence_length")
        return tensors["output_ids"], tensors["sequence_length"]

    def _stop_words_of(self, row: int) -> list[str]:
        return self._stop_words[row] if self._stop_words is not None else []

    def _response(self, response: InferResponse, texts: Sequence[Sequence[str]], *, is_final: bool) -> InferResponse:
        """Build a response of `texts` and of the token model's other outputs that this model declares."""
        requested = self._job.request.requested_outputs or tuple(self._spec.outputs)
        outputs = []
        if TEXT in requested:
            flat = [text.encode() for row in texts for text in row] or [b""]
            outputs.append(Tensor.of(TEXT, np.array(flat, np.object_)))  # of the shape that postprocessing gives
        for tensor in response.outputs:
            spec = self._spec.outputs.get(tensor.name)
            if spec is not None and tensor.name in requested:
                batched = self._is_batched
                outputs.append(fit_shape(tensor, spec.dims, is_batching=batched, batch_size=self._token_rows))
        return InferResponse(outputs, is_final=is_final)

    def _wrong_answer(self, what: str) -> SluiceError:
        return SluiceError(ErrorCode.INTERNAL, f"model '{self._models.token_model.name}' {what}")


def _sequence_index(response: InferResponse) -> int:
    """Return which of its row's sequences the response belongs to."""
    return next((int(each.array.flat[0]) for each in response.outputs if each.name == _SEQUENCE_INDEX), 0)


def _are_stopped(beams: list[BeamText]) -> bool:
    return bool(beams) and all(beam.is_stopped for beam in beams)
