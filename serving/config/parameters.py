"""A typed reader of parameters: config.pbtxt's or a request's."""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import TypeVar

from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import SluiceError, invalid
from sluice.serving.request import Parameter

Choice = TypeVar("Choice", bound=StrEnum)
_SHOWN_CHARS = 80


class ParameterReader:
    """Reads parameters by name, each with a default. Raises INVALID with the value and what is expected."""

    def __init__(self, values: Mapping[str, Parameter], owner: str = "", *, are_texts: bool = False) -> None:
        """`owner` is named in errors. `are_texts`: numbers are given as decimal text."""
        self._values = values
        self._owner = f" of {owner}" if owner else ""
        self._are_texts = are_texts

    @classmethod
    def of_config(cls, config: ModelConfig, known: Iterable[str]) -> "ParameterReader":
        """Read a model's parameters; an empty one counts as absent. Raises INVALID for one that is not `known`."""
        texts = {key: each.string_value.strip() for key, each in config.parameters.items()}
        unknown = sorted(set(texts) - set(known))
        if unknown:
            names = ", ".join(sorted(known))
            raise invalid(unknown[0], f"model '{config.name}' has no parameter '{unknown[0]}'; there are {names}")
        return cls({key: text for key, text in texts.items() if text}, f"model '{config.name}'", are_texts=True)

    def text(self, key: str, default: str, most_chars: int = 4096) -> str:
        given = self._values.get(key, default)
        if not isinstance(given, str) or len(given) > most_chars:
            raise self._wrong(key, f"a string of at most {most_chars} characters")
        return given

    def integer(self, key: str, default: int, least: int, most: int) -> int:
        given = self._values.get(key, default)
        value = _parse(int, given) if self._are_texts and isinstance(given, str) else given
        if type(value) is not int or not least <= value <= most:
            raise self._wrong(key, f"an integer from {least} to {most}")
        return value

    def number(self, key: str, default: float, least: float, most: float) -> float:
        """Return a number from `least` to `most`, both included."""
        given = self._values.get(key, default)
        value = _parse(float, given) if self._are_texts and isinstance(given, str) else given
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise self._wrong(key, f"a number from {least:g} to {most:g}")
        return float(value)

    def choice(self, key: str, default: Choice) -> Choice:
        given = self._values.get(key, default)
        kind = type(default)
        if not isinstance(given, str) or given not in list(kind):
            raise self._wrong(key, f"one of {', '.join(kind)}")
        return kind(given)

    def _wrong(self, key: str, expected: str) -> SluiceError:
        shown = repr(self._values[key])[:_SHOWN_CHARS]
        return invalid(key, f"parameter '{key}'{self._owner} must be {expected}, got {shown}")


def _parse(kind: type[int] | type[float], text: str) -> float | None:
    try:
        return kind(text)
    except ValueError:
        return None
