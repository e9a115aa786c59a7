"""Inputs that the sequence batcher sets, and no client: controls and states. Rules and errors are Triton's."""

from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import model_config_pb2
from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelSequenceBatching

from sluice.errors import ErrorCode, SluiceError, invalid_argument
from sluice.serving.request import InferRequest, SequenceFlag
from sluice.serving.spec import ModelSource, ModelSpec, inner_path, read_data_type
from sluice.serving.tensors import byte_strings
from sluice.serving.tensors.datatypes import BYTES, DATA_TYPES, DataType
from sluice.serving.tensors.tensor import Tensor

_ALL_FLAGS = SequenceFlag.START | SequenceFlag.END
_STATE_FOLDER = "initial_state"
"""Folder of data files, in the model's folder."""


class ControlInputs:
    """Control inputs tell a model the id of a request's sequence and where in it the request stands."""

    def __init__(self, config: ModelConfig) -> None:
        self._shape = (1, 1) if config.max_batch_size > 0 else (1,)
        self._by_flags: dict[SequenceFlag, list[Tensor]] = {
            SequenceFlag(number): [] for number in range(_ALL_FLAGS + 1)
        }
        self._of_null_request: dict[str, Tensor] = {}
        self._id: tuple[str, DataType] | None = None
        for given in config.sequence_batching.control_input:
            for control in given.control:
                if control.kind == ModelSequenceBatching.Control.CONTROL_SEQUENCE_CORRID:
                    self._id = (given.name, read_data_type(control.data_type) or DATA_TYPES["UINT64"])
                    self._of_null_request[given.name] = Tensor.zeros(*self._id, self._shape)
                else:
                    self._add(given.name, control)

    def _add(self, name: str, control: ModelSequenceBatching.Control) -> None:
        false_true = _false_true(control)
        tensors = [Tensor.of(name, value.reshape(self._shape)) for value in false_true]
        for flags, controls in self._by_flags.items():
            controls.append(tensors[_is_set(control.kind, flags)])
        self._of_null_request[name] = tensors[False]

    def of(self, flags: SequenceFlag, id_tensor: Tensor | None) -> dict[str, Tensor]:
        """Return the controls of a request with `flags`, in a sequence whose id is in `id_tensor`."""
        found = {tensor.name: tensor for tensor in self._by_flags[flags & _ALL_FLAGS]}
        if id_tensor is not None:
            found[id_tensor.name] = id_tensor
        return found

    def of_null_request(self) -> dict[str, Tensor]:
        """Return the controls of a null request: neither start nor end, not ready, of no sequence."""
        return self._of_null_request

    def id_tensor(self, correlation_id: int | str, taken: Iterable[Tensor]) -> Tensor | None:
        """Return the correlation id as the model gets it; None where it does not ask for it.

        A text becomes a number as in Triton: the first bytes of its wire form. Where a live sequence has that number
        already (`taken` holds their ids), the next free one is used, or the model would mix them up.
        """
        if self._id is None:
            return None
        name, data_type = self._id
        if data_type is BYTES:
            value = np.array([str(correlation_id).encode()], np.object_)
            return Tensor(name, BYTES.name, self._shape, array=value.reshape(self._shape))
        number = _as_number(correlation_id, data_type)
        if isinstance(correlation_id, str):
            others = {tensor.array.item() for tensor in taken}
            while number.item() in others:
                number = number + np.array(1, data_type.dtype)
        return Tensor(name, data_type.name, self._shape, array=number.reshape(self._shape))


class StateTensors:
    """The states of a model: tensors that the batcher keeps for a sequence from one request to the next."""

    def __init__(self, spec: ModelSpec, initial: Mapping[str, Tensor]) -> None:
        """`initial`: the states that sequences begin with, by input name."""
        self.initial = dict(initial)
        self._input_of = {state.output_name: state.input_name for state in spec.states}
        self._outputs = tuple(spec.outputs)
        self.has_states = bool(spec.states)

    def request_outputs(self, request: InferRequest) -> frozenset[str]:
        """Request every state's output too. Returns those that the client did not request and must not see."""
        visible = request.requested_outputs or self._outputs
        hidden = [name for name in self._input_of if name not in visible]
        request.requested_outputs = (*visible, *hidden)
        return frozenset(hidden)

    def extract(self, outputs: list[Tensor]) -> dict[str, Tensor]:
        """Return a response's states as inputs, copied: a row would keep its batch, and its memory may be reused."""
        return {
            self._input_of[each.name]: Tensor(
                self._input_of[each.name], each.datatype, each.shape, array=each.array.copy()
            )
            for each in outputs
            if each.name in self._input_of
        }


def read_initial_states(source: ModelSource) -> dict[str, Tensor]:
    """Return the states that sequences begin with, by input name: `initial_state`'s, else zeros.

    Reads files in the model's folder: for a thread. Raises INVALID for states that contradict themselves,
    INTERNAL for a missing file.
    """
    states = source.config.sequence_batching.state
    _check_names([state.input_name for state in states], "input")
    _check_names([state.output_name for state in states], "output")
    leading = (1,) if source.config.max_batch_size > 0 else ()
    return {state.input_name: _initial_state(state, leading, source.folder) for state in states}


