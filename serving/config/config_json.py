"""Configurations as JSON: printed as Triton's config route prints them, and parsed for a load override.

Triton prints fields in the order of their declaration, empty ones too, and leaves out absent messages. 64-bit integers
are numbers, except for a few that stay the strings of protobuf JSON.
"""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson
from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import invalid_argument
from sluice.serving.config.pbtxt import explain_unknown_field

_LEFT_AS_STRINGS = frozenset(
    {
        "inference.ModelOptimizationPolicy.Cuda.GraphSpec.Shape.dim",
        "inference.ModelSequenceBatching.InitialState.dims",
        "inference.ModelInstanceGroup.SecondaryDevice.device_id",
    }
)
"""64-bit integers that Triton prints as strings."""

_SHOWN_WHEN_SET = frozenset({"inference.ModelEnsembling.max_inflight_requests"})
"""Fields newer than the Triton server whose output is the reference: printed only where set."""

_STRING_OR_BARE_KEY = re.compile(r'("(?:[^"\\]|\\.)*+")|([{,]\s*+)([A-Za-z_]\w*+)(?=\s*+:)')
_INT64 = (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64)
_FLOATS = (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE)


def config_dict(config: Message) -> dict[str, Any]:
    """Return the members of a configuration's JSON object, or of a message's in it, in order."""
    return {field.name: _field(config, field) for field in _shown_fields(config)}


def config_json(config: ModelConfig) -> bytes:
    """Return the body of the config route."""
    return orjson.dumps(config_dict(config))


def parse_config_json(text: str | bytes) -> ModelConfig:
    """Parse protobuf's JSON or Triton's. Raises INVALID with the field and the reason."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        try:
            value = orjson.loads(_quote_keys(text))
        except ValueError:
            raise invalid_argument(f"the model configuration is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise invalid_argument("the model configuration is not JSON: Root element must be a message.")
    try:
        return json_format.ParseDict(_with_string_types(value), ModelConfig())
    except json_format.ParseError as error:
        message = explain_unknown_field(re.sub(r"^Failed to parse (\S+) field: ", r"\1: ", str(error)))
        raise invalid_argument(f"the model configuration does not fit: {message}") from None


def _quote_keys(text: str | bytes) -> str:
    """Put keys in quotes: protobuf's parser, which Triton uses, takes them without. Raises ValueError for no UTF-8."""
    text = text.decode() if isinstance(text, bytes) else text
    return _STRING_OR_BARE_KEY.sub(lambda found: found[1] or f'{found[2]}"{found[3]}"', text)


def _shown_fields(message: Message) -> Iterator[FieldDescriptor]:
    """Yield the fields in the order of declaration, but scalar members of a oneof last."""
    last = []
    for field in message.DESCRIPTOR.fields:
        is_chosen_scalar = field.containing_oneof is not None and field.message_type is None
        if field.has_presence and not message.HasField(field.name):
            continue
        if field.full_name in _SHOWN_WHEN_SET and not getattr(message, field.name):
            continue
        if is_chosen_scalar:
            last.append(field)
        else:
            yield field
    yield from last


def _field(message: Message, field: FieldDescriptor) -> Any:
    value = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        value_field = field.message_type.fields_by_name["value"]
        return {str(key): _single(value_field, value[key]) for key in sorted(value)}
    if field.is_repeated:
        return [_single(field, each) for each in value]
    return _single(field, value)


def _single(field: FieldDescriptor, value: Any) -> Any:
    if field.message_type is not None:
        return config_dict(value)
    if field.enum_type is not None:
        named = field.enum_type.values_by_number.get(value)
        return named.name if named is not None else value
    if field.cpp_type in _INT64:
        return str(value) if field.full_name in _LEFT_AS_STRINGS else value
    if field.cpp_type in _FLOATS:
        return _shortest(field, value)
    return value


def _shortest(field: FieldDescriptor, value: float) -> float | int:
    """Return the number with the fewest digits, a whole one without a point: a 32-bit float 0.1 is 0.1."""
    if field.cpp_type == FieldDescriptor.CPPTYPE_FLOAT:
        value = float(str(np.float32(value)))
    return int(value) if value.is_integer() else value


def _with_string_types(value: Any) -> Any:
    """Return `value` with TYPE_STRING for an element type TYPE_BYTES, as config.pbtxt is read."""
    if isinstance(value, list):
        return [_with_string_types(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        key: "TYPE_STRING" if each == "TYPE_BYTES" and key in ("data_type", "dataType") else _with_string_types(each)
        for key, each in value.items()
    }
