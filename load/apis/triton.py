"""Triton's v2 protocol over HTTP: generate_stream, generate, and infer with random tensors."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
import numpy as np

from sluice.load.apis.base import (
    NO_CONTEXT,
    Api,
    ApiContext,
    AskedRequest,
    Fetch,
    Framing,
    ParsedEvent,
    Prompt,
    error_message,
)
from sluice.load.config import LoadConfigError, Workload


class _GenerateEvent(msgspec.Struct):
    text_output: str | list[str] | None = None
    num_output_tokens: int | None = None
    finish_reason: str | None = None
    error: Any = None


class GenerateStreamApi(Api):
    """`POST /v2/models/{model}/generate_stream`. The stream has no terminator: it ends with the HTTP body."""

    has_terminator: ClassVar = False
    is_streamed: ClassVar = True

    route: ClassVar = "/v2/models/{model}/generate_stream"
    event: ClassVar = _GenerateEvent

    def fields(self, asked: AskedRequest) -> dict[str, Any]:
        fields = {"text_input": asked.prompt, "max_tokens": asked.max_tokens, "stream": self.is_streamed}
        return fields | {"return_num_output_tokens": True} | asked.sampling

    def parse(self, data: bytes) -> ParsedEvent:
        event = self._decode(data)
        return ParsedEvent(
            has_text=bool(event.text_output),
            num_tokens=event.num_output_tokens,
            finish_reason=event.finish_reason,
            error=None if event.error is None else error_message(event.error),
        )


class GenerateApi(GenerateStreamApi):
    """`POST /v2/models/{model}/generate`: the same as one answer."""

    framing: ClassVar = Framing.WHOLE
    is_streamed: ClassVar = False
    route: ClassVar = "/v2/models/{model}/generate"


class TensorMetadata(msgspec.Struct):
    """A tensor as a model's metadata has it."""

    name: str
    datatype: str
    shape: list[int]


class _ModelMetadata(msgspec.Struct):
    inputs: list[TensorMetadata] = []


class _InferAnswer(msgspec.Struct):
    outputs: list[Any] = []
    error: Any = None


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor to send."""

    name: str
    datatype: str
    shape: tuple[int, ...]


_INTEGERS = {"INT8": "i1", "INT16": "<i2", "INT32": "<i4", "INT64": "<i8", "UINT8": "u1", "UINT16": "<u2"}
_INTEGERS |= {"UINT32": "<u4", "UINT64": "<u8"}
_FLOATS = {"FP16": "<f2", "FP32": "<f4", "FP64": "<f8"}
_LONGEST_TEXT = 16
_LONGEST_HEADER = 1 << 16
_JSON = json.JSONDecoder()


class InferApi(Api):
    """`POST /v2/models/{model}/infer` as JSON, with random tensors of the shapes in the model's metadata.

    A dimension that varies is 1, or what `--shape NAME:DIMS` says.
    """

    framing: ClassVar = Framing.WHOLE
    has_terminator: ClassVar = False
    has_output_tokens: ClassVar = False

    route: ClassVar = "/v2/models/{model}/infer"
    event: ClassVar = _InferAnswer

    def __init__(self) -> None:
        super().__init__()
        self._inputs: list[Input] = []

    async def prepare(self, fetch: Fetch, model: str, workload: Workload) -> None:
        """Read the names, types and shapes of the inputs. Raises `LoadConfigError` for a type that has no values."""
        metadata = msgspec.json.decode(await fetch(f"/v2/models/{model}"), type=_ModelMetadata)
        self._inputs = planned_inputs(model, metadata.inputs, workload)

    def fields(self, asked: AskedRequest) -> dict[str, Any]:
        drawn = draw_inputs(self._inputs, asked.prompt)
        return {"inputs": [self._header(each) | {"data": values.ravel().tolist()} for each, values in drawn]}

    def parse(self, data: bytes) -> ParsedEvent:
        answer = self._decode(data)
        if answer.error is not None:
            return ParsedEvent(error=error_message(answer.error))
        return ParsedEvent(error=None if answer.outputs else "an answer without outputs")

    @staticmethod
    def _header(each: Input) -> dict[str, Any]:
        return {"name": each.name, "datatype": each.datatype, "shape": list(each.shape)}


class InferBinaryApi(InferApi):
    """`POST /v2/models/{model}/infer` with tensors and outputs as raw bytes (the binary tensor data extension)."""

    def __init__(self) -> None:
        super().__init__()
        self._header_length = 0

    def body(
        self, model: str, prompt: Prompt, max_tokens: int, workload: Workload, context: ApiContext = NO_CONTEXT
    ) -> bytes:
        inputs, raw = [], []
        for each, values in draw_inputs(self._inputs, prompt):
            raw.append(raw_bytes(each, values))
            inputs.append(self._header(each) | {"parameters": {"binary_data_size": len(raw[-1])}})
        fields = {"inputs": inputs, "parameters": {"binary_data_output": True}}
        header = msgspec.json.encode(fields | workload.extra_body)
        self._header_length = len(header)
        return header + b"".join(raw)

    def headers(self) -> tuple[tuple[str, str], ...]:
        return (("Inference-Header-Content-Length", str(self._header_length)),)

    def parse(self, data: bytes) -> ParsedEvent:
        # Raw bytes follow the JSON: `raw_decode` stops where that ends.
        answer, _ = _JSON.raw_decode(data[:_LONGEST_HEADER].decode("latin-1"))
        return super().parse(msgspec.json.encode(answer))


def planned_inputs(model: str, inputs: Sequence[TensorMetadata], workload: Workload) -> list[Input]:
    """Return the tensors to send for a model's inputs. Raises `LoadConfigError` for a shape that is none of theirs."""
    unknown = workload.shapes.keys() - {each.name for each in inputs}
    if unknown:
        known = ", ".join(each.name for each in inputs)
        raise LoadConfigError(f"--shape {min(unknown)}: {model} has no such input; it has {known}")
    return [
        Input(each.name, each.datatype, sent_shape(each, workload.shapes.get(each.name), workload.batch_size))
        for each in inputs
    ]


