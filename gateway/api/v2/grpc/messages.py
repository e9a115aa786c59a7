"""Splits the messages of inference requests, so that none is parsed in one long call.

Raw contents stay where they came, without a copy. Long typed contents are parsed in pieces, when their tensor is
packed: protobuf's parser holds the interpreter's lock, and takes up to 16 times their size in memory.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from sluice.errors import ErrorCode, SluiceError

WireMessage = bytes | list[bytes | memoryview]
"""A message as it is sent; a long one in parts, so that tensors are not copied."""
INLINE_BYTES = 64 << 10
"""Longest message that is parsed in a single call."""
MAX_FIELDS = 4096
"""Most inputs, outputs, parameters and raw contents of a long message."""
_LONG_INPUT_BYTES = 4096
_PIECE_BYTES = 64 << 10
_INPUTS, _RAW_CONTENTS = 5, 7
"""Fields of ModelInferRequest."""
_RAW_OUTPUT_CONTENTS = 6
"""Field of ModelInferResponse."""
_INFER_RESPONSE = 2
"""Field of ModelStreamInferResponse."""
_CONTENTS = 5
"""Field of an input, a message itself."""
_EMPTY_CONTENTS = b"\x2a\x00"
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
"""Kinds of values on the wire."""
_FIXED_SIZES = {_FIXED64: 8, _FIXED32: 4}
_VARINT_FIELDS, _FIXED_FIELDS = range(1, 6), range(6, 8)
"""Fields of InferTensorContents that are packed, by the form of their numbers."""


@dataclass(slots=True)
class InferMessage:
    """A message without the values of its tensors: `raw` contents, and long typed `contents` by the input's number."""

    header: "service_pb2.ModelInferRequest"
    raw: Sequence[bytes | memoryview]
    contents: dict[int, memoryview] = field(default_factory=dict)
    size_bytes: int = 0


def parse_message(message_type: Any, raw: bytes | memoryview) -> Any:
    """Parse a message of `message_type` from its wire form. Raises INTERNAL, as gRPC's own code does."""
    try:
        return message_type.FromString(raw)
    except DecodeError:
        raise _unparsable() from None


def parse_settings(message_type: Any, raw: bytes | memoryview) -> Any:
    """Parse a message that is no inference. Raises like `parse_message`, and INVALID for a long one.

    The files of a load may be long.
    """
    if len(raw) > INLINE_BYTES:
        if message_type is not service_pb2.RepositoryModelLoadRequest:
            text = f"a message of settings may have {INLINE_BYTES} bytes, got {len(raw)}"
            raise SluiceError(ErrorCode.INVALID, text)
        if next(islice(_fields(memoryview(raw)), MAX_FIELDS, None), None) is not None:
            raise SluiceError(ErrorCode.INVALID, f"a load may have at most {MAX_FIELDS} parameters")
    return parse_message(message_type, raw)


def split_message(raw: bytes | memoryview) -> InferMessage:
    """Parse the message of an inference request. Raises INTERNAL, and INVALID for a long one of very many fields."""
    if len(raw) <= INLINE_BYTES:
        message = parse_message(service_pb2.ModelInferRequest, raw)
        return InferMessage(message, message.raw_input_contents)
    view = memoryview(raw)
    pieces: list[bytes | memoryview] = []
    contents: dict[int, memoryview] = {}
    raw_contents: list[bytes | memoryview] = []
    num_fields = num_inputs = 0
    for number, kind, start, value, end in _fields(view):
        num_fields += 1
        if num_fields > MAX_FIELDS:
            text = (
                f"a message of over {INLINE_BYTES} bytes may have at most {MAX_FIELDS} inputs, outputs and parameters"
            )
            raise SluiceError(ErrorCode.INVALID, text)
        if kind == _LENGTH and number == _RAW_CONTENTS:
            raw_contents.append(view[value:end])
            continue
        if kind == _LENGTH and number == _INPUTS:
            if end - value > _LONG_INPUT_BYTES:
                head, long_contents = _split_input(view[value:end])
                contents[num_inputs] = long_contents
                pieces += (_tag(_INPUTS, _LENGTH), _varint(len(head)), head)
                num_inputs += 1
                continue
            num_inputs += 1
        pieces.append(view[start:end])
    if (num_bytes := sum(map(len, pieces))) > 4 * INLINE_BYTES:
        text = f"a message may have {4 * INLINE_BYTES} bytes besides its tensors' values, got {num_bytes}"
        raise SluiceError(ErrorCode.INVALID, text)
    header = parse_message(service_pb2.ModelInferRequest, b"".join(pieces))
    return InferMessage(header, raw_contents, contents, len(raw))