def _check_names(names: Iterable[str], side: str) -> None:
    seen: set[str] = set()
    for name in names:
        if not name:
            raise invalid_argument(f"sequence batching state must specify '{side}_name'")
        if name in seen:
            raise invalid_argument(f"State {side} name '{name}' specified more than once.")
        seen.add(name)


def _initial_state(state: ModelSequenceBatching.State, leading: tuple[int, ...], folder: Path) -> Tensor:
    data_type = _state_data_type(state)
    if len(state.initial_state) > 1:
        raise invalid_argument(
            f"initial_state field for state input '{state.input_name}' must contain exactly one or zero element. "
            f"Found '{len(state.initial_state)}' elements."
        )
    if not state.initial_state:
        # Triton leaves the values open. A variable size begins as 1.
        return Tensor.zeros(state.input_name, data_type, (*leading, *(1 if dim == -1 else dim for dim in state.dims)))
    given = state.initial_state[0]
    _check_initial_state(given, state)
    shape = (*leading, *given.dims)
    kind = given.WhichOneof("state_data")
    if kind is None:
        raise invalid_argument(f"initial_state setting expects state'{state.input_name}' to have state_data set")
    if kind == "zero_data":
        return Tensor.zeros(state.input_name, data_type, shape)
    path = folder / _STATE_FOLDER / inner_path(given.data_file)
    return _read_state(state.input_name, data_type, shape, path)


def _state_data_type(state: ModelSequenceBatching.State) -> DataType:
    found = read_data_type(state.data_type)
    if found is None:
        name = model_config_pb2.DataType.Name(state.data_type)
        raise invalid_argument(f"sequence batching state '{state.input_name}' has data_type {name}")
    return found


def _check_initial_state(given: ModelSequenceBatching.InitialState, state: ModelSequenceBatching.State) -> None:
    name = state.input_name
    if given.data_type != state.data_type:
        raise invalid_argument(
            f"The data type used for 'initial_state' field of state '{name}' does not match the state data type."
        )
    if not given.name:
        raise invalid_argument(f"Field 'name' must be set when using initial_state for state input '{name}'.")
    if len(given.dims) != len(state.dims):
        raise invalid_argument(
            "Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions for state input "
            f"'{name}'. {len(given.dims)} != {len(state.dims)}"
        )
    for dim, declared in zip(given.dims, state.dims, strict=True):
        if dim == -1:
            raise invalid_argument(f"'initial_state' field for state input name '{name}' contains variable dimensions.")
        if declared not in (-1, dim):
            raise invalid_argument(
                f"'initial_state' dim for input name '{name}' doesn't match 'state' dim description. "
                f"{dim} != {declared}"
            )


def _read_state(name: str, data_type: DataType, shape: tuple[int, ...], path: Path) -> Tensor:
    """Read a state from a file. The file may be longer than the state, unless it holds strings."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SluiceError(ErrorCode.INTERNAL, f"failed to open text file for read {path}: {error.strerror}") from error
    expected = data_type.itemsize * prod(shape)
    if len(content) < expected:
        raise invalid_argument(
            f"initial_state setting expects {expected} bytes, but the data provided from {path.name} only has "
            f"{len(content)} bytes."
        )
    tensor = Tensor(name, data_type.name, shape, content if data_type is BYTES else content[:expected])
    try:
        tensor.check_size()
    except ValueError as error:
        raise invalid_argument(f"initial_state of state input '{name}' in {path.name}: {error}") from error
    return tensor


def _is_set(kind: int, flags: SequenceFlag) -> bool:
    if kind == ModelSequenceBatching.Control.CONTROL_SEQUENCE_START:
        return SequenceFlag.START in flags
    if kind == ModelSequenceBatching.Control.CONTROL_SEQUENCE_END:
        return SequenceFlag.END in flags
    return True


def _false_true(
    control: ModelSequenceBatching.Control,
) -> "NDArray[np.int32] | NDArray[np.float32] | NDArray[np.bool_]":
    if control.fp32_false_true:
        return np.array(control.fp32_false_true, np.float32)
    if control.bool_false_true:
        return np.array(control.bool_false_true, np.bool_)
    return np.array(control.int32_false_true or (0, 1), np.int32)


def _as_number(correlation_id: int | str, data_type: DataType) -> "NDArray[np.integer]":
    if isinstance(correlation_id, int):
        wire = (correlation_id & 0xFFFF_FFFF_FFFF_FFFF).to_bytes(8, "little")
    else:
        wire = byte_strings.pack([correlation_id.encode()])
    return np.frombuffer(wire[: data_type.itemsize].ljust(data_type.itemsize, b"\0"), data_type.dtype)
