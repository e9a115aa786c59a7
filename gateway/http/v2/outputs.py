"""How a client wants its outputs: as JSON, as bytes after the JSON, in shared memory, as classes."""

from dataclasses import dataclass, field
from enum import Enum

from gateway.http.v2.json_document import array_member, boolean, find, has, string, string_member, unsigned
from gateway.v2.shared_memory import SharedMemoryRegistry
from sluice.errors import SluiceError, invalid

_REGION, _OFFSET, _SIZE = "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"


class Form(Enum):
    """Where an output's data goes."""

    JSON = "json"
    BINARY = "binary"
    SHARED_MEMORY = "shared memory"


@dataclass(frozen=True, slots=True)
class OutputWish:
    """What one output is wanted as. `num_classes` 0: as it is. `window` is the memory to fill, as long as it is."""

    form: Form
    num_classes: int = 0
    window: memoryview | None = None


AS_JSON, AS_BINARY = OutputWish(Form.JSON), OutputWish(Form.BINARY)


@dataclass(slots=True)
class OutputPlan:
    """The wishes for a request's outputs, and the one for those that it does not name."""

    otherwise: OutputWish = AS_JSON
    named: dict[str, OutputWish] = field(default_factory=dict)

    def wish(self, output: str) -> OutputWish:
        return self.named.get(output, self.otherwise)


def read_outputs(document: object, plan: OutputPlan, shared_memory: SharedMemoryRegistry) -> tuple[str, ...]:
    """The names of the requested outputs, after their wishes were put into `plan`. Raises SluiceError."""
    if not has(document, "outputs"):
        return ()
    names = []
    for output in array_member(document, "outputs", "Unable to parse 'outputs': "):
        parameters = find(output, "parameters")
        _check_combination(parameters)
        name = string_member(output, "name", "Unable to parse 'name': ")
        wish = _wish(parameters, shared_memory)
        plan.named.setdefault(name, wish)
        names.append(name)
    return tuple(dict.fromkeys(names))


def _check_combination(parameters: object) -> None:
    if not has(parameters, _REGION):
        return
    if has(parameters, "classification"):
        raise _both("classification")
    if has(parameters, "binary_data") and boolean(find(parameters, "binary_data"), "Unable to set 'binary_data': "):
        raise _both("binary_data")


def _both(other: str) -> SluiceError:
    return invalid("outputs", f"Output can't set both '{_REGION}' and '{other}'")


def _wish(parameters: object, shared_memory: SharedMemoryRegistry) -> OutputWish:
    if not isinstance(parameters, dict) or not parameters:
        return AS_JSON
    num_classes = 0
    if "classification" in parameters:
        num_classes = unsigned(parameters["classification"], "Unable to set 'classification': ")
    window = window_of(parameters, shared_memory)
    if window is not None:
        return OutputWish(Form.SHARED_MEMORY, window=window)
    is_binary = "binary_data" in parameters and boolean(parameters["binary_data"], "Unable to parse 'binary_data': ")
    return OutputWish(Form.BINARY if is_binary else Form.JSON, num_classes)


def window_of(parameters: object, shared_memory: SharedMemoryRegistry) -> memoryview | None:
    """The memory that `parameters` name, or None where they name none. Raises SluiceError for what is not there."""
    if not isinstance(parameters, dict):
        return None
    name = string(parameters[_REGION], f"Unable to parse '{_REGION}': ") if _REGION in parameters else None
    offset, size = (unsigned(parameters.get(each, 0), f"Unable to parse '{each}': ") for each in (_OFFSET, _SIZE))
    return shared_memory.window(name, offset, size) if name is not None else None
