"""Readers of settings' texts. Each raises ValueError with what the text must be."""

import json
import math
import re
from collections.abc import Callable
from typing import Any

Parse = Callable[[str], Any]

_TRUE = frozenset({"true", "1", "yes", "on"})
_FALSE = frozenset({"false", "0", "no", "off"})
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]|[kmgt]i)?b?", re.IGNORECASE)


def boolean(text: str) -> bool:
    word = text.strip().lower()
    if word not in _TRUE | _FALSE:
        raise ValueError("true or false")
    return word in _TRUE


def opposite(text: str) -> bool:
    """Of a claim that the target says the other way round."""
    return not boolean(text)


def whole(least: int = 0) -> Parse:
    """A whole number of `least` or more."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"a whole number of {least} or more") from None
        if value < least:
            raise ValueError(f"a whole number of {least} or more")
        return value

    return parse


def number(least: float = -math.inf, most: float = math.inf) -> Parse:
    """A number in a closed range."""
    allowed = "a number" if least == -math.inf else f"a number of {least:g} or more"
    if most != math.inf:
        allowed = f"a number from {least:g} to {most:g}"

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ValueError(allowed) from None
        if not least <= value <= most or math.isinf(value):
            raise ValueError(allowed)
        return value

    return parse


share = number(0.0, 1.0)
count = whole(0)
positive = whole(1)


def text(value: str) -> str:
    return value


def one_of(*words: str, **others: str) -> Parse:
    """One of `words` in any case; `others` are further words by what they are read as."""
    known = {word.lower(): word for word in words} | {word.lower(): meant for word, meant in others.items()}

    def parse(value: str) -> str:
        word = value.strip().lower()
        if word not in known:
            raise ValueError(f"one of {', '.join(known)}")
        return known[word]

    return parse


def none_or(parse: Parse, *words: str) -> Parse:
    """`words` mean None."""

    def parse_or_none(value: str) -> Any:
        if value.strip().lower() in words:
            return None
        try:
            return parse(value)
        except ValueError as error:
            raise ValueError(f"{', '.join(words)} or {error}") from None

    return parse_or_none


def size_bytes(value: str) -> int:
    match = _BYTES.fullmatch(value.strip())
    if match is None:
        raise ValueError("a number of bytes, as 1073741824 or 1Gi")
    return round(float(match[1]) * _UNITS[(match[2] or "").lower()])


def list_of(parse: Parse) -> Parse:
    """Values with commas between; brackets around them may be."""

    def parse_list(value: str) -> list[Any]:
        parts = [part.strip() for part in value.strip().strip("[]").split(",")]
        if not all(parts):
            raise ValueError("values with commas between")
        try:
            return [parse(part) for part in parts]
        except ValueError as error:
            raise ValueError(f"values with commas between, each {error}") from None

    return parse_list


def json_object(value: str) -> dict[str, Any]:
    try:
        read = json.loads(value)
    except ValueError as error:
        raise ValueError(f"a JSON object ({error})") from None
    if not isinstance(read, dict):
        raise ValueError("a JSON object")
    return read


def tree(value: str) -> list[list[int]]:
    """Paths of a draft tree: `{0, 0, 0}, {0, 1}` as tensorrtllm_backend writes them, or a JSON list of lists."""
    try:
        read = json.loads(f"[{value.replace('{', '[').replace('}', ']')}]")
    except ValueError:
        raise ValueError("paths as {0, 0}, {0, 1}") from None
    paths = read[0] if len(read) == 1 and read[0] and isinstance(read[0], list) and _is_paths(read[0]) else read
    if not paths or not _is_paths(paths):
        raise ValueError("paths as {0, 0}, {0, 1}")
    return list(paths)


def _is_paths(value: list[Any]) -> bool:
    return all(isinstance(path, list) and path and all(type(each) is int for each in path) for path in value)
