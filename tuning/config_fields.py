"""Fields of a config.pbtxt that are searched: their values, and configurations that have them."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInstanceGroup

from sluice.machine import num_gpus
from sluice.tuning.errors import TuneError
from sluice.tuning.space import OFF, Value

INSTANCES, MAX_BATCH, DELAY, PREFERRED, KIND = FIELDS = (
    "instance_count",
    "max_batch_size",
    "max_queue_delay_microseconds",
    "preferred_batch_size",
    "kind",
)
NONE = "none"
DELAYS_US = (0, 100, 500, 1000, 2000, 5000, 10_000)
_SHOWN_BATCHES = (4, 8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class TunedModel:
    """One model whose configuration is searched: as it is written, and as a server completes it."""

    name: str
    written: ModelConfig
    completed: Mapping[str, Any]

    @property
    def batches(self) -> bool:
        """Return whether it can have a dynamic batcher."""
        return bool(self.completed["max_batch_size"]) and "sequence_batching" not in self.completed

    def defaults(self) -> dict[str, Value]:
        """Return the value of each field that a server with the default settings has."""
        groups = self.completed.get("instance_group") or [{}]
        found: dict[str, Value] = {INSTANCES: int(groups[0].get("count", 1)), KIND: groups[0].get("kind", "KIND_AUTO")}
        if self.batches:
            batching = self.completed.get("dynamic_batching")
            preferred = self.written.dynamic_batching.preferred_batch_size
            found[MAX_BATCH] = int(self.completed["max_batch_size"])
            found[DELAY] = OFF if batching is None else int(batching.get("max_queue_delay_microseconds", 0))
            found[PREFERRED] = "+".join(map(str, preferred)) or NONE
        return found

    def usual_values(self) -> dict[str, Sequence[Value]]:
        """Return what is searched by itself: never a batch larger than the configuration allows."""
        found: dict[str, Sequence[Value]] = {INSTANCES: [n for n in (1, 2, 4) if n <= (os.cpu_count() or 1)]}
        if self.batches:
            largest = int(self.completed["max_batch_size"])
            sizes = [size for size in _SHOWN_BATCHES if size <= largest]
            found[MAX_BATCH] = sizes
            found[DELAY] = (OFF, *DELAYS_US)
            found[PREFERRED] = [NONE, *dict.fromkeys(_joined_sizes(sizes))]
        if num_gpus():
            found[KIND] = ("KIND_CPU", "KIND_GPU")
        return found

    def configured(self, values: Mapping[str, Value]) -> ModelConfig:
        """Return the written configuration with the fields of `values` changed."""
        config = ModelConfig()
        config.CopyFrom(self.written)
        defaults = self.defaults()
        changed = {name: value for name, value in values.items() if value != defaults[name]}
        for name, value in changed.items():
            _SETTERS[name](config, value)
        if changed.keys() & {DELAY, PREFERRED}:
            config.max_batch_size = int(values.get(MAX_BATCH, defaults[MAX_BATCH]))
        if values.get(DELAY, defaults.get(DELAY)) == OFF and DELAY in defaults:
            config.ClearField("dynamic_batching")
        return config


def _joined_sizes(sizes: Sequence[int]) -> list[str]:
    """Return preferred sizes to try: the largest, and the upper halves of all."""
    return ["+".join(map(str, sizes[-count:])) for count in (1, 2, 3) if count <= len(sizes)]


def _set_instances(config: ModelConfig, value: Value) -> None:
    for group in config.instance_group or [config.instance_group.add()]:
        group.count = int(value)


def _set_kind(config: ModelConfig, value: Value) -> None:
    for group in config.instance_group or [config.instance_group.add()]:
        group.kind = ModelInstanceGroup.Kind.Value(str(value))


def _set_max_batch(config: ModelConfig, value: Value) -> None:
    config.max_batch_size = int(value)


def _set_delay(config: ModelConfig, value: Value) -> None:
    if value != OFF:
        config.dynamic_batching.max_queue_delay_microseconds = int(value)
        config.dynamic_batching.SetInParent()


def _set_preferred(config: ModelConfig, value: Value) -> None:
    sizes = [] if value == NONE else [int(size) for size in str(value).split("+")]
    config.dynamic_batching.preferred_batch_size[:] = sizes
    config.dynamic_batching.SetInParent()


_SETTERS: dict[str, Callable[[ModelConfig, Value], None]] = {
    INSTANCES: _set_instances,
    KIND: _set_kind,
    MAX_BATCH: _set_max_batch,
    DELAY: _set_delay,
    PREFERRED: _set_preferred,
}


def check_value(label: str, name: str, value: Value) -> None:
    """Raise TuneError for a value that the field cannot have."""
    match name:
        case "instance_count" | "max_batch_size":
            is_right = isinstance(value, int) and value >= 1
            allowed = "whole numbers of at least 1"
        case "max_queue_delay_microseconds":
            is_right = value == OFF or (isinstance(value, int) and value >= 0)
            allowed = "whole numbers of microseconds, and off for no batcher"
        case "preferred_batch_size":
            is_right = value == NONE or all(part.isdecimal() and int(part) > 0 for part in str(value).split("+"))
            allowed = "sizes joined by +, such as 8 or 8+16+32, and none"
        case _:
            is_right = value in ModelInstanceGroup.Kind.keys()  # noqa: SIM118 - a wrapper of protobuf, not a dict
            allowed = ", ".join(ModelInstanceGroup.Kind.keys())
    if not is_right:
        raise TuneError(f"--search {label}: got {value!r}; values are {allowed}")
