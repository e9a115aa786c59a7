"""What one parameter of an LLM's config.pbtxt does to the engine, and how its text is read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

MOST_SEQS, MOST_DRAFTED, MOST_THREADS = 4096, 32, 1024
"""What the command line allows."""


@dataclass(frozen=True, slots=True)
class Effect:
    """What a parameter does. A note without anything else says why it does nothing."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    """Of EngineConfig."""
    note: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Of `EngineConfig.runtime_settings`: texts by the names in
    `engine.delegated.tensorrt_llm.configuration.catalogue`."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Of `EngineConfig.llm_arguments`."""


Rule = Callable[[str], Effect]
"""Reads a parameter's text. Raises ValueError with what it must be, or what to do."""

NOTHING = Effect()


# -- how texts are read


def truth(text: str) -> bool:
    lowered = text.lower()
    if lowered in ("true", "1"):
        return True
    if lowered in ("false", "0"):
        return False
    raise ValueError("must be true or false")


def integer(text: str, least: int, most: int | None = None) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least or (most is not None and value > most):
        raise ValueError(f"must be an integer of at least {least}" + (f" and at most {most}" if most else ""))
    return value


def fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value <= 1.0:
        raise ValueError("must be a number above 0 and at most 1")
    return value


# -- kinds of rules


def counts(name: str, least: int = 1, most: int | None = None) -> Rule:
    """An integer that is a field of EngineConfig."""
    return lambda text: Effect({name: integer(text, least, most)})


def chooses(name: str, *allowed: str) -> Rule:
    def rule(text: str) -> Effect:
        if text not in allowed:
            raise ValueError(f"must be one of {', '.join(allowed)}")
        return Effect({name: text})

    return rule


def without_effect(why: str) -> Rule:
    return lambda text: Effect(note=why)


def without_effect_unless(neutral: tuple[str, ...], why: str) -> Rule:
    """No word is lost over a value that is what happens anyway."""
    return lambda text: NOTHING if text.lower() in neutral else Effect(note=why)


def refused(instead: str) -> Rule:
    def rule(text: str) -> Effect:
        raise ValueError(instead)

    return rule


def taken_elsewhere(text: str) -> Effect:
    return NOTHING
