"""A model's inputs and outputs by its configuration, as PyTorch's files lack them, and their positions."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sluice.errors import ErrorCode, SluiceError, invalid_argument
from sluice.serving.backends.arrays.batch import BatchTensors
from sluice.serving.backends.arrays.session import Signature, TensorSignature
from sluice.serving.spec import ModelSpec, TensorSpec
from sluice.serving.tensors.datatypes import DATA_TYPES, DataType

_FLAG = DATA_TYPES["INT32"]
_SEQUENCES = ("builtins.tuple", "builtins.list")
_DICT = "builtins.dict"


@dataclass(frozen=True, slots=True)
class ConfiguredTensors:
    """Tensors that the configuration declares.

    `inputs` are the clients' and the batch inputs, in the configuration's order. `batcher_inputs` are the controls and
    states that the sequence batcher sets. `outputs` include the states for a sequence's next request.
    """

    spec: ModelSpec
    signature: Signature
    inputs: tuple[str, ...]
    batcher_inputs: tuple[str, ...]
    outputs: dict[str, TensorSpec]


def read_configured_tensors(spec: ModelSpec, batch_tensors: BatchTensors) -> ConfiguredTensors:
    """Read the tensors of a complete configuration."""
    outputs = {each.output_name: TensorSpec(each.output_name, each.data_type, each.dims) for each in spec.states}
    outputs |= spec.outputs
    return ConfiguredTensors(
        spec,
        _build_signature(spec, batch_tensors, outputs),
        (*spec.inputs, *batch_tensors.input_types),
        (*sorted(spec.control_inputs), *(each.input_name for each in spec.states)),
        outputs,
    )


def _build_signature(spec: ModelSpec, batch_tensors: BatchTensors, outputs: dict[str, TensorSpec]) -> Signature:
    """Build the signature. The type of control inputs is nominal: the sequence batcher decides what it sends."""
    inputs = {name: _tensor_signature(each, spec) for name, each in spec.inputs.items()}
    optional = {name: inputs.pop(name) for name, each in spec.inputs.items() if each.is_optional}
    inputs |= {name: TensorSignature(name, each, (-1,)) for name, each in batch_tensors.input_types.items()}
    inputs |= {name: _with_batch_dim(name, _FLAG, (1,), spec) for name in spec.control_inputs}
    inputs |= {
        each.input_name: _with_batch_dim(each.input_name, each.data_type, each.dims, spec) for each in spec.states
    }
    return Signature(inputs, optional, {name: _tensor_signature(each, spec) for name, each in outputs.items()})


def _tensor_signature(tensor: TensorSpec, spec: ModelSpec) -> TensorSignature:
    if tensor.allows_ragged:
        return TensorSignature(tensor.name, tensor.data_type, (-1,))
    return _with_batch_dim(tensor.name, tensor.data_type, tensor.model_dims, spec)


def _with_batch_dim(name: str, data_type: DataType, dims: tuple[int, ...], spec: ModelSpec) -> TensorSignature:
    return TensorSignature(name, data_type, (-1, *dims) if spec.max_batch_size else dims)


def match_inputs(
    model: str, configured: Sequence[str], controls: Sequence[str], arguments: Sequence[str]
) -> dict[str, int]:
    """Return each input's position among `arguments`, the argument names of `forward`.

    The `configured` names all match arguments, or all have indices, or are in order. `controls`, which the sequence
    batcher sets, have no order: each matches an argument or has an index. Raises INVALID.
    """
    check_not_empty("input", configured, f"forward takes {', '.join(arguments) or 'none'}")
    positions = (
        _match_names(configured, arguments)
        or _match_indices(configured)
        or {name: index for index, name in enumerate(configured)}
    )
    for name in controls:
        position = arguments.index(name) if name in arguments else parse_index(name)
        if position is None:
            raise invalid_argument(f"input '{name}' does not follow <name>__<index> naming convention.")
        positions[name] = position
    _check_positions(model, positions, len(arguments))
    return positions


def match_outputs(configured: Sequence[str], states: Sequence[str]) -> dict[str, int]:
    """Return each output's position: all by index, else in order; `states` by index. Raises INVALID."""
    check_not_empty("output", configured, "named <name>__<index>, or in the order of forward's results")
    positions = _match_indices(configured) or {name: index for index, name in enumerate(configured)}
    for name in states:
        index = parse_index(name)
        if index is None:
            raise invalid_argument(f"state '{name}' does not follow the <name>__<index> naming convention.")
        positions[name] = index
    return positions


