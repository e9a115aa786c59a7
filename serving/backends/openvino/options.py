"""OpenVINO's options from config.pbtxt, in the names of Triton's backend."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import SluiceError, invalid_argument

_THREADS = "INFERENCE_NUM_THREADS"
_OLD_NAMES = {"CPU_THREADS_NUM": _THREADS}
_HINTS = ("LATENCY", "THROUGHPUT", "CUMULATIVE_THROUGHPUT")
_STREAMS = ("AUTO", "NUMA")


@dataclass(frozen=True, slots=True)
class OpenVinoOptions:
    """Options from a model's parameters.

    `properties` go to `compile_model`, by OpenVINO's names. `has_fixed_batch` compiles the model for batches of
    `max_batch_size` alone; `pads_batches` then fills smaller ones up with zeros. `reshapes` sets the model's dims to
    the configuration's.
    """

    device: str = "CPU"
    extension: str = ""
    has_fixed_batch: bool = False
    pads_batches: bool = False
    reshapes: bool = False
    properties: dict[str, str] = field(default_factory=dict)

    def compile_properties(self, num_instances: int, num_cores: int = 0) -> dict[str, str]:
        """Return all properties for `compile_model`. `num_cores` are those of the host policy, 0 without one.

        By default each instance has a stream, and they share the processors.
        """
        found = {}
        if "PERFORMANCE_HINT" not in self.properties and "NUM_STREAMS" not in self.properties:
            found = {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": str(num_instances)}
        if num_cores:
            # Pinned threads would leave the cores that the policy names.
            found |= {"INFERENCE_NUM_THREADS": str(num_cores), "ENABLE_CPU_PINNING": "NO"}
        return found | self.properties


def parse_options(config: ModelConfig) -> OpenVinoOptions:
    """Parse a model's parameters. Raises INVALID, in Triton's words, for invalid values."""
    given = {_OLD_NAMES.get(key, key): each.string_value for key, each in config.parameters.items()}
    return OpenVinoOptions(
        device=given.get("TARGET_DEVICE", "").upper() or "CPU",
        extension=given.get("CPU_EXTENSION_PATH", ""),
        has_fixed_batch=_is_yes(given, "SKIP_OV_DYNAMIC_BATCHSIZE"),
        pads_batches=_is_yes(given, "ENABLE_BATCH_PADDING"),
        reshapes=_is_yes(given, "RESHAPE_IO_LAYERS"),
        properties=_parse_properties(given),
    )


def _is_yes(given: Mapping[str, str], key: str) -> bool:
    return given.get(key, "").lower() == "yes"


def _parse_properties(given: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for key in (_THREADS, "COMPILATION_NUM_THREADS"):
        if text := given.get(key):
            if not is_number(text):
                raise _invalid(key, "a non-negative number", text)
            found[key] = text
    if text := given.get("NUM_STREAMS"):
        if text.upper() not in _STREAMS and not is_number(text):
            raise _invalid("NUM_STREAMS", "either AUTO/NUMA/<int_value>", text)
        found["NUM_STREAMS"] = text.upper()
    if text := given.get("PERFORMANCE_HINT"):
        found["PERFORMANCE_HINT"] = _check_choice("PERFORMANCE_HINT", text, _HINTS)
    if text := given.get("INFERENCE_PRECISION_HINT"):
        found["INFERENCE_PRECISION_HINT"] = text.lower()
    if text := given.get("HINT_BF16"):
        _check_choice("HINT_BF16", text, ("YES",))
        found["INFERENCE_PRECISION_HINT"] = "bf16"
    return found


def is_number(text: str) -> bool:
    """Return whether a text is decimal digits alone."""
    return text.isascii() and text.isdigit()


def _check_choice(key: str, text: str, known: tuple[str, ...]) -> str:
    if text.upper() not in known:
        raise _invalid(key, "/".join(known), text)
    return text.upper()


def _invalid(key: str, expected: str, text: str) -> SluiceError:
    return invalid_argument(f"expected the parameter '{key}' to be {expected}, got {text}")
