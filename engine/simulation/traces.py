"""Traces of requests: ours, Mooncake's and BurstGPT's, synthetic ones with shared prefixes, and what the prompts of a
trace have in common."""

import csv
import json
import random
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from sluice.engine.blocks import BlockHash
from sluice.errors import SluiceError, invalid

MOONCAKE_BLOCK = 512
"""Tokens that each of a request's `hash_ids` stands for."""


class TracedRequest(NamedTuple):
    """A request of a trace."""

    at_s: float
    """Seconds from the trace's start."""
    num_prompt: int
    num_output: int
    """Tokens that it generates."""
    parts: tuple[tuple[str, int], ...] = ()
    """The beginning of the prompt, piece by piece: a name and tokens. Prompts whose first pieces are equal have those
    tokens in common; the rest of a prompt is like no other's."""
    max_tokens: int | None = None
    """Tokens that it reserves blocks for; None for as many as it generates."""
    session: str = ""
    tenant: str = ""
    priority: int = 0


class TraceReader(NamedTuple):
    """A format of traces."""

    name: str
    summary: str
    read: Callable[[Path], Iterator[TracedRequest]]


def read_trace(path: Path, name: str = "auto") -> list[TracedRequest]:
    """Read a trace in the order of its times, which begin at 0. `auto` tells the format by the first line. Raises
    SluiceError INVALID that names the file, the line and the field at fault."""
    try:
        reader = FORMATS[_guess(path) if name == "auto" else name]
        requests = sorted(reader.read(path), key=lambda request: request.at_s)
    except OSError as error:
        raise invalid("trace", f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise invalid("trace", f"{path} is no text: {error}") from None
    if not requests:
        raise invalid("trace", f"{path} has no requests")
    start = requests[0].at_s
    return [request._replace(at_s=request.at_s - start) for request in requests]


def _guess(path: Path) -> str:
    with path.open() as file:
        first = next((line for line in file if line.strip()), "")
    if not first:
        raise invalid("trace", f"{path} has no requests")
    if not first.lstrip().startswith("{"):
        return "burstgpt"
    if first.strip() == "{":
        return "load"
    return "mooncake" if '"input_length"' in first else "sluice"


# -- ours


def _read_sluice(path: Path) -> Iterator[TracedRequest]:
    for place, row in _rows(path):
        fields = _Fields(row, place)
        parts = row.get("prefix", [])
        if not isinstance(parts, list):
            raise invalid("prefix", f"{place}: prefix is {parts!r}; expected a list of [name, tokens]")
        pieces = tuple(_part(part, place) for part in parts)
        request = TracedRequest(
            at_s=fields.number("at_s"),
            num_prompt=fields.count("prompt_tokens"),
            num_output=fields.count("output_tokens"),
            parts=pieces,
            max_tokens=fields.count("max_tokens") if "max_tokens" in row else None,
            session=fields.text("session"),
            tenant=fields.text("tenant"),
            priority=fields.integer("priority"),
        )
        num_shared = sum(tokens for _, tokens in pieces)
        if num_shared > request.num_prompt:
            raise invalid(
                "prefix",
                f"{place}: prefix has {num_shared} tokens; expected at most {request.num_prompt} (prompt_tokens)",
            )
        if request.max_tokens is not None and request.max_tokens < request.num_output:
            raise invalid(
                "max_tokens",
                f"{place}: max_tokens is {request.max_tokens}; expected at least {request.num_output} (output_tokens)",
            )
        unknown = sorted(row.keys() - _SLUICE_FIELDS)
        if unknown:
            raise invalid(unknown[0], f"{place}: unknown field {unknown[0]}; there are {', '.join(_SLUICE_FIELDS)}")
        yield request


_SLUICE_FIELDS = dict.fromkeys(
    ("at_s", "prompt_tokens", "output_tokens", "prefix", "max_tokens", "session", "tenant", "priority")
)


def _part(part: object, place: str) -> tuple[str, int]:
    match part:
        case [str(name), int(tokens)] if tokens > 0 and not isinstance(tokens, bool):
            return name, tokens
    raise invalid("prefix", f"{place}: prefix has {part!r}; expected [name, tokens] with at least 1 token")


# -- Mooncake's: https://github.com/kvcache-ai/Mooncake


def _read_mooncake(path: Path) -> Iterator[TracedRequest]:
    for place, row in _rows(path):
        fields = _Fields(row, place)
        num_prompt, ids = fields.count("input_length"), row.get("hash_ids", [])
        if not isinstance(ids, list) or not all(isinstance(each, int) for each in ids):
            raise invalid("hash_ids", f"{place}: hash_ids is {ids!r:.60}; expected a list of whole numbers")
        pieces, left = [], num_prompt
        for each in ids:
            if left > 0:
                pieces.append((str(each), min(MOONCAKE_BLOCK, left)))
                left -= MOONCAKE_BLOCK
        yield TracedRequest(fields.number("timestamp") / 1e3, num_prompt, fields.count("output_length"), tuple(pieces))


# -- BurstGPT's: https://github.com/HPMLL/BurstGPT


def _read_burstgpt(path: Path) -> Iterator[TracedRequest]:
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        names = set(reader.fieldnames or ())
        missing = [name for name in ("Timestamp", "Request tokens", "Response tokens") if name not in names]
        if missing:
            raise invalid(missing[0], f"{path}:1: no column {missing[0]!r}; found {', '.join(sorted(names)) or 'none'}")
        for row in reader:
            place = f"{path}:{reader.line_num}"
            fields = _Fields(dict(row), place)
            num_output = fields.integer("Response tokens")
            if num_output == 0:  # the service failed: there is nothing to generate
                continue
            yield TracedRequest(fields.number("Timestamp"), fields.count("Request tokens"), num_output)


# -- reports of `sluice load --json`


def _read_load(path: Path) -> Iterator[TracedRequest]:
    try:
        rows = json.loads(path.read_text())["requests"]
    except (json.JSONDecodeError, KeyError, TypeError):
        raise invalid("trace", f"{path} is no report of `sluice load --json`: it has no requests") from None
    for number, row in enumerate(rows):
        fields = _Fields(row, f"{path}, request {number}")
        name = "prompt_tokens" if row.get("prompt_tokens") is not None else "prompt_tokens_asked"
        yield TracedRequest(
            fields.number("intended_s"),
            fields.count(name),
            fields.count("output_tokens"),
            max_tokens=max(fields.count("output_tokens_asked"), fields.count("output_tokens")),
        )


FORMATS = {
    reader.name: reader
    for reader in (
        TraceReader("sluice", "JSON lines: at_s, prompt_tokens, output_tokens, prefix", _read_sluice),
        TraceReader("mooncake", "JSON lines: timestamp (ms), input_length, output_length, hash_ids", _read_mooncake),
        TraceReader("load", "a report of `sluice load --json`: its requests", _read_load),
        TraceReader("burstgpt", "CSV: Timestamp (s), Request tokens, Response tokens", _read_burstgpt),
    )
}
"""The formats by name."""


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a file of JSON lines, each with its place for errors."""
    with path.open() as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"{path}:{number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise invalid("trace", f"{place}: not JSON: {error}") from None
            if not isinstance(row, dict):
                raise invalid("trace", f"{place}: {line.strip():.60}; expected a JSON object")
            yield place, row


class _Fields:
    """The fields of a row, checked when they are read."""

    def __init__(self, row: dict[str, Any], place: str) -> None:
        self._row = row
        self._place = place

    def number(self, name: str) -> float:
        try:
            value = float(self._row[name])
        except (KeyError, TypeError, ValueError):
            raise self._wrong(name, "a number") from None
        if not 0.0 <= value < float("inf"):
            raise self._wrong(name, "a number of at least 0")
        return value

    def integer(self, name: str) -> int:
        try:
            value = self._row.get(name, 0)
            return int(value) if not isinstance(value, float) or value == int(value) else int("")
        except (TypeError, ValueError):
            raise self._wrong(name, "a whole number") from None

    def count(self, name: str) -> int:
        if name not in self._row or self.integer(name) < 1:
            raise self._wrong(name, "a whole number of at least 1")
        return self.integer(name)

    def text(self, name: str) -> str:
        value = self._row.get(name, "")
        if not isinstance(value, str):
            raise self._wrong(name, "a text")
        return value

    def _wrong(self, name: str, expected: str) -> SluiceError:
        found = f"{name} is {self._row[name]!r:.60}" if name in self._row else f"{name} is missing"
        return invalid(name, f"{self._place}: {found}; expected {expected}")


# -- what prompts have in common


def block_hashes(request: TracedRequest, number: int, block_size: int) -> list[BlockHash]:
    """Return the hashes of a prompt's full blocks, as `HashChain` chains them: equal where all tokens so far are.
    `number` tells the request from others."""
    hashes: list[BlockHash] = []
    parent, num_blocks = b"", request.num_prompt // block_size
    for content in _contents(request, number, block_size):
        if len(hashes) == num_blocks:
            break
        parent = blake2b(content, key=parent, digest_size=16).digest()
        hashes.append(BlockHash(parent))
    return hashes


def _contents(request: TracedRequest, number: int, block_size: int) -> Iterator[bytes]:
    """Yield what stands for the tokens of each block: the pieces in it, from which token to which."""
    room, content = block_size, b""
    rest = request.num_prompt - sum(tokens for _, tokens in request.parts)
    for name, tokens in (*((name.encode(), tokens) for name, tokens in request.parts), (b"\0%d" % number, rest)):
        start = 0
        while start < tokens:
            taken = min(room, tokens - start)
            content += b"%b\0%d,%d;" % (name, start, taken)
            start, room = start + taken, room - taken
            if not room:
                yield content
                room, content = block_size, b""


class InfiniteCache:
    """A prefix cache that forgets nothing: the most tokens that any cache can have of each prompt."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def take(self, request: TracedRequest, block_size: int) -> int:
        """Return the tokens of the prompt that earlier ones had, and keep it."""
        num_common, is_known, chain = 0, True, b""
        for name, tokens in request.parts:
            chain = blake2b(b"%b\0%d" % (name.encode(), tokens), key=chain, digest_size=16).digest()
            is_known = is_known and chain in self._seen
            num_common += tokens if is_known else 0
            self._seen.add(chain)
        return min(num_common, request.num_prompt - 1) // block_size * block_size


def scaled(requests: Iterable[TracedRequest], speed: float) -> list[TracedRequest]:
    """Return the requests `speed` times as fast after one another."""
    return [request._replace(at_s=request.at_s / speed) for request in requests]


class SharedPrefixes(NamedTuple):
    """The shape of the trace. Lengths are tokens, drawn uniformly where they are a range."""

    num_requests: int = 2000
    rate: float = 20.0
    """Requests in a second, at random times."""
    num_prefixes: int = 64
    prefix_tokens: int = 4096
    own_tokens: tuple[int, int] = (50, 200)
    """The rest of a prompt."""
    output_tokens: tuple[int, int] = (50, 150)
    skew: float = 0.0
    """How unequal prefixes are: the k-th is as popular as 1 / k ** skew."""
    seed: int = 0


def shared_prefix_trace(shape: SharedPrefixes) -> list[TracedRequest]:
    """Make a trace. The same shape gives the same trace."""
    rng = random.Random(shape.seed)
    weights = [1.0 / (place + 1) ** shape.skew for place in range(shape.num_prefixes)]
    at_s, requests = 0.0, []
    for prefix in rng.choices(range(shape.num_prefixes), weights, k=shape.num_requests):
        num_prompt = shape.prefix_tokens + rng.randint(*shape.own_tokens)
        parts = ((f"prefix {prefix}", shape.prefix_tokens),)
        requests.append(TracedRequest(at_s, num_prompt, rng.randint(*shape.output_tokens), parts))
        at_s += rng.expovariate(shape.rate)
    return requests
