"""The part of TensorFlow's `saved_model.proto` that says what a model's tensors are called.

Fields that are not described here are kept when a message is written again.
"""

from functools import cache
from typing import Any

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

_PACKAGE = "tensorflow"
_STRING = FieldDescriptorProto.TYPE_STRING
_MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "TensorInfo": {"name": (1, "string")},
    "NamedTensor": {"key": (1, "string"), "value": (2, "TensorInfo")},
    "SignatureDef": {"inputs": (1, "*NamedTensor"), "outputs": (2, "*NamedTensor")},
    "NamedSignature": {"key": (1, "string"), "value": (2, "SignatureDef")},
    "MetaInfoDef": {"tags": (4, "*string")},
    "MetaGraphDef": {"meta_info_def": (1, "MetaInfoDef"), "signature_def": (5, "*NamedSignature")},
    "SavedModel": {"meta_graphs": (2, "*MetaGraphDef")},
}
"""By message and field: its number and type, `*` where it is repeated. A map is, on the wire, repeated pairs."""


def parse_saved_model(data: bytes) -> Any:
    """A `SavedModel` message. Raises google.protobuf.message.DecodeError."""
    return _saved_model_class().FromString(data)


@cache
def _saved_model_class() -> Any:
    pool = DescriptorPool()
    pool.Add(_file())  # type: ignore[no-untyped-call]
    described = pool.FindMessageTypeByName(f"{_PACKAGE}.SavedModel")  # type: ignore[no-untyped-call]
    return GetMessageClass(described)


def _file() -> FileDescriptorProto:
    file = FileDescriptorProto(name="saved_model_names.proto", package=_PACKAGE, syntax="proto3")
    for message, fields in _MESSAGES.items():
        described = file.message_type.add(name=message)
        for name, (number, kind) in fields.items():
            field = described.field.add(name=name, number=number, label=FieldDescriptorProto.LABEL_OPTIONAL)
            if kind.startswith("*"):
                field.label = FieldDescriptorProto.LABEL_REPEATED
            _set_type(field, kind.removeprefix("*"))
    return file


def _set_type(field: FieldDescriptorProto, kind: str) -> None:
    if kind == "string":
        field.type = _STRING
    else:
        field.type = FieldDescriptorProto.TYPE_MESSAGE
        field.type_name = f".{_PACKAGE}.{kind}"
