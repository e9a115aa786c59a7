"""The states that sequences begin with: what `initial_state` says, else zeros. Rules and words are Triton's."""

from collections.abc import Iterable
from math import prod
from pathlib import Path

from tritonclient.grpc import model_config_pb2
from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelSequenceBatching

from serving.batching.sequences.zeros import zeros
from serving.spec import ModelSource, inner_path
from serving.tensors import datatypes
from serving.tensors.datatypes import BYTES, DataType
from serving.tensors.tensor import Tensor
from sluice.errors import ErrorCode, SluiceError

_FOLDER = "initial_state"
"""Of data files, in the model's folder."""


def check_initial_states(source: ModelSource) -> None:
    """Raises what `initial_states` raises. Reads files: for a thread."""
    initial_states(source.config, source.folder)


def initial_states(config: ModelConfig, folder: Path) -> dict[str, Tensor]:
    """By input name. Reads files in `folder`, the model's.

    Raises SluiceError INVALID for states that contradict themselves, INTERNAL for a file that is not there.
    """
    states = config.sequence_batching.state
    _check_names([state.input_name for state in states], "input")
    _check_names([state.output_name for state in states], "output")
    leading = (1,) if config.max_batch_size > 0 else ()
    return {state.input_name: _initial_state(state, leading, folder) for state in states}


def _check_names(names: Iterable[str], side: str) -> None:
    seen: set[str] = set()
    for name in names:
        if not name:
            raise _invalid(f"sequence batching state must specify '{side}_name'")
        if name in seen:
            raise _invalid(f"State {side} name '{name}' specified more than once.")
        seen.add(name)


def _initial_state(state: ModelSequenceBatching.State, leading: tuple[int, ...], folder: Path) -> Tensor:
    data_type = _data_type(state)
    if len(state.initial_state) > 1:
        raise _invalid(
            f"initial_state field for state input '{state.input_name}' must contain exactly one or zero element. "
            f"Found '{len(state.initial_state)}' elements."
        )
    if not state.initial_state:
        # As in Triton, which leaves the values open; a size that may vary begins as 1.
        return zeros(state.input_name, data_type, (*leading, *(1 if dim == -1 else dim for dim in state.dims)))
    given = state.initial_state[0]
    _check(given, state)
    shape = (*leading, *given.dims)
    kind = given.WhichOneof("state_data")
    if kind is None:
        raise _invalid(f"initial_state setting expects state'{state.input_name}' to have state_data set")
    if kind == "zero_data":
        return zeros(state.input_name, data_type, shape)
    return _from_file(state.input_name, data_type, shape, folder / _FOLDER / inner_path(given.data_file))


def _data_type(state: ModelSequenceBatching.State) -> DataType:
    name = model_config_pb2.DataType.Name(state.data_type)
    found = datatypes.of_config(name)
    if found is None:
        raise _invalid(f"sequence batching state '{state.input_name}' has data_type {name}")
    return found


def _check(given: ModelSequenceBatching.InitialState, state: ModelSequenceBatching.State) -> None:
    name = state.input_name
    if given.data_type != state.data_type:
        raise _invalid(
            f"The data type used for 'initial_state' field of state '{name}' does not match the state data type."
        )
    if not given.name:
        raise _invalid(f"Field 'name' must be set when using initial_state for state input '{name}'.")
    if len(given.dims) != len(state.dims):
        raise _invalid(
            "Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions for state input "
            f"'{name}'. {len(given.dims)} != {len(state.dims)}"
        )
    for dim, declared in zip(given.dims, state.dims, strict=True):
        if dim == -1:
            raise _invalid(f"'initial_state' field for state input name '{name}' contains variable dimensions.")
        if declared not in (-1, dim):
            raise _invalid(
                f"'initial_state' dim for input name '{name}' doesn't match 'state' dim description. "
                f"{dim} != {declared}"
            )


def _from_file(name: str, data_type: DataType, shape: tuple[int, ...], path: Path) -> Tensor:
    """What lies there; a file may be longer than the state, but for strings."""
    try:
        content = path.read_bytes()
    except OSError as error:
        reason = f"failed to open text file for read {path}: {error.strerror}"
        raise SluiceError(ErrorCode.INTERNAL, reason) from error
    expected = data_type.itemsize * prod(shape)
    if len(content) < expected:
        raise _invalid(
            f"initial_state setting expects {expected} bytes, but the data provided from {path.name} only has "
            f"{len(content)} bytes."
        )
    tensor = Tensor(name, data_type.name, shape, content if data_type is BYTES else content[:expected])
    try:
        tensor.check_size()
    except ValueError as error:
        raise _invalid(f"initial_state of state input '{name}' in {path.name}: {error}") from error
    return tensor


def _invalid(message: str) -> SluiceError:
    return SluiceError(ErrorCode.INVALID, message)
