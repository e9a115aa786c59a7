"""The command `sluice usage`: reads a ledger, or asks a server, and shows bars or writes a table."""

import argparse
import asyncio
import csv
import os
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self, TextIO

import orjson
from rich.console import Console
from rich.table import Table

from sluice.cli.errors import CommandError, reports_errors
from sluice.cli.server import JsonObject, RunningServer
from sluice.cli.terminal import strip_control
from sluice.errors import SluiceError
from sluice.gateway.options.batches import BatchOptions
from sluice.gateway.options.command_line import add_options
from sluice.gateway.options.config import read_client_options, read_config
from sluice.gateway.options.ledger import LedgerOptions
from sluice.gateway.options.option import FAILED, USAGE_ERROR, OneLineParser, OptionError
from sluice.gateway.options.rag import RagClientOptions
from sluice.gateway.tenancy.ledger.rows import LedgerRow
from sluice.gateway.tenancy.ledger.store import (
    DEFAULT_DAYS,
    GROUPINGS,
    UsageQuery,
    describe_usage,
    is_postgres,
    open_ledger,
    parse_query,
)

Rows = Sequence[Mapping[str, Any]]
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


class CsvTable:
    """Writes CSV. Texts that a spreadsheet would take for formulas get an apostrophe: clients choose some of them."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, kinds: Mapping[str, Any], pages: Iterator[Rows]) -> None:
        """Write a head line and all rows."""
        writer = csv.writer(self._file, lineterminator="\n")
        writer.writerow(kinds)
        for page in pages:
            writer.writerows([_safe(row[name]) for name in kinds] for row in page)


def _safe(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA_STARTS) else value


class JsonLinesTable:
    """Writes an object a line."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, kinds: Mapping[str, Any], pages: Iterator[Rows]) -> None:
        """Write all rows."""
        for page in pages:
            self._file.writelines(f"{orjson.dumps(row).decode()}\n" for row in page)


class ParquetTable:
    """Writes a Parquet file, row groups of it at a time. Columns named `…_us` are timestamps there, without the ending.

    arro3 writes it: Arrow's Rust writer in 12 MB of wheels, where pyarrow has 55.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @classmethod
    @contextmanager
    def opened(cls, path: Path) -> Iterator[Self]:
        """Write beside `path`, and move the file there at the end. Raises CommandError without arro3."""
        try:
            import arro3.io  # noqa: F401 - few need it
        except ImportError as error:
            raise CommandError(f"--parquet needs arro3 ({error}): pip install 'sluice[parquet]'") from None
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            yield cls(part)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    def write(self, kinds: Mapping[str, Any], pages: Iterator[Rows]) -> None:
        """Write all rows."""
        from arro3.core import Array, DataType, Field, RecordBatch, RecordBatchReader, Schema
        from arro3.io import write_parquet

        stored = {str: DataType.utf8(), int: DataType.int64(), float: DataType.float64()}
        shown = {name: stored[_plain(kind)] for name, kind in kinds.items()}
        shown |= {name: DataType.timestamp("us", tz="UTC") for name in kinds if name.endswith("_us")}
        fields = [
            Field(name.removesuffix("_us"), shown[name], nullable=_plain(kind) is not kind)
            for name, kind in kinds.items()
        ]
        schema = Schema(fields)

        def batches() -> Iterator[Any]:
            for page in pages:
                columns = {name: Array([row[name] for row in page], stored[_plain(kinds[name])]) for name in kinds}
                arrays = [column.cast(shown[name]) for name, column in columns.items()]
                yield RecordBatch.from_arrays(arrays, schema=schema)

        write_parquet(RecordBatchReader.from_batches(schema, batches()), self._path)


def _plain(kind: Any) -> Any:
    """Return int for `int | None`."""
    return getattr(kind, "__args__", (kind,))[0]


TableWriter = CsvTable | JsonLinesTable | ParquetTable


_OVERVIEW = """\
Show what keys, tenants and models used, by the ledger's sums of each day (UTC): bars on a terminal, or a table to go
on with. Reads the ledger itself, where servers may be writing, or asks a server with --url.
"""
_EPILOG = """\
examples:
  sluice usage                                        the last 30 days, by day
  sluice usage --by tenant,model --start 2026-11-01 --end 2026-11-30
  sluice usage --url http://127.0.0.1:8000 --by key --json
  sluice usage --by day,key --csv > november.csv
  sluice usage --requests --parquet requests.parquet  a row for each request (needs sluice[parquet])

Exit codes: 0 when done, 1 where the ledger or the server could not be read, 2 for a bad option.
"""
_LEDGER_FLAGS = ("--ledger", "--state-path")
_SERVER_FLAGS = ("--url", "--api-key")
_BAR_CHARS = 30
_MAX_GROUPS = 1_000_000
"""Groups of a ledger's file. A server returns fewer."""
_COUNTS = ("requests", "failed", "prompt_tokens", "cached_tokens", "generated_tokens", "price")


@reports_errors("sluice usage", OSError)
def command(argv: list[str]) -> int:
    """Show and export what keys, tenants and models used."""
    arguments = _parser().parse_args(argv)
    flags = {flag: value for flag in _SERVER_FLAGS if (value := getattr(arguments, flag))}
    try:
        query = parse_query(arguments.start, arguments.end, [arguments.by])._replace(most=_MAX_GROUPS)
        with asyncio.Runner() as runner, _open_table(arguments) as table:
            opened = (
                _asked_server(flags, query) if "--url" in flags else _opened_ledger(_ledger_place(arguments), query)
            )
            source = runner.run(opened.__aenter__())
            try:
                _report(source, table, runner, arguments)
            finally:
                runner.run(opened.__aexit__(None, None, None))
    except SluiceError as error:
        is_usage = error.param in ("start", "end", "group_by", "ledger")
        raise CommandError(error.message, USAGE_ERROR if is_usage else FAILED) from None
    return 0


