"""What several sources ask for, as one: by LLM argument, each with who said it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from sluice.errors import invalid


class Strength(IntEnum):
    """Which source wins. Two of equal strength that say different things contradict each other."""

    DEFAULT = 0
    """The adapter's own choice, and fields of EngineConfig that hold their default."""
    ASKED = 1
    """Fields of EngineConfig and settings."""
    RAW = 2
    """`EngineConfig.llm_arguments`."""


@dataclass(frozen=True, slots=True)
class Wish:
    """A value, and the name it was given under."""

    value: Any
    origin: str
    strength: Strength


class Wishes:
    """LLM arguments by dotted name. A sub-configuration is either None as a whole or wished for field by field."""

    def __init__(self) -> None:
        self._by_target: dict[str, Wish] = {}

    def add(self, target: str, value: Any, origin: str, strength: Strength) -> None:
        """Raises SluiceError INVALID where a source as strong says something else."""
        for other in [*self._conflicting(target, value)]:
            conflicting = self._by_target[other]
            if conflicting.strength > strength:
                return
            if conflicting.strength == strength:
                said = (
                    f"{origin} asks for {target}={value!r} and {conflicting.origin} for {other}={conflicting.value!r}"
                )
                raise invalid(origin, f"{said}; give one of them")
            del self._by_target[other]
        there = self._by_target.get(target)
        if there is None or there.strength < strength:
            self._by_target[target] = Wish(value, origin, strength)

    def _conflicting(self, target: str, value: Any) -> Iterable[str]:
        """Targets here that cannot be together with `value` at `target`."""
        if target in self._by_target and self._by_target[target].value != value:
            yield target
        if value is None:
            yield from self.within(target)
        parents = [target[:i] for i, character in enumerate(target) if character == "."]
        yield from (parent for parent in parents if parent in self._by_target and self._by_target[parent].value is None)

    def within(self, prefix: str) -> list[str]:
        """Targets inside of a sub-configuration."""
        return [target for target in self._by_target if target.startswith(f"{prefix}.")]

    def get(self, target: str, default: Any = None) -> Any:
        wish = self._by_target.get(target)
        return default if wish is None else wish.value

    def origin(self, target: str) -> str:
        """Who asked for it: the field's or setting's name."""
        return self._by_target[target].origin

    def is_asked(self, target: str) -> bool:
        """Whether somebody said so, other than by default."""
        wish = self._by_target.get(target)
        return wish is not None and wish.strength > Strength.DEFAULT

    def replace(self, target: str, value: Any) -> None:
        """Another value for what is here, from the same source."""
        there = self._by_target[target]
        self._by_target[target] = Wish(value, there.origin, there.strength)

    def rename(self, target: str, name: str) -> None:
        self._by_target[name] = self._by_target.pop(target)

    def drop(self, *targets: str) -> None:
        for target in targets:
            self._by_target.pop(target, None)

    def items(self) -> list[tuple[str, Wish]]:
        return list(self._by_target.items())

    def __contains__(self, target: object) -> bool:
        return target in self._by_target

    def nested(self) -> dict[str, Any]:
        """As a tree: {"kv_cache_config": {"max_tokens": 64}}."""
        tree: dict[str, Any] = {}
        for target, wish in self._by_target.items():
            *parents, name = target.split(".")
            place = tree
            for parent in parents:
                place = place.setdefault(parent, {})
            if wish.value != {} or name not in place:
                place[name] = {} if wish.value == {} else wish.value
        return tree


def flattened(arguments: Mapping[str, Any], sub_configs: frozenset[str], prefix: str = "") -> dict[str, Any]:
    """{"kv_cache_config": {"max_tokens": 64}} as {"kv_cache_config.max_tokens": 64}, for those of `sub_configs`."""
    flat: dict[str, Any] = {}
    for name, value in arguments.items():
        target = f"{prefix}{name}"
        if target in sub_configs and isinstance(value, Mapping) and value:
            flat |= flattened(value, sub_configs, f"{target}.")
        else:
            flat[target] = value
    return flat
