"""What an AOTInductor package says of its inputs and outputs: trees of tuples, lists and dicts, as JSON."""

import json
from collections.abc import Iterator
from typing import Any

from sluice.errors import ErrorCode, SluiceError

_SEQUENCES = ("builtins.tuple", "builtins.list")
_DICT = "builtins.dict"


def input_paths(spec: str) -> dict[str, int]:
    """Places of the inputs by name: ARGS[0], ARGS[2][key], KWARGS[mask]; a keyword's plain name too.

    Raises SluiceError UNIMPLEMENTED for other containers.
    """
    arguments, keywords = _tree(spec)["children_spec"]
    paths = [f"ARGS{path}" for path in _paths(arguments)] + [f"KWARGS{path}" for path in _paths(keywords)]
    return _with_plain_names(paths, "KWARGS")


def output_paths(spec: str) -> dict[str, int]:
    """Places of the outputs by name: RESULT, RESULT[0], RESULT[logits]; a key's plain name too. Raises likewise."""
    return _with_plain_names([f"RESULT{path}" for path in _paths(_tree(spec))], "RESULT")


def _tree(spec: str) -> dict[str, Any]:
    """Without the number of the format before it."""
    tree: dict[str, Any] = json.loads(spec)[1]
    return tree


def _paths(tree: dict[str, Any]) -> Iterator[str]:
    """Of the leaves, in the order in which the package takes and gives them."""
    kind = tree["type"]
    if kind is None:
        yield ""
        return
    children = tree["children_spec"]
    if kind == _DICT:
        keys = json.loads(tree["context"])
    elif kind in _SEQUENCES:
        keys = range(len(children))
    else:
        reason = (
            f"the package has a {kind} among its inputs or outputs; only dict, tuple, list and Tensor are supported"
        )
        raise SluiceError(ErrorCode.UNIMPLEMENTED, reason)
    for key, child in zip(keys, children, strict=True):
        for path in _paths(child):
            yield f"[{key}]{path}"


def _with_plain_names(paths: list[str], prefix: str) -> dict[str, int]:
    places = {path: index for index, path in enumerate(paths)}
    for path, index in list(places.items()):
        plain = path.removeprefix(f"{prefix}[").removesuffix("]")
        if path.startswith(f"{prefix}[") and "[" not in plain and not plain.isdigit():
            places.setdefault(plain, index)
    return places
