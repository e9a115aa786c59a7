"""A model's configuration as every request needs it: read once out of the protobuf, which is slow to ask."""

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.tensors import datatypes
from serving.tensors.datatypes import DATA_TYPES, DataType
from sluice.errors import ErrorCode, SluiceError

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input or an output. `dims` leave out the batch dimension; -1 is any size.

    `reshape`, where not None, are the dims that the backend sees in place of `dims` (config's `reshape`).
    """

    name: str
    data_type: DataType
    dims: tuple[int, ...]
    is_optional: bool = False
    allows_ragged: bool = False
    reshape: tuple[int, ...] | None = None
    label_filename: str = ""


@dataclass(frozen=True, slots=True)
class StateSpec:
    """A tensor that a sequence's requests hand on: what one gives as `output_name` the next gets as `input_name`."""

    input_name: str
    output_name: str
    data_type: DataType
    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What a model version takes and gives. `max_batch_size` 0: it has no batch dimension.

    `control_inputs` and the inputs of `states` are set by the sequence batcher, never by clients.
    """

    name: str
    version: int
    platform: str
    backend: str
    max_batch_size: int
    inputs: dict[str, TensorSpec]
    outputs: dict[str, TensorSpec]
    is_decoupled: bool = False
    has_sequences: bool = False
    control_inputs: frozenset[str] = frozenset()
    states: tuple[StateSpec, ...] = ()
    """The backend gives a state's output with every response, whichever outputs were asked for."""

    @property
    def label(self) -> str:
        """How logs name it."""
        return f"{self.name} version {self.version}"


def build_spec(config: ModelConfig, version: int) -> ModelSpec:
    """The spec of a complete and valid configuration."""
    return ModelSpec(
        name=config.name,
        version=version,
        platform=config.platform or config.backend,
        backend=config.backend,
        max_batch_size=config.max_batch_size,
        inputs={
            each.name: TensorSpec(
                each.name,
                _data_type(each.data_type),
                tuple(each.dims),
                each.optional,
                each.allow_ragged_batch,
                tuple(each.reshape.shape) if each.HasField("reshape") else None,
            )
            for each in config.input
        },
        outputs={
            each.name: TensorSpec(
                each.name,
                _data_type(each.data_type),
                tuple(each.dims),
                reshape=tuple(each.reshape.shape) if each.HasField("reshape") else None,
                label_filename=each.label_filename,
            )
            for each in config.output
        },
        is_decoupled=config.model_transaction_policy.decoupled,
        has_sequences=config.HasField("sequence_batching"),
        control_inputs=frozenset(each.name for each in config.sequence_batching.control_input),
        states=tuple(
            StateSpec(each.input_name, each.output_name, _data_type(each.data_type), tuple(each.dims))
            for each in config.sequence_batching.state
        ),
    )


def _data_type(number: int) -> DataType:
    from tritonclient.grpc import model_config_pb2

    found = datatypes.of_config(model_config_pb2.DataType.Name(number))
    return found if found is not None else DATA_TYPES["BYTES"]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model version comes from.

    `folder` is the model's (it holds config.pbtxt), `version_folder` its numbered one, which an ensemble may lack.
    `config` is complete once `complete` and the repository's own defaults have been through it.
    """

    folder: Path
    version: int
    config: ModelConfig

    @property
    def name(self) -> str:
        return str(self.config.name)

    @property
    def version_folder(self) -> Path:
        return self.folder / str(self.version)

    @property
    def model_file(self) -> Path:
        """`default_model_filename` in the version's folder."""
        return self.version_folder / str(self.config.default_model_filename)


def inner_path(path: str) -> str:
    """`path`, relative to a model's folder. Raises SluiceError INVALID where it leads out of it."""
    inner = PurePosixPath(path)
    if not inner.parts or inner.is_absolute() or ".." in inner.parts or "\0" in path:
        raise SluiceError(ErrorCode.INVALID, f"'{path}' is not a path inside a model's folder")
    return str(inner)


def read_labels(config: ModelConfig, folder: Path) -> dict[str, list[str]]:
    """By output, one label a line of its `label_filename` in the model's folder. Reads files: for a thread."""
    return {
        output.name: (folder / output.label_filename).read_text(encoding="utf-8").splitlines()
        for output in config.output
        if output.label_filename
    }
