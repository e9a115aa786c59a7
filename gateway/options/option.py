"""Options of commands: their declaration, parsers for kinds of values, and the argument parser of all commands."""

import argparse
import difflib
import math
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import Field, dataclass, field
from enum import StrEnum
from typing import Any, NoReturn

from sluice.errors import SluiceError

FAILED, USAGE_ERROR = 1, 2
"""Exit codes of commands, beside 0."""
Parse = Callable[[str], Any]
"""Parses an option's text into its value. Raises ValueError, whose text says what is allowed."""
_NUMBER = re.compile(r"(\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_SIZE = re.compile(r"(\d+)([KMGT]?)(?:i?B)?", re.ASCII | re.IGNORECASE)
_SIZE_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_TRUTHS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


class OptionError(ValueError):
    """An option has a value that is not allowed. The text is one line for the operator."""


@contextmanager
def as_option_error() -> Iterator[None]:
    """Raise an OptionError for what the server cannot be built of."""
    try:
        yield
    except SluiceError as error:
        raise OptionError(error.message) from None


@dataclass(frozen=True, slots=True)
class Option:
    """A field of the configuration: its flag, its parser and its help.

    `flag` without dashes is a positional argument. `metavar` None makes a switch. An option that `is_many` may be given
    several times, and in its variable with `separator` between; its value is a tuple.
    """

    flag: str
    parse: Parse
    help: str
    metavar: str | None
    aliases: tuple[str, ...] = ()
    is_many: bool = False
    separator: str = ","
    own_variable: str = ""

    @property
    def variable(self) -> str:
        return self.own_variable or "SLUICE_" + self.flag.removeprefix("--").replace("-", "_").upper()

    def read(self, text: str, source: str) -> Any:
        """Return the value of `text`, which came from `source`. Raises OptionError."""
        try:
            return self.parse(text)
        except ValueError as error:
            raise OptionError(f"{source} must be {error}, got {text!r}") from None

    def read_many(self, texts: Iterable[str], source: str) -> tuple[Any, ...]:
        """Return the values of `texts`. Raises OptionError."""
        return tuple(self.read(text, source) for text in texts)


def option(
    flag: str,
    default: Any,
    parse: Parse,
    metavar: str | None,
    help: str,
    aliases: tuple[str, ...] = (),
    secret: bool = False,
    is_many: bool = False,
    separator: str = ",",
    variable: str = "",
) -> Any:
    """Return a dataclass field that is an option. A secret one is left out of the configuration's repr."""
    declared = Option(flag, parse, help, metavar, aliases, is_many, separator, variable)
    return field(default=default, repr=not secret, metadata={"option": declared})


def declared_option(declared: "Field[Any]") -> Option:
    """Return the option behind a field made by `option`."""
    found: Option = declared.metadata["option"]
    return found


def integer(low: int, high: int | None = None) -> Parse:
    """Return a parser of whole numbers from `low` to `high`, which is included."""
    allowed = f"a whole number from {low} to {high}" if high is not None else f"a whole number of at least {low}"

    def parse(text: str) -> int:
        if not re.fullmatch(r"[+-]?\d+", text, re.ASCII):
            raise ValueError(allowed)
        value = int(text)
        if value < low or (high is not None and value > high):
            raise ValueError(allowed)
        return value

    return parse


def number(low: float, high: float | None = None, unit: str = "", *, is_above: bool = False) -> Parse:
    """Return a parser of finite decimal numbers of at least `low`, or above it, and at most `high`."""
    least = f"above {low:g}" if is_above else f"of at least {low:g}"
    allowed = f"a number{unit and f' of {unit}'} {least}" + ("" if high is None else f", at most {high:g}")

    def parse(text: str) -> float:
        value = float(text) if _NUMBER.fullmatch(text) else math.inf
        if value == math.inf or value < low or (is_above and value == low) or (high is not None and value > high):
            raise ValueError(allowed)
        return value

    return parse


def seconds(low: float) -> Parse:
    """Return a parser of finite seconds of at least `low`."""
    return number(low, unit="seconds")


def size(low: int) -> Parse:
    """Return a parser of sizes of at least `low` bytes, with an optional binary unit."""
    allowed = f"a size of at least {low} bytes, such as 1048576, 256M or 2G"

    def parse(text: str) -> int:
        match = _SIZE.fullmatch(text)
        if match is None:
            raise ValueError(allowed)
        value = int(match[1]) * _SIZE_UNITS[match[2].upper()]
        if value < low:
            raise ValueError(allowed)
        return value

    return parse


def choice(*allowed: str) -> Parse:
    """Return a parser of one of a few words, in upper or lower case; its value has the case of `allowed`."""
    by_lower_case = {each.lower(): each for each in allowed}

    def parse(text: str) -> str:
        try:
            return by_lower_case[text.lower()]
        except KeyError:
            raise ValueError(f"one of {', '.join(allowed)}") from None

    return parse


def enum_member(kind: type[StrEnum]) -> Parse:
    """Return a parser of an enumeration's values."""
    allowed = choice(*kind)
    return lambda text: kind(allowed(text))


def fraction(text: str) -> float:
    """Parse a share: above 0, at most 1."""
    if not re.fullmatch(r"\d*\.?\d+", text, re.ASCII) or not 0 < float(text) <= 1:
        raise ValueError("a number above 0 and at most 1")
    return float(text)


def weights(text: str) -> dict[str, float]:
    """Parse names with positive numbers: a=2,b=1."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, weight = part.rpartition("=")
        if not name.strip() or name.strip() in found or not _is_weight(weight.strip()):
            raise ValueError("names with weights above 0, such as a=2,b=1")
        found[name.strip()] = float(weight)
    return found


def _is_weight(text: str) -> bool:
    return re.fullmatch(r"\d*\.?\d+", text, re.ASCII) is not None and float(text) > 0


def printable_text(what: str) -> Parse:
    """Return a parser of printable text that is not empty; `what` describes it."""

    def parse(text: str) -> str:
        if not text.strip() or not text.isprintable():
            raise ValueError(what)
        return text

    return parse


def pattern(text: str) -> str:
    """Parse a regular expression in RE2's syntax; its value is the text."""
    import re2

    quiet = re2.Options()
    quiet.log_errors = False
    try:
        re2.compile("(?i)" + text, quiet)
    except re2.error as error:
        reason = error.args[0]
        raise ValueError(
            f"a regular expression of RE2 ({reason.decode() if isinstance(reason, bytes) else reason})"
        ) from None
    return text


def truth(text: str) -> bool:
    """Parse a switch, as an environment variable spells it."""
    try:
        return _TRUTHS[text.lower()]
    except KeyError:
        raise ValueError("1, true, yes, on, 0, false, no or off") from None


def argument_type(parse: Parse) -> Parse:
    """Wrap a parser of option values for argparse, which shows the text of its own error class alone."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"must be {error}, got {text!r}") from None

    return convert


class OneLineParser(argparse.ArgumentParser):
    """Reports an error in one line, without the usage, and suggests an option for an unknown one.

    Help texts keep their line breaks, and options are not abbreviated.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **settings)

    @property
    def flags(self) -> Collection[str]:
        """Every flag, with its dashes."""
        return self._option_string_actions.keys()

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        known, unknown = super().parse_known_args(*args, **kwargs)
        for word in unknown:
            flag = word.partition("=")[0]
            near = difflib.get_close_matches(flag, self._option_string_actions, n=1, cutoff=0.75)
            if flag.startswith("--") and near:
                self.error(f"unknown option {flag}; did you mean {near[0]}?")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"{self.prog}: error: {message} (see {self.prog} --help)\n")
        sys.exit(USAGE_ERROR)
