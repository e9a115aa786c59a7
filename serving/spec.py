"""The I/O signature of a model version, read once from its configuration because protobuf is slow, and its source."""

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tritonclient.grpc import model_config_pb2
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import invalid_argument
from sluice.serving.tensors import datatypes
from sluice.serving.tensors.datatypes import BYTES, DataType


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input or output. `dims` leave out the batch dimension; -1 is any size.

    `reshape`, where not None, are the dims that the backend sees in place of `dims` (config.pbtxt's `reshape`).
    """

    name: str
    data_type: DataType
    dims: tuple[int, ...]
    is_optional: bool = False
    allows_ragged: bool = False
    reshape: tuple[int, ...] | None = None
    label_filename: str = ""

    @property
    def model_dims(self) -> tuple[int, ...]:
        """The dims that the backend sees."""
        return self.dims if self.reshape is None else self.reshape


@dataclass(frozen=True, slots=True)
class StateSpec:
    """A state of a sequence: one request's output `output_name` is the next request's input `input_name`."""

    input_name: str
    output_name: str
    data_type: DataType
    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The I/O signature of a model version. With `max_batch_size` 0 it has no batch dimension.

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
    """States of sequences. The backend returns a state's output with every response, also where it is not requested."""

    @property
    def label(self) -> str:
        """The version's name in logs."""
        return f"{self.name} version {self.version}"


def build_spec(config: ModelConfig, version: int) -> ModelSpec:
    """Return the spec of a complete and valid configuration."""
    return ModelSpec(
        name=config.name,
        version=version,
        platform=config.platform or config.backend,
        backend=config.backend,
        max_batch_size=config.max_batch_size,
        inputs={
            each.name: TensorSpec(
                each.name,
                _tensor_type(each.data_type),
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
                _tensor_type(each.data_type),
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
            StateSpec(each.input_name, each.output_name, _tensor_type(each.data_type), tuple(each.dims))
            for each in config.sequence_batching.state
        ),
    )


def read_data_type(number: int) -> DataType | None:
    """Return the element type of a configuration's `data_type`; None for TYPE_INVALID."""
    return datatypes.of_config(model_config_pb2.DataType.Name(number))


def _tensor_type(number: int) -> DataType:
    return read_data_type(number) or BYTES


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The files and the configuration that a model version is loaded from.

    `folder` is the model's, which holds config.pbtxt; `version_folder` is the numbered one, which an ensemble may lack.
    `config` is complete once the backend's `complete` and the repository's defaults were applied.
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
        """The path of `default_model_filename` in the version's folder."""
        return self.version_folder / str(self.config.default_model_filename)


def inner_path(path: str) -> str:
    """Return `path`, which is relative to a model's folder. Raises INVALID where it leads out of it."""
    inner = PurePosixPath(path)
    if not inner.parts or inner.is_absolute() or ".." in inner.parts or "\0" in path:
        raise invalid_argument(f"'{path}' is not a path inside a model's folder")
    return str(inner)


def read_labels(config: ModelConfig, folder: Path) -> dict[str, list[str]]:
    """Return the lines of each output's `label_filename`, by output name. Reads files: for a thread."""
    return {
        output.name: (folder / output.label_filename).read_text(encoding="utf-8").splitlines()
        for output in config.output
        if output.label_filename
    }
