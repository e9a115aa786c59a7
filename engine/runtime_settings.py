"""Settings that a runtime takes by name: how their texts are read, and what is wrong with a name or a text."""

import difflib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sluice.errors import invalid

Parse = Callable[[str], Any]
"""Reads a setting's text. Raises ValueError with what the text must be."""

STALL_SETTING = "stall_timeout_s"
"""The setting of the watchdog of delegated runtimes, beside the runtime's own."""
_UNFILLED = re.compile(r"\$\{\w*\}")
"""A placeholder of tensorrtllm_backend's templates that nobody filled in."""


@dataclass(frozen=True, slots=True)
class RuntimeSetting:
    """One setting, by the name that `EngineConfig.runtime_settings` has it under."""

    name: str
    target: str
    """The runtime's argument, dotted into sub-configurations, as `kv_cache_config.max_tokens`. It is empty for what
    Sluice's adapter does itself, and for what has no effect."""
    parse: Parse
    help: str
    aliases: tuple[str, ...] = ()
    """Other names: those of the runtime's own server and of other servers."""
    since: str = ""
    """First version of the runtime that has it; "" for all that are supported."""
    until: str = ""
    """First version that no longer has it."""
    backend: str = ""
    """The only backend of the runtime that has it; "" for all."""
    no_effect: str = ""
    """Why it changes nothing, for parameters of other servers that have no meaning here."""


@dataclass(frozen=True, slots=True)
class ParsedSetting:
    """A setting with the name and the value that somebody gave."""

    name: str
    setting: RuntimeSetting
    value: Any


class SettingsTable(Mapping[str, RuntimeSetting]):
    """A runtime's settings by name and by alias."""

    def __init__(self, runtime: str, groups: Mapping[str, tuple[RuntimeSetting, ...]], docs: str = "") -> None:
        """`runtime` is its name in messages, `docs` the page that lists the settings, `groups` has them by subject."""
        self.groups = groups
        self._runtime = runtime
        self._docs = docs
        self._by_name: dict[str, RuntimeSetting] = {}
        for setting in (each for group in groups.values() for each in group):
            for name in (setting.name, *setting.aliases):
                assert name not in self._by_name, f"two settings are called {name}"
                self._by_name[name] = setting

    def __getitem__(self, name: str) -> RuntimeSetting:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def find(self, name: str) -> RuntimeSetting:
        """Raises INVALID for an unknown name, with the names that are near."""
        setting = self._by_name.get(name)
        if setting is None:
            message = f"{self._runtime}'s adapter knows no setting {name!r}{nearest_names(name, self)}"
            raise invalid(name, f"{message}; {self._docs} lists them")
        return setting

    def target(self, name: str) -> str:
        """Return what the setting `name` sets, or `name` itself where there is no such setting."""
        setting = self._by_name.get(name)
        return name if setting is None else setting.target or setting.name

    def parse(self, texts: Mapping[str, str]) -> list[ParsedSetting]:
        """Return the settings that say something: empty texts and unfilled placeholders are left out. Raises INVALID,
        naming the setting, what came and what was expected; for an unknown name, the names that are near."""
        given = []
        for name, text in texts.items():
            setting = self.find(name)
            if not text.strip() or _UNFILLED.fullmatch(text.strip()):
                continue
            try:
                given.append(ParsedSetting(name, setting, setting.parse(text)))
            except ValueError as error:
                raise invalid(name, f"{name} must be {error}, got {text!r}") from None
        return given

    def check(self, texts: Mapping[str, str]) -> dict[str, Any]:
        """Return the values by target, those of the adapter's own settings by name. Raises INVALID as `parse` does, and
        for two names of one target that say different things."""
        values: dict[str, Any] = {}
        names: dict[str, str] = {}
        for name, setting, value in ((each.name, each.setting, each.value) for each in self.parse(texts)):
            if setting.no_effect:
                continue
            target = setting.target or setting.name
            if values.setdefault(target, value) != value:
                other = names[target]
                both = f"{name} is {texts[name]} and {other} is {texts[other]}, but both set {target}"
                raise invalid(name, f"{both}; give one of them")
            names[target] = name
        return values

    def notes(self, texts: Mapping[str, str]) -> list[str]:
        """Return a note on each of the given settings that has no effect."""
        given = ((each.name, each.setting.no_effect) for each in self.parse(texts))
        return [f"{name} has no effect: {reason}" for name, reason in given if reason]


