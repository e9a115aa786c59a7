"""Recorded traffic to send again: Mooncake's, BurstGPT's, Azure's and ShareGPT's files.

`sluice simulate` reads traces too. This tool imports nothing of the product that it measures, so that it has readers of
its own.
"""

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from sluice.load.config import LoadConfigError

MOONCAKE_BLOCK = 512
"""Tokens that a hash of Mooncake's traces stands for."""


@dataclass(frozen=True, slots=True)
class ReplayedRequest:
    """A request of a trace."""

    at_s: float | None
    """Seconds from the start of the trace; None where the trace has no times."""
    prompt_tokens: int
    output_tokens: int
    pieces: tuple[tuple[int, int], ...] = ()
    """The start of the prompt in pieces, each a number and its tokens: prompts with equal pieces share these tokens."""
    text: str | None = None
    """The prompt itself, where the trace has it."""


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """A format of traces: its name, what it holds for `--help`, and its reader."""

    name: str
    content: str
    read: Callable[[Path], Iterator[ReplayedRequest]]


def read_trace(path: Path) -> list[ReplayedRequest]:
    """Read a trace, whose format is recognized by its content, from its first request on. Raises `LoadConfigError` with
    the place of what is wrong."""
    try:
        requests = list(_format_of(path).read(path))
    except OSError as error:
        raise LoadConfigError(f"--trace {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise LoadConfigError(f"--trace {path}: no text file") from None
    if not requests:
        raise LoadConfigError(f"--trace {path}: no requests in it")
    start = min((each.at_s for each in requests if each.at_s is not None), default=0.0)
    return sorted((_from(start, each) for each in requests), key=lambda each: each.at_s or 0.0)


def _from(start: float, request: ReplayedRequest) -> ReplayedRequest:
    if request.at_s is None:
        return request
    return ReplayedRequest(
        request.at_s - start, request.prompt_tokens, request.output_tokens, request.pieces, request.text
    )


def _format_of(path: Path) -> TraceFormat:
    with path.open() as file:
        first = file.readline(1 << 20)
    if first.lstrip().startswith("["):
        return FORMATS["sharegpt"]
    if first.lstrip().startswith("{"):
        return FORMATS["mooncake"]
    columns = {name.strip() for name in first.split(",")}
    for name, needed in (("azure", _AZURE), ("burstgpt", _BURSTGPT)):
        if set(needed) <= columns:
            return FORMATS[name]
    known = "; ".join(f"{each.name} ({each.content})" for each in FORMATS.values())
    raise LoadConfigError(f"--trace {path}: no format that is known. There are {known}")


def _read_mooncake(path: Path) -> Iterator[ReplayedRequest]:
    with path.open() as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"{path}:{number}"
            row = _json(line, place)
            prompt_tokens = _count(row, "input_length", place)
            ids = row.get("hash_ids", [])
            if not isinstance(ids, list) or not all(isinstance(each, int) for each in ids):
                raise LoadConfigError(f"{place}: hash_ids is {ids!r:.60}; expected a list of whole numbers")
            at_s = _number(row, "timestamp", place) / 1e3
            pieces = tuple(_pieces(ids, prompt_tokens))
            yield ReplayedRequest(at_s, prompt_tokens, _count(row, "output_length", place), pieces)


def _pieces(ids: list[int], prompt_tokens: int) -> Iterator[tuple[int, int]]:
    left = prompt_tokens
    for each in ids:
        if left <= 0:
            return
        yield each, min(MOONCAKE_BLOCK, left)
        left -= MOONCAKE_BLOCK


_BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def _read_burstgpt(path: Path) -> Iterator[ReplayedRequest]:
    for place, row in _csv_rows(path):
        if row["Response tokens"] in ("0", "0.0"):  # the service failed: there is nothing to generate
            continue
        lengths = _count(row, "Request tokens", place), _count(row, "Response tokens", place)
        yield ReplayedRequest(_number(row, "Timestamp", place), *lengths)


def _read_azure(path: Path) -> Iterator[ReplayedRequest]:
    for place, row in _csv_rows(path):
        lengths = _count(row, "ContextTokens", place), _count(row, "GeneratedTokens", place)
        yield ReplayedRequest(_timestamp(row["TIMESTAMP"], place), *lengths)


def _timestamp(text: str, place: str) -> float:
    """Return the seconds of a time with up to seven digits behind the point, of which Python reads six."""
    whole, _, fraction = text.strip().partition(".")
    try:
        return datetime.fromisoformat(whole.replace("Z", "")).timestamp() + float(f"0.{_digits(fraction)}")
    except ValueError:
        raise LoadConfigError(f"{place}: TIMESTAMP is {text!r:.60}; expected a time") from None


def _digits(fraction: str) -> str:
    """Return the digits alone: a zone behind them is the same in all rows."""
    number = len(fraction) - len(fraction.lstrip("0123456789"))
    return fraction[:number] or "0"


def _read_sharegpt(path: Path) -> Iterator[ReplayedRequest]:
    rows = _json(path.read_text(), str(path))
    for number, row in enumerate(rows):
        place = f"{path}, conversation {number}"
        turns = row.get("conversations", []) if isinstance(row, dict) else None
        if not isinstance(turns, list) or not all(isinstance(each, dict) for each in turns):
            raise LoadConfigError(f"{place}: expected an object with conversations, a list of turns")
        said = [str(each.get("value", "")) for each in turns[:2]]
        if len(said) == 2 and said[0].strip() and said[1].strip():
            prompt, answer = said
            yield ReplayedRequest(None, _words(prompt), _words(answer), text=prompt)


def _words(text: str) -> int:
    """Return the tokens of a text by its words, of which English needs three for four tokens."""
    return max(1, len(text.split()) * 4 // 3)


FORMATS = {
    each.name: each
    for each in (
        TraceFormat("mooncake", "JSON lines: timestamp (ms), input_length, output_length, hash_ids", _read_mooncake),
        TraceFormat("burstgpt", "CSV: Timestamp (s), Request tokens, Response tokens", _read_burstgpt),
        TraceFormat("azure", "CSV: TIMESTAMP, ContextTokens, GeneratedTokens", _read_azure),
        TraceFormat("sharegpt", "JSON: conversations, of which the first question is sent", _read_sharegpt),
    )
}
"""The formats by name."""


def _csv_rows(path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        for row in reader:
            yield f"{path}:{reader.line_num}", row


def _json(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise LoadConfigError(f"{place}: not JSON: {error}") from None


def _number(row: dict[str, Any], name: str, place: str) -> float:
    try:
        return float(row[name])
    except (KeyError, TypeError, ValueError):
        raise LoadConfigError(f"{place}: {name} is {row.get(name)!r:.60}; expected a number") from None


def _count(row: dict[str, Any], name: str, place: str) -> int:
    value = _number(row, name, place)
    if value < 1 or value != int(value):
        raise LoadConfigError(f"{place}: {name} is {row[name]!r:.60}; expected a whole number of at least 1")
    return int(value)
