"""The inputs by which a sequence model learns where in which sequence a request stands. The batcher adds them."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import model_config_pb2
from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelSequenceBatching

from serving.batching.sequences.zeros import zeros
from serving.request import SequenceFlag
from serving.tensors import byte_strings, datatypes
from serving.tensors.datatypes import BYTES, DATA_TYPES, DataType
from serving.tensors.tensor import Tensor

_ALL_FLAGS = SequenceFlag.START | SequenceFlag.END


class ControlInputs:
    """What `control_input` of a configuration asks for."""

    def __init__(self, config: ModelConfig) -> None:
        self._shape = (1, 1) if config.max_batch_size > 0 else (1,)
        self._by_flags: dict[SequenceFlag, list[Tensor]] = {
            SequenceFlag(number): [] for number in range(_ALL_FLAGS + 1)
        }
        self._of_filler: dict[str, Tensor] = {}
        self._id: tuple[str, DataType] | None = None
        for given in config.sequence_batching.control_input:
            for control in given.control:
                if control.kind == ModelSequenceBatching.Control.CONTROL_SEQUENCE_CORRID:
                    self._id = (given.name, _data_type(control.data_type))
                    self._of_filler[given.name] = zeros(*self._id, self._shape)
                else:
                    self._add(given.name, control)

    def _add(self, name: str, control: ModelSequenceBatching.Control) -> None:
        false_true = _false_true(control)
        tensors = [Tensor.of(name, value.reshape(self._shape)) for value in false_true]
        for flags, of_flags in self._by_flags.items():
            of_flags.append(tensors[_is_set(control.kind, flags)])
        self._of_filler[name] = tensors[False]

    def of(self, flags: SequenceFlag, id_tensor: Tensor | None) -> dict[str, Tensor]:
        """Of a request with `flags`, in a sequence whose id is in `id_tensor`."""
        found = {tensor.name: tensor for tensor in self._by_flags[flags & _ALL_FLAGS]}
        if id_tensor is not None:
            found[id_tensor.name] = id_tensor
        return found

    def of_filler(self) -> dict[str, Tensor]:
        """Of what only stands in for a request: neither start nor end, not ready, of no sequence."""
        return self._of_filler

    def id_tensor(self, correlation_id: int | str, taken: Iterable[Tensor]) -> Tensor | None:
        """The id as the model gets it; None where it does not ask.

        A model that wants numbers gets of a text what Triton gives it: the first bytes of its wire form. Where a
        sequence under way (`taken`) has those already, it gets a number that none has, as it would mix them up.
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


def _data_type(number: int) -> DataType:
    return datatypes.of_config(model_config_pb2.DataType.Name(number)) or DATA_TYPES["UINT64"]