def full_names(name: str, known: Iterable[str]) -> list[str]:
    """Return the dotted names that `name` is short for: `max_size` for `cache_config.max_size`, or `cache_max_size`."""
    return [each for each in known if "." in each and name in (each.rpartition(".")[2], each.replace("_config.", "_"))]


def nearest_names(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean ...?)" with the known names that are most alike, "" where none is."""
    names = list(known)
    alike = full_names(name, names)[:3] or difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    return f" (did you mean {' or '.join(alike)}?)" if alike else ""


# -- kinds of values

_TRUE = frozenset({"true", "1", "yes", "on"})
_FALSE = frozenset({"false", "0", "no", "off"})
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]|[kmgt]i)?b?", re.IGNORECASE)


def text(value: str) -> str:
    """Take the text as it is."""
    return value


def json_or_text(value: str) -> Any:
    """Read a JSON value, or True, False and None as Python writes them; any other text stays as it is."""
    word = value.strip()
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(word, word))
    except (ValueError, RecursionError):
        return word


def renamed(**words: str) -> Parse:
    """Read each of `words`, in any case, as what it means, and take any other text as it is."""
    return lambda value: words.get(value.strip().lower(), value.strip())


def boolean(value: str) -> bool:
    """Read true, 1, yes, on, or their opposites, in any case."""
    word = value.strip().lower()
    if word not in _TRUE | _FALSE:
        raise ValueError("true or false")
    return word in _TRUE


def whole(least: int | None = 0) -> Parse:
    """Read a whole number of `least` or more, None for any."""
    allowed = "a whole number" if least is None else f"a whole number of {least} or more"

    def parse(value: str) -> int:
        try:
            number = int(value)
        except ValueError:
            raise ValueError(allowed) from None
        if least is not None and number < least:
            raise ValueError(allowed)
        return number

    return parse


def number(least: float = -math.inf, most: float = math.inf) -> Parse:
    """Read a finite number from `least` to `most`, both included."""
    allowed = "a number" if least == -math.inf else f"a number of {least:g} or more"
    if most != math.inf:
        allowed = f"a number from {least:g} to {most:g}"

    def parse(value: str) -> float:
        try:
            read = float(value)
        except ValueError:
            read = math.nan
        if not least <= read <= most or math.isinf(read):
            raise ValueError(allowed)
        return read

    return parse


share = number(0.0, 1.0)
positive = whole(1)


def none_or(parse: Parse, word: str) -> Parse:
    """Read `word` as None, everything else by `parse`."""

    def parse_or_none(value: str) -> Any:
        if value.strip().lower() == word:
            return None
        try:
            return parse(value)
        except ValueError as error:
            raise ValueError(f"{word} or {error}") from None

    return parse_or_none


def size_bytes(value: str) -> int:
    """Read a number of bytes, with a unit or without."""
    match = _BYTES.fullmatch(value.strip())
    if match is None:
        raise ValueError("a number of bytes, as 1073741824 or 1Gi")
    return round(float(match[1]) * _UNITS[(match[2] or "").lower()])


def list_of(parse: Parse) -> Parse:
    """Read values with commas between, in brackets or without."""

    def parse_list(value: str) -> list[Any]:
        parts = [part.strip() for part in value.strip().strip("[]").split(",")]
        if not all(parts):
            raise ValueError("values with commas between")
        try:
            return [parse(part) for part in parts]
        except ValueError as error:
            raise ValueError(f"values with commas between, each {error}") from None

    return parse_list
