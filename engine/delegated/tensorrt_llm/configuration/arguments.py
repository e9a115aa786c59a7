"""The arguments of the LLM class while they are gathered from EngineConfig, settings and raw arguments."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import msgspec

from sluice.engine.config import EngineConfig
from sluice.engine.delegated.tensorrt_llm.configuration.catalogue import CONFIGS, SETTINGS
from sluice.engine.delegated.tensorrt_llm.folder import LlmFolder
from sluice.engine.delegated.tensorrt_llm.library import TensorRtLlmLibrary
from sluice.errors import SluiceError, invalid


class Precedence(IntEnum):
    """Which source of an argument wins. Two of equal precedence that differ contradict each other."""

    DEFAULT = 0
    """The adapter's own choice, and fields of EngineConfig that hold their default."""
    GIVEN = 1
    """Fields of EngineConfig and settings."""
    RAW = 2
    """`EngineConfig.llm_arguments`."""


class Argument(NamedTuple):
    """A value, and the name that it was given under."""

    value: Any
    origin: str
    precedence: Precedence


class ArgumentSet:
    """LLM arguments by dotted name. A sub-configuration is either None as a whole or given field by field."""

    def __init__(self) -> None:
        self._by_target: dict[str, Argument] = {}

    def add(self, target: str, value: Any, origin: str, precedence: Precedence = Precedence.GIVEN) -> None:
        """Take a value unless a source of higher precedence has one. Raises SluiceError INVALID for a contradiction."""
        for other in [*self._conflicting(target, value)]:
            there = self._by_target[other]
            if there.precedence > precedence:
                return
            if there.precedence == precedence:
                both = f"{origin} asks for {target}={value!r} and {there.origin} for {other}={there.value!r}"
                raise invalid(origin, f"{both}; give one of them")
            del self._by_target[other]
        known = self._by_target.get(target)
        if known is None or known.precedence < precedence:
            self._by_target[target] = Argument(value, origin, precedence)

    def add_default(self, target: str, value: Any, origin: str = "the adapter") -> None:
        """Take a value where nobody gave one."""
        self.add(target, value, origin, Precedence.DEFAULT)

    def _conflicting(self, target: str, value: Any) -> Iterable[str]:
        """Yield the targets here that cannot be together with `value` at `target`."""
        if target in self._by_target and self._by_target[target].value != value:
            yield target
        if value is None:
            yield from self.within(target)
        yield from (
            each for each, known in self._by_target.items() if known.value is None and target.startswith(f"{each}.")
        )

    def within(self, prefix: str) -> list[str]:
        """Return the targets inside a sub-configuration."""
        return [target for target in self._by_target if target.startswith(f"{prefix}.")]

    def get(self, target: str, default: Any = None) -> Any:
        known = self._by_target.get(target)
        return default if known is None else known.value

    def whole_number(self, target: str) -> int:
        """Return a value that must be a whole number of 1 or more: files may hold anything. Raises SluiceError."""
        value = self.get(target)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.refusal(target, f"must be a whole number of 1 or more, got {value!r}")
        return value

    def origin(self, target: str) -> str:
        """Return the name of the field or setting that gave the value."""
        return self._by_target[target].origin

    def refusal(self, target: str, reason: str) -> SluiceError:
        """Return an INVALID error that names what gave the value: "ORIGIN must be ..."."""
        origin = self.origin(target)
        return invalid(origin, f"{origin} {reason}")

    def is_given(self, target: str) -> bool:
        """Return whether somebody gave the value, other than by default."""
        known = self._by_target.get(target)
        return known is not None and known.precedence > Precedence.DEFAULT

    def replace(self, target: str, value: Any) -> None:
        """Put another value in place of one, with the same origin."""
        self._by_target[target] = self._by_target[target]._replace(value=value)

    def rename(self, target: str, name: str) -> None:
        self._by_target[name] = self._by_target.pop(target)

    def drop(self, *targets: str) -> None:
        for target in targets:
            self._by_target.pop(target, None)

    def items(self) -> list[tuple[str, Argument]]:
        return list(self._by_target.items())

    def __contains__(self, target: object) -> bool:
        return target in self._by_target

    def nested(self) -> dict[str, Any]:
        """Return the values as a tree: {"kv_cache_config": {"max_tokens": 64}}."""
        tree: dict[str, Any] = {}
        for target, argument in self._by_target.items():
            *parents, name = target.split(".")
            place = tree
            for parent in parents:
                place = place.setdefault(parent, {})
            if argument.value != {}:
                place[name] = argument.value
            else:  # its defaults; other targets may be inside
                place.setdefault(name, {})
        return tree


def flattened(arguments: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return {"kv_cache_config": {"max_tokens": 64}} as {"kv_cache_config.max_tokens": 64}: configurations are given
    field by field, and other mappings stay whole."""
    flat: dict[str, Any] = {}
    for name, value in arguments.items():
        target = f"{prefix}{name}"
        if target in CONFIGS and isinstance(value, Mapping) and value:
            flat |= flattened(value, f"{target}.")
        else:
            flat[target] = value
    return flat


@dataclass(frozen=True, slots=True)
class Resolution:
    """The state of one resolution: each rule reads and completes the arguments, and notes what has no effect."""

    config: EngineConfig
    folder: LlmFolder
    library: TensorRtLlmLibrary
    arguments: ArgumentSet
    is_engine: bool
    """Whether the LLM class is that of compiled engines."""
    arguments_class: Any
    """The model of its arguments in the installed version."""
    notes: list[str] = field(default_factory=list)

    def leave_out(self, target: str, reason: str) -> None:
        """Drop an argument, with a note on why it has no effect."""
        self.notes.append(f"{self.arguments.origin(target)} has no effect: {reason}")
        self.arguments.drop(target)


# -- the fields of EngineConfig


# fmt: off
DIRECT = (
    "dtype", "max_model_len", "kv_cache_memory_bytes", "kv_cache_memory_fraction", "kv_cache_dtype", "max_num_seqs",
    "max_num_batched_tokens", "scheduler_policy", "enable_prefix_caching", "tensor_parallel_size",
    "pipeline_parallel_size", "tokenizer_path",
)
# fmt: on
"""Fields of EngineConfig that make an argument each, whatever else is given: that of the setting of their name."""
_DEFAULTS = {each.name: each.default for each in msgspec.structs.fields(EngineConfig)}


def add_fields(arguments: ArgumentSet, config: EngineConfig) -> None:
    """Add the fields that make one argument each. Those at their default give way to settings."""
    for name in DIRECT:
        value, setting = getattr(config, name), SETTINGS["tokenizer" if name == "tokenizer_path" else name]
        if value is not None:
            precedence = Precedence.DEFAULT if value == _DEFAULTS[name] else Precedence.GIVEN
            read = setting.parse(value) if isinstance(value, str) else value
            arguments.add(setting.target, read, name, precedence)