def draw_inputs(inputs: Sequence[Input], prompt: Prompt) -> "list[tuple[Input, np.ndarray[Any, Any]]]":
    """Draw the tensors of a request, equal for an equal prompt."""
    rng = np.random.default_rng(list(str(prompt).encode()))
    return [(each, draw(each, rng)) for each in inputs]


def sent_shape(metadata: TensorMetadata, given: tuple[int, ...] | None, batch_size: int) -> tuple[int, ...]:
    """Return the shape to send. One that is given may leave out a first dimension that varies: the batch."""
    varies = bool(metadata.shape) and metadata.shape[0] == -1
    if given is None:
        rest = (1 if size < 0 else size for size in metadata.shape[1:])
        return (batch_size if varies else metadata.shape[0], *rest) if metadata.shape else ()
    sent = (batch_size, *given) if varies and len(given) == len(metadata.shape) - 1 else given
    fits = len(sent) == len(metadata.shape) and all(
        expected in (-1, size) for size, expected in zip(sent, metadata.shape, strict=True)
    )
    if not fits:
        raise LoadConfigError(f"--shape {metadata.name}: got {list(given)}, the model expects {metadata.shape}")
    return sent


def draw(each: Input, rng: np.random.Generator) -> "np.ndarray[Any, Any]":
    """Draw a tensor's values. Raises `LoadConfigError` for a type that has none."""
    if each.datatype in _INTEGERS:
        return rng.integers(0, 100, each.shape).astype(_INTEGERS[each.datatype])
    if each.datatype in _FLOATS:
        return rng.random(each.shape).astype(_FLOATS[each.datatype])
    if each.datatype == "BOOL":
        return rng.integers(0, 2, each.shape).astype(bool)
    if each.datatype == "BYTES":
        letters = rng.integers(97, 123, (*each.shape, _LONGEST_TEXT)).astype(np.uint8)
        return letters.view(f"S{_LONGEST_TEXT}")[..., 0].astype(str)
    raise LoadConfigError(f"input {each.name} has type {each.datatype}; expected numbers, BOOL or BYTES")


def raw_bytes(each: Input, values: "np.ndarray[Any, Any]") -> bytes:
    """Return the bytes of the binary tensor data extension."""
    if each.datatype != "BYTES":
        return values.tobytes()
    texts = [str(value).encode() for value in values.ravel()]
    return b"".join(len(text).to_bytes(4, "little") + text for text in texts)