def output_positions(spec: ModelSpec) -> dict[str, int]:
    """Return the positions of a TorchScript model's outputs, and of its states that are none. Raises INVALID."""
    states = [each.output_name for each in spec.states if each.output_name not in spec.outputs]
    return match_outputs(list(spec.outputs), states)


def match_paths(model: str, side: str, configured: Sequence[str], paths: Mapping[str, int]) -> dict[str, int]:
    """Return each tensor's position in a package by path, INPUT__N or OUTPUT__N. Raises INVALID with known names."""
    check_not_empty(side, configured, f"the package has {', '.join(paths)}")
    count = len(set(paths.values()))
    ordinals = {f"{side.upper()}__{index}": index for index in range(count)}
    known = {**ordinals, **paths}
    for name in configured:
        if name not in known:
            raise invalid_argument(f"unexpected inference {side} '{name}', allowed {side}s are: {', '.join(known)}")
    positions = {name: known[name] for name in configured}
    if side == "input":
        _check_positions(model, positions, count)
    return positions


def check_not_empty(side: str, configured: Sequence[str], hint: str) -> None:
    """Raise INVALID where the configuration has no tensors of `side`. `hint` says what to write."""
    if not configured:
        raise invalid_argument(
            f"model configuration must contain at least one {side}, none were specified. A PyTorch file does not say "
            f"their types and dims: write them in config.pbtxt ({hint})"
        )


def check_output_index(name: str, position: int, num_results: int) -> None:
    """Raise INVALID where the model has no such result."""
    if position >= num_results:
        raise invalid_argument(
            f"The output {name} in the model configuration refers to an output index which doesn't exist. "
            f"This model has {num_results} outputs"
        )


def parse_index(name: str) -> int | None:
    """Return the N of a name like `anything__N`; None for other names."""
    digits = name.partition("__")[2]
    return int(digits) if digits.isascii() and digits.isdigit() else None


def _match_names(names: Sequence[str], arguments: Sequence[str]) -> dict[str, int]:
    if not all(name in arguments for name in names):
        return {}
    return {name: arguments.index(name) for name in names}


def _match_indices(names: Sequence[str]) -> dict[str, int]:
    found = {name: index for name in names if (index := parse_index(name)) is not None}
    return found if len(found) == len(names) else {}


def _check_positions(model: str, positions: Mapping[str, int], num_arguments: int) -> None:
    """Check that every argument gets exactly one input."""
    if len(positions) != num_arguments:
        raise invalid_argument(
            f"unable to load model '{model}', configuration expects {len(positions)} inputs, model provides "
            f"{num_arguments}"
        )
    taken: dict[int, str] = {}
    for name, position in positions.items():
        if position >= num_arguments:
            raise invalid_argument(
                f"unable to load model '{model}', input '{name}' refers to input {position}, model provides "
                f"{num_arguments}, counted from 0"
            )
        other = taken.setdefault(position, name)
        if other != name:
            raise invalid_argument(
                f"unable to load model '{model}', inputs '{other}' and '{name}' both are input {position}"
            )


def parse_input_paths(spec: str) -> dict[str, int]:
    """Return positions by name, ARGS[0], ARGS[2][key], KWARGS[mask], in a JSON tree. Raises UNIMPLEMENTED."""
    arguments, keywords = _parse_tree(spec)["children_spec"]
    paths = [f"ARGS{path}" for path in _leaf_paths(arguments)] + [f"KWARGS{path}" for path in _leaf_paths(keywords)]
    return _number_paths(paths, "KWARGS")


def parse_output_paths(spec: str) -> dict[str, int]:
    """Return positions by name, RESULT, RESULT[0], RESULT[logits], in a JSON tree. Raises UNIMPLEMENTED."""
    return _number_paths([f"RESULT{path}" for path in _leaf_paths(_parse_tree(spec))], "RESULT")


def _parse_tree(spec: str) -> dict[str, Any]:
    """Return the tree that follows the version number of the format."""
    tree: dict[str, Any] = json.loads(spec)[1]
    return tree


def _leaf_paths(tree: dict[str, Any]) -> Iterator[str]:
    """Yield the paths of the leaves, in the package's order."""
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
        for path in _leaf_paths(child):
            yield f"[{key}]{path}"


def _number_paths(paths: list[str], prefix: str) -> dict[str, int]:
    positions = {path: index for index, path in enumerate(paths)}
    for path, index in list(positions.items()):
        plain = path.removeprefix(f"{prefix}[").removesuffix("]")
        if path.startswith(f"{prefix}[") and "[" not in plain and not plain.isdigit():
            positions.setdefault(plain, index)
    return positions
