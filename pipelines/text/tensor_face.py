"""Which tensors of a model are a conversation's: its question in, its answer out."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.spec import ModelSpec, TensorSpec
from serving.tensors.datatypes import BYTES
from sluice.errors import invalid

MESSAGES = "messages"
"""An input of this name takes a whole conversation, as JSON (`pipelines/text/messages.py`)."""
INPUTS = (MESSAGES, "query", "question", "text_input")
"""Names of inputs that take what a user asks, in the order in which they are looked for."""
OUTPUTS = ("response", "answer", "text_output")
INPUT_KEY, OUTPUT_KEY = "chat_input", "chat_output"
"""Parameters of config.pbtxt that name them where they are called otherwise."""


@dataclass(frozen=True, slots=True)
class TensorFace:
    """The input and the output that a conversation goes through."""

    input: TensorSpec
    output: TensorSpec

    @property
    def takes_messages(self) -> bool:
        """Whether the input is a whole conversation; else it is one question."""
        return self.input.name == MESSAGES


def face_of(config: ModelConfig, spec: ModelSpec) -> TensorFace | None:
    """The face of a model that can be asked with one text alone; None for any other.

    Raises SluiceError INVALID where a parameter of the configuration names a tensor that cannot be one.
    """
    input = _tensor(config, INPUT_KEY, INPUTS, spec.inputs)
    output = _tensor(config, OUTPUT_KEY, OUTPUTS, spec.outputs)
    if input is None or output is None:
        return None
    needed = {name for name, each in spec.inputs.items() if not each.is_optional}
    return TensorFace(input, output) if needed <= {input.name} else None


def _tensor(
    config: ModelConfig, key: str, usual: Iterable[str], tensors: Mapping[str, TensorSpec]
) -> TensorSpec | None:
    named = config.parameters[key].string_value if key in config.parameters else ""
    if named and not _is_text(tensors.get(named)):
        what = f"names '{named}', which is no BYTES tensor of one element that the model declares"
        raise invalid(key, f"parameter '{key}' of model '{config.name}' {what}")
    names = (named,) if named else usual
    return next((tensors[name] for name in names if _is_text(tensors.get(name))), None)


def _is_text(tensor: TensorSpec | None) -> bool:
    return tensor is not None and tensor.data_type is BYTES and tensor.dims in ((1,), (-1,))