def _split_input(message: memoryview) -> tuple[bytes, memoryview]:
    """Return an input's message with empty contents, and its contents."""
    head: list[bytes | memoryview] = []
    contents = message[:0]
    for number, kind, start, value, end in _fields(message):
        if number == _CONTENTS and kind == _LENGTH:
            if len(contents):
                raise _unparsable()  # protobuf would merge them, and no library writes a field in parts
            contents = message[value:end]
            head.append(_EMPTY_CONTENTS)
        else:
            head.append(message[start:end])
        if len(head) > MAX_FIELDS:
            raise SluiceError(ErrorCode.INVALID, f"an input may have at most {MAX_FIELDS} dims and parameters")
    return b"".join(head), contents


def split_contents(contents: memoryview) -> "Iterator[service_pb2.InferTensorContents]":
    """Yield the values of long contents in order, in messages that are short, but for a string that is not."""
    begin = 0
    for number, kind, start, value, end in _fields(contents):
        is_packed = kind == _LENGTH and (number in _VARINT_FIELDS or number in _FIXED_FIELDS)
        if is_packed and end - value > _PIECE_BYTES:
            if start > begin:
                yield parse_message(service_pb2.InferTensorContents, contents[begin:start])
            for piece in _split_packed(contents[value:end], number in _VARINT_FIELDS):
                text = b"".join((_tag(number, _LENGTH), _varint(len(piece)), piece))
                yield parse_message(service_pb2.InferTensorContents, text)
            begin = end
        elif end - begin > _PIECE_BYTES:
            yield parse_message(service_pb2.InferTensorContents, contents[begin:end])
            begin = end
    if begin < len(contents):
        yield parse_message(service_pb2.InferTensorContents, contents[begin:])


def _split_packed(values: memoryview, is_varint: bool) -> Iterator[memoryview]:
    start = 0
    while start < len(values):
        end = min(start + _PIECE_BYTES, len(values))
        while is_varint and values[end - 1] >= 0x80:  # not a number's last byte
            end -= 1
            if end == start:
                raise _unparsable()
        yield values[start:end]
        start = end


def _fields(message: memoryview) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield number, kind, start, start of the value and end of each field. Raises INTERNAL."""
    at, size = 0, len(message)
    while at < size:
        start = at
        tag, at = _read_varint(message, at)
        kind = tag & 7
        value = at
        if kind == _LENGTH:
            length, value = _read_varint(message, at)
            at = value + length
        elif kind == _VARINT:
            _, at = _read_varint(message, at)
        elif kind in _FIXED_SIZES:
            at += _FIXED_SIZES[kind]
        else:
            raise _unparsable()  # groups, which proto3 does not have
        if at > size:
            raise _unparsable()
        yield tag >> 3, kind, start, value, at


def _read_varint(message: memoryview, at: int) -> tuple[int, int]:
    result = shift = 0
    while at < len(message) and shift < 64:
        byte = message[at]
        at += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result, at
        shift += 7
    raise _unparsable()


def join_message(message: WireMessage) -> bytes:
    """Return a message in one piece."""
    return message if isinstance(message, bytes) else b"".join(message)


def message_size(message: WireMessage) -> int:
    """Return the bytes of a message."""
    return len(message) if isinstance(message, bytes) else sum(map(len, message))


def add_raw_contents(head: bytes, raws: "Sequence[bytes | memoryview]") -> list[bytes | memoryview]:
    """Return a ModelInferResponse in parts: `head` without the values of its tensors, and these."""
    parts: list[bytes | memoryview] = [head]
    for raw in raws:
        parts += (_tag(_RAW_OUTPUT_CONTENTS, _LENGTH) + _varint(len(raw)), raw)
    return parts


def as_stream_response(response: list[bytes | memoryview]) -> list[bytes | memoryview]:
    """Return a ModelStreamInferResponse in parts, of the parts of its ModelInferResponse."""
    return [_tag(_INFER_RESPONSE, _LENGTH) + _varint(sum(map(len, response))), *response]


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*encoded, value))


def _tag(number: int, kind: int) -> bytes:
    return _varint(number << 3 | kind)


def _unparsable() -> SluiceError:
    return SluiceError(ErrorCode.INTERNAL, "Unable to parse request")
