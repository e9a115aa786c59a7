"""The command `sluice usage`: reads a ledger, or asks a server, and shows bars or writes a table."""

import argparse
import asyncio
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import orjson
from rich.console import Console
from rich.table import Table

from sluice.cli.loopback import is_loopback
from sluice.cli.terminal import strip_control
from sluice.cli.usage.tables import CsvTable, JsonLinesTable, ParquetTable, TableError, TableWriter
from sluice.errors import SluiceError
from sluice.gateway.options.batches import BatchOptions
from sluice.gateway.options.config import list_options, read_client_options, read_config
from sluice.gateway.options.ledger import LedgerOptions
from sluice.gateway.options.option import FAILED, USAGE_ERROR, OneLineParser, OptionError
from sluice.gateway.options.rag import RagClientOptions
from sluice.gateway.tenancy.ledger.opening import is_postgres, open_ledger
from sluice.gateway.tenancy.ledger.rows import LedgerRow
from sluice.gateway.tenancy.ledger.store import GROUPINGS, PAGE_ROWS, LedgerStore, UsageQuery
from sluice.gateway.tenancy.ledger.usage import DEFAULT_DAYS, describe_usage, parse_query

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
_TIMEOUT_S = 30.0
_BAR_CHARS = 30
_MAX_GROUPS = 1_000_000
"""Groups of a ledger's file. A server returns fewer."""
_COUNTS = ("requests", "failed", "prompt_tokens", "cached_tokens", "generated_tokens", "price")


def command(argv: list[str]) -> int:
    """Show and export what keys, tenants and models used."""
    arguments = _parser().parse_args(argv)
    try:
        query = parse_query(arguments.start, arguments.end, [arguments.by])._replace(most=_MAX_GROUPS)
        with _open_table(arguments) as table:
            if arguments.requests:
                _write_requests(arguments, query, table)
            else:
                _show(_read_usage(arguments, query), table, is_json=arguments.json)
    except OptionError as error:
        return _fail(str(error), USAGE_ERROR)
    except SluiceError as error:
        return _fail(error.message, USAGE_ERROR if error.param in ("start", "end", "group_by", "ledger") else FAILED)
    except (TableError, httpx.HTTPError, OSError) as error:
        return _fail(str(error), FAILED)
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


def _read_usage(arguments: argparse.Namespace, query: UsageQuery) -> dict[str, Any]:
    flags = _server_flags(arguments)
    if "--url" in flags:
        with _asked(read_client_options(flags), "/v1/usage", query, group_by=",".join(query.group_by)) as answer:
            found: dict[str, Any] = orjson.loads(answer.read())
            return found
    with _opened_ledger(arguments) as (runner, store):
        return runner.run(describe_usage(store, query))


def _server_flags(arguments: argparse.Namespace) -> dict[str, str]:
    return {flag: getattr(arguments, flag) for flag in _SERVER_FLAGS if getattr(arguments, flag)}


@contextmanager
def _asked(options: RagClientOptions, path: str, query: UsageQuery, **params: str) -> Iterator[httpx.Response]:
    """Ask a server, and read its answer within. Raises TableError in the server's words."""
    headers = {} if options.api_key is None else {"authorization": f"Bearer {options.api_key}"}
    params |= {"start": str(query.first), "end": str(query.last)}
    settings: dict[str, Any] = {"timeout": _TIMEOUT_S, "trust_env": not is_loopback(options.url)}
    with httpx.stream("GET", f"{options.url}{path}", params=params, headers=headers, **settings) as answer:
        if answer.is_success:
            yield answer
            return
        try:
            message = orjson.loads(answer.read())["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = f"{options.url} is no server of Sluice: it answered with status {answer.status_code}"
    raise TableError(message)


def _read_pages(answer: httpx.Response) -> Iterator[list[dict[str, Any]]]:
    lines = answer.iter_lines()
    while page := [orjson.loads(line) for line in islice(lines, PAGE_ROWS)]:
        yield page


@contextmanager
def _opened_ledger(arguments: argparse.Namespace) -> Iterator[tuple[asyncio.Runner, LedgerStore]]:
    """Open the ledger that is there. Raises OptionError where there is none."""
    config = read_config({flag: getattr(arguments, flag) for flag in _LEDGER_FLAGS if getattr(arguments, flag)})
    place = config.ledger.store_place(config.state_folder())
    if place is None:
        raise OptionError("--ledger is none: there is nothing to read")
    if not is_postgres(place) and not Path(place).expanduser().exists():
        raise OptionError(f"there is no ledger {place}; name one with --ledger, or a server with --url")
    with asyncio.Runner() as runner:
        store = open_ledger(place)
        try:
            yield runner, store
        finally:
            runner.run(store.close())


def _write_requests(arguments: argparse.Namespace, query: UsageQuery, table: TableWriter | None) -> None:
    """Write the rows of the days, page by page."""
    assert table is not None
    flags = _server_flags(arguments)
    if "--url" in flags:
        with _asked(read_client_options(flags), "/v1/usage/requests", query) as answer:
            table.write(LedgerRow.__annotations__, _read_pages(answer))
        return
    with _opened_ledger(arguments) as (runner, store):
        pages = store.read_rows(query).__aiter__()

        async def next_page() -> list[dict[str, Any]] | None:
            page = await anext(pages, None)
            return None if page is None else [row._asdict() for row in page]

        table.write(LedgerRow.__annotations__, iter(lambda: runner.run(next_page()), None))


def _show(usage: dict[str, Any], table: TableWriter | None, *, is_json: bool) -> None:
    if is_json:
        sys.stdout.write(f"{orjson.dumps(usage).decode()}\n")
        return
    if table is None:
        _print_bars(usage)
        return
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
    for groups, flags, place in (
        ((LedgerOptions, BatchOptions), _LEDGER_FLAGS, "as of sluice serve: "),
        ((RagClientOptions,), _SERVER_FLAGS, ""),
    ):
        for group in groups:
            for _, _, declared in list_options(group):
                if declared.flag in flags:
                    text = f"{place}{declared.help}"
                    parser.add_argument(declared.flag, dest=declared.flag, metavar=declared.metavar, help=text)
    return parser


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"sluice usage: error: {message}\n")
    return code
