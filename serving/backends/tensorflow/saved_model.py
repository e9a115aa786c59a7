"""Reads a SavedModel's signature: which of its graphs and functions is served, and the names of its tensors."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from sluice.errors import ErrorCode, SluiceError, invalid_argument
from sluice.run_folder import temporary_folder

_FILENAME = "saved_model.pb"
_TAG, _SIGNATURE = "serve", "serving_default"
"""Tag and signature that OpenVINO serves, and that Triton serves by default."""
_INTERNAL_SIGNATURES = ("__saved_model_init_op", "__saved_model_train_op")
_PACKAGE = "tensorflow"
_MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "TensorInfo": {"name": (1, "string")},
    "NamedTensor": {"key": (1, "string"), "value": (2, "TensorInfo")},
    "SignatureDef": {"inputs": (1, "*NamedTensor"), "outputs": (2, "*NamedTensor")},
    "NamedSignature": {"key": (1, "string"), "value": (2, "SignatureDef")},
    "MetaInfoDef": {"tags": (4, "*string")},
    "MetaGraphDef": {"meta_info_def": (1, "MetaInfoDef"), "signature_def": (5, "*NamedSignature")},
    "SavedModel": {"meta_graphs": (2, "*MetaGraphDef")},
}
"""Fields of `saved_model.proto` that name a model's tensors, by message: number and type, `*` where repeated.

Other fields are kept when a message is written again. On the wire a map is a repeated field of pairs.
"""


@dataclass(frozen=True, slots=True)
class SavedModel:
    """One signature of the SavedModel in `folder`. `inputs` and `outputs` are the names that clients use."""

    folder: Path
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    rewritten: bytes | None
    """Contents of a `saved_model.pb` with this signature as the one OpenVINO serves; None where it already is."""

    @contextmanager
    def served_folder(self) -> Iterator[Path]:
        """Yield a folder whose default signature is this one. It is only valid within the context."""
        if self.rewritten is None:
            yield self.folder
            return
        with temporary_folder("savedmodel") as temporary:
            for each in self.folder.iterdir():
                if each.name != _FILENAME:
                    (temporary / each.name).symlink_to(each.resolve())
            (temporary / _FILENAME).write_bytes(self.rewritten)
            yield temporary


def read_saved_model(folder: Path, tag: str = "", signature: str = "") -> SavedModel:
    """Read a signature, by default the default or first one. Raises UNAVAILABLE without a model, INVALID without it."""
    message = _read_message(folder)
    graph = _choose_graph(message, tag)
    chosen = _choose_signature(graph, signature)
    is_default = list(graph.meta_info_def.tags) == [_TAG] and chosen.key == _SIGNATURE and len(message.meta_graphs) == 1
    return SavedModel(
        folder,
        tuple(each.key for each in chosen.value.inputs),
        tuple(each.key for each in chosen.value.outputs),
        None if is_default else _rewrite(message, graph, chosen),
    )


def _read_message(folder: Path) -> Any:
    try:
        return parse_saved_model((folder / _FILENAME).read_bytes())
    except OSError as error:
        raise SluiceError(
            ErrorCode.UNAVAILABLE, f"'{folder}' is no SavedModel: {error.strerror}: {_FILENAME}"
        ) from None
    except DecodeError as error:
        raise invalid_argument(f"'{folder / _FILENAME}' cannot be read: {error}") from None


def _choose_graph(message: Any, tag: str) -> Any:
    graphs = list(message.meta_graphs)
    found = next((each for each in graphs if (tag or _TAG) in each.meta_info_def.tags), None)
    if found is None and not tag and graphs:
        return graphs[0]
    if found is None:
        known = sorted({each for graph in graphs for each in graph.meta_info_def.tags})
        raise _missing("graph with the tag", tag or _TAG, known)
    return found


def _choose_signature(graph: Any, name: str) -> Any:
    known = [each for each in graph.signature_def if each.key not in _INTERNAL_SIGNATURES]
    found = next((each for each in graph.signature_def if each.key == (name or _SIGNATURE)), None)
    if found is None and not name and known:
        return known[0]
    if found is None:
        raise _missing("signature", name or _SIGNATURE, [each.key for each in known])
    return found


def _rewrite(message: Any, graph: Any, chosen: Any) -> bytes:
    """Return a SavedModel of that graph and signature alone, under the names that OpenVINO looks for."""
    written = type(message)()
    written.CopyFrom(message)
    del written.meta_graphs[:]
    kept = written.meta_graphs.add()
    kept.CopyFrom(graph)
    kept.meta_info_def.tags[:] = [_TAG]
    del kept.signature_def[:]
    kept.signature_def.add(key=_SIGNATURE, value=chosen.value)
    data: bytes = written.SerializeToString()
    return data


def _missing(what: str, name: str, known: list[str]) -> SluiceError:
    return invalid_argument(f"the SavedModel has no {what} '{name}'; it has: {', '.join(known) or 'none'}")


def parse_saved_model(data: bytes) -> Any:
    """Parse a `SavedModel` message. Raises google.protobuf.message.DecodeError."""
    return _saved_model_class().FromString(data)


@cache
def _saved_model_class() -> Any:
    pool = DescriptorPool()
    pool.Add(_descriptor())  # type: ignore[no-untyped-call]
    described = pool.FindMessageTypeByName(f"{_PACKAGE}.SavedModel")  # type: ignore[no-untyped-call]
    return GetMessageClass(described)


def _descriptor() -> FileDescriptorProto:
    file = FileDescriptorProto(name="saved_model_names.proto", package=_PACKAGE, syntax="proto3")
    for message, fields in _MESSAGES.items():
        described = file.message_type.add(name=message)
        for name, (number, kind) in fields.items():
            field = described.field.add(name=name, number=number, label=FieldDescriptorProto.LABEL_OPTIONAL)
            if kind.startswith("*"):
                field.label = FieldDescriptorProto.LABEL_REPEATED
            name = kind.removeprefix("*")
            if name == "string":
                field.type = FieldDescriptorProto.TYPE_STRING
            else:
                field.type, field.type_name = FieldDescriptorProto.TYPE_MESSAGE, f".{_PACKAGE}.{name}"
    return file
