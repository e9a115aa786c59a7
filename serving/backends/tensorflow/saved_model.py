"""A SavedModel's signature: which of its graphs and functions is served, and how its tensors are called."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from google.protobuf.message import DecodeError

from serving.backends.tensorflow.protos import parse_saved_model
from sluice.errors import ErrorCode, SluiceError

_FILENAME = "saved_model.pb"
_TAG, _SIGNATURE = "serve", "serving_default"
"""What OpenVINO serves, and Triton where nothing else is asked for."""
_INTERNAL_SIGNATURES = ("__saved_model_init_op", "__saved_model_train_op")


@dataclass(frozen=True, slots=True)
class SavedModel:
    """One signature of the SavedModel in `folder`. `inputs` and `outputs` are the names that clients use."""

    folder: Path
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    rewritten: bytes | None
    """`saved_model.pb` with the signature as the one that OpenVINO serves; None where it is that already."""

    @contextmanager
    def served_folder(self) -> Iterator[Path]:
        """A folder whose default signature is this one. Reading it ends before it does."""
        if self.rewritten is None:
            yield self.folder
            return
        with TemporaryDirectory(prefix="sluice-savedmodel-") as temporary:
            for each in self.folder.iterdir():
                if each.name != _FILENAME:
                    (Path(temporary) / each.name).symlink_to(each.resolve())
            (Path(temporary) / _FILENAME).write_bytes(self.rewritten)
            yield Path(temporary)


def read_saved_model(folder: Path, tag: str = "", signature: str = "") -> SavedModel:
    """`tag` and `signature` empty: those that are served by default, else the first there are.

    Raises SluiceError UNAVAILABLE where there is none, INVALID for a tag or signature that it lacks.
    """
    message = _parsed(folder)
    graph = _graph_of(message, tag)
    chosen = _signature_of(graph, signature)
    is_default = list(graph.meta_info_def.tags) == [_TAG] and chosen.key == _SIGNATURE and len(message.meta_graphs) == 1
    return SavedModel(
        folder,
        tuple(each.key for each in chosen.value.inputs),
        tuple(each.key for each in chosen.value.outputs),
        None if is_default else _rewritten(message, graph, chosen),
    )


def _parsed(folder: Path) -> Any:
    try:
        return parse_saved_model((folder / _FILENAME).read_bytes())
    except OSError as error:
        raise SluiceError(
            ErrorCode.UNAVAILABLE, f"'{folder}' is no SavedModel: {error.strerror}: {_FILENAME}"
        ) from None
    except DecodeError as error:
        raise SluiceError(ErrorCode.INVALID, f"'{folder / _FILENAME}' cannot be read: {error}") from None


def _graph_of(message: Any, tag: str) -> Any:
    graphs = list(message.meta_graphs)
    found = next((each for each in graphs if (tag or _TAG) in each.meta_info_def.tags), None)
    if found is None and not tag and graphs:
        return graphs[0]
    if found is None:
        known = sorted({each for graph in graphs for each in graph.meta_info_def.tags})
        raise _absent("graph with the tag", tag or _TAG, known)
    return found


def _signature_of(graph: Any, name: str) -> Any:
    known = [each for each in graph.signature_def if each.key not in _INTERNAL_SIGNATURES]
    found = next((each for each in graph.signature_def if each.key == (name or _SIGNATURE)), None)
    if found is None and not name and known:
        return known[0]
    if found is None:
        raise _absent("signature", name or _SIGNATURE, [each.key for each in known])
    return found


def _rewritten(message: Any, graph: Any, chosen: Any) -> bytes:
    """The graph alone, with the chosen signature alone, under the names that OpenVINO looks for."""
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


def _absent(what: str, name: str, known: list[str]) -> SluiceError:
    return SluiceError(
        ErrorCode.INVALID, f"the SavedModel has no {what} '{name}'; it has: {', '.join(known) or 'none'}"
    )