@contextmanager
def _open_table(arguments: argparse.Namespace) -> Iterator[TableWriter | None]:
    """Open what is written; None for bars and for usage as JSON. A Parquet file that was not finished is removed."""
    if arguments.parquet is not None:
        with ParquetTable.opened(Path(arguments.parquet)) as parquet:
            yield parquet
    elif arguments.csv:
        yield CsvTable(sys.stdout)
    else:
        yield JsonLinesTable(sys.stdout) if arguments.requests else None


class UsageSource(NamedTuple):
    """Reads the usage of a query, from a server or from a ledger: its sums, and its rows page by page."""

    sums: Callable[[], Coroutine[Any, Any, JsonObject]]
    rows: Callable[[], AsyncGenerator[list[JsonObject], None]]


@asynccontextmanager
async def _asked_server(flags: dict[str, str], query: UsageQuery) -> AsyncIterator[UsageSource]:
    options = read_client_options(flags)
    days = {"start": str(query.first), "end": str(query.last)}
    async with RunningServer(options.url, options.api_key) as server:
        groups = {"group_by": ",".join(query.group_by)}
        yield UsageSource(lambda: server.usage(days | groups), lambda: server.usage_rows(days))


def _ledger_place(arguments: argparse.Namespace) -> str:
    """Return the place of the ledger. Raises OptionError if there is no ledger."""
    config = read_config({flag: getattr(arguments, flag) for flag in _LEDGER_FLAGS if getattr(arguments, flag)})
    place = config.ledger.store_place(config.state_folder())
    if place is None:
        raise OptionError("--ledger is none: there is nothing to read")
    if not is_postgres(place) and not Path(place).expanduser().exists():
        raise OptionError(f"there is no ledger {place}; name one with --ledger, or a server with --url")
    return place


@asynccontextmanager
async def _opened_ledger(place: str, query: UsageQuery) -> AsyncIterator[UsageSource]:
    store = open_ledger(place)

    async def rows() -> AsyncGenerator[list[JsonObject], None]:
        async for page in store.read_rows(query):
            yield [row._asdict() for row in page]

    try:
        yield UsageSource(lambda: describe_usage(store, query), rows)
    finally:
        await store.close()


def _report(
    source: UsageSource, table: TableWriter | None, runner: asyncio.Runner, arguments: argparse.Namespace
) -> None:
    if arguments.requests:
        assert table is not None
        pages = source.rows()

        async def next_page() -> list[JsonObject] | None:
            return await anext(pages, None)

        table.write(LedgerRow.__annotations__, iter(lambda: runner.run(next_page()), None))
        return
    usage = runner.run(source.sums())
    if arguments.json:
        sys.stdout.write(f"{orjson.dumps(usage).decode()}\n")
    elif table is None:
        _print_bars(usage)
    else:
        groups = [*usage["group_by"], *(["key_name"] if "key" in usage["group_by"] else [])]
        kinds: dict[str, Any] = dict.fromkeys(groups, str) | dict.fromkeys(usage["total"], int) | {"price": float}
        table.write(kinds, iter([usage["data"]]))


def _print_bars(usage: dict[str, Any]) -> None:
    """Print a line for each group, with a bar for its share of the largest one's tokens."""
    groups = usage["group_by"]
    table = Table(*groups, *_COUNTS, "", box=None, pad_edge=False)
    for column in table.columns[len(groups) : -1]:
        column.justify = "right"
    most = max((_tokens(each) for each in usage["data"]), default=0)
    for each in usage["data"]:
        names = (each.get("key_name") or each[name] if name == "key" else each[name] for name in groups)
        bar = "█" * round(_BAR_CHARS * _tokens(each) / most) if most else ""
        table.add_row(*(strip_control(name) or "-" for name in names), *_numbers(each), bar)
    if groups:
        table.add_row(*("total", *[""] * (len(groups) - 1)), *_numbers(usage["total"]), "")
    shown = table if usage["data"] else f"no requests from {usage['start']} to {usage['end']}"
    Console(width=None if sys.stdout.isatty() else 240, highlight=False).print(shown, markup=False)


def _numbers(counts: dict[str, Any]) -> Iterable[str]:
    return (f"{counts[name]:,.6g}" if name == "price" else f"{counts[name]:,}" for name in _COUNTS)


def _tokens(counts: dict[str, Any]) -> int:
    tokens: int = counts["prompt_tokens"] + counts["generated_tokens"]
    return tokens


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="sluice usage", usage="sluice usage [OPTIONS]", description=_OVERVIEW, epilog=_EPILOG)
    parser.add_argument("--by", default="day", metavar="GROUPS", help=f"any of {','.join(GROUPINGS)}. Default: day")
    parser.add_argument("--start", default="", metavar="DAY", help=f"first day. Default: {DEFAULT_DAYS} days in all")
    parser.add_argument("--end", default="", metavar="DAY", help="last day, which is included. Default: today")
    parser.add_argument("--requests", action="store_true", help="a row for each request, as JSON lines by default")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--json", action="store_true", help="write JSON to standard output")
    kinds.add_argument("--csv", action="store_true", help="write CSV to standard output")
    kinds.add_argument("--parquet", metavar="FILE", help="write a Parquet file. Needs sluice[parquet]")
    add_options(parser, (LedgerOptions, BatchOptions), only=_LEDGER_FLAGS)
    add_options(parser, (RagClientOptions,), only=_SERVER_FLAGS)
    return parser
