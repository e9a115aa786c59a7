"""The parsers of the values of options, with errors that say what to write."""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from sluice.load.config import LoadConfigError

T = TypeVar("T")


def argument(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Wrap a parser for argparse, which shows the text of its own error class alone."""

    def convert(text: str) -> T:
        try:
            return parse(text)
        except LoadConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise LoadConfigError(f"{text!r}: write a number above 0")
    return value


def count(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise LoadConfigError(f"{text!r}: write a whole number, at least {least}")
    return int(text)


def share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 1.0:
        raise LoadConfigError(f"{text!r}: write a number from 0 to 1")
    return value


def shape(text: str) -> tuple[str, tuple[int, ...]]:
    """Parse the shape of an input: `input_ids:1,128`."""
    name, colon, sizes = text.rpartition(":")
    if not colon or not name or not all(size.isdecimal() and int(size) > 0 for size in sizes.split(",")):
        raise LoadConfigError(f"{text!r}: write a shape as NAME:D,D,..., e.g. input_ids:1,128")
    return name, tuple(int(size) for size in sizes.split(","))


def image_size(text: str) -> tuple[int, int]:
    """Parse a size: `640x480`. Raises LoadConfigError."""
    width, _, height = text.partition("x")
    if not (width.isdecimal() and height.isdecimal() and int(width) > 0 and int(height) > 0):
        raise LoadConfigError(f"{text!r}: write the size of an image as WIDTHxHEIGHT, e.g. 640x480")
    return int(width), int(height)


def header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip() or "\n" in text or "\r" in text:
        raise LoadConfigError(f"{text!r}: write a header as 'Name: value'")
    return name.strip(), value.strip()


def new_file(text: str) -> Path:
    """Parse a file to write. Its folder is checked now rather than after a long run."""
    if not Path(text).parent.is_dir() or Path(text).is_dir():
        raise LoadConfigError(f"{text!r}: write a file in a folder that exists")
    return Path(text)


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise LoadConfigError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise LoadConfigError("write a JSON object, e.g. '{\"top_p\": 0.9}'")
    return value


def at_least(least: int) -> Callable[[str], int]:
    """Return the parser of a whole number, for argparse."""
    return argument(partial(count, least=least))


def levels(text: str) -> tuple[float, ...]:
    """Parse levels of a sweep, each above 0: `0.5,1,2`. They are measured from the lowest."""
    found = {positive(part.strip()) for part in text.split(",")}
    return tuple(sorted(found))


def whole_levels(text: str) -> tuple[float, ...]:
    """Parse whole levels of a sweep: `1,2,4`."""
    return tuple(sorted({count(part.strip(), least=1) for part in text.split(",")}))


def json_file(text: str, builtin: Any) -> Any:
    """Read a file of JSON; the text `builtin` stands for the value `builtin`."""
    if text == "builtin":
        return builtin
    try:
        return json.loads(Path(text).read_bytes())
    except OSError as error:
        raise LoadConfigError(f"{text}: {error.strerror}") from None
    except ValueError as error:
        raise LoadConfigError(f"{text}: not JSON: {error}") from None


def tool_functions(text: str, builtin: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
    """Read tools: a list of functions, or of OpenAI's tools, which have a function each."""
    listed = json_file(text, list(builtin))
    functions = [each.get("function", each) if isinstance(each, dict) else each for each in _as_list(listed)]
    if not functions or not all(isinstance(each, dict) and isinstance(each.get("name"), str) for each in functions):
        raise LoadConfigError(f"{text}: write a list of tools, each with name, description and parameters")
    return tuple(functions)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
