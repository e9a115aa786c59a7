"""`sluice rag`: put documents into a running server, and ask questions of them."""

import asyncio
import sys
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from cli.rag.arguments import Arguments, parse
from gateway.options.config import read_client_options
from gateway.options.option import FAILED, USAGE_ERROR, OptionError

if TYPE_CHECKING:
    from cli.rag.client import RagClient


def command(argv: list[str]) -> int:
    """Put documents into a running server's collections, and ask questions of them."""
    arguments = parse(argv)
    prefix = f"sluice rag {arguments.command}: error: "
    try:
        options = read_client_options(arguments.server)
    except OptionError as error:
        sys.stderr.write(f"{prefix}{error}\n")
        return USAGE_ERROR
    # What they import is wanted only once the options are right.
    from cli.rag.client import RagClient
    from cli.rag.failures import FilesError, RagError

    async def run() -> int:
        async with RagClient(options) as client:
            return await _work(arguments.command)(client, arguments)

    try:
        return asyncio.run(run())
    except FilesError as error:
        sys.stderr.write(f"{prefix}{error}\n")
        return USAGE_ERROR
    except RagError as error:
        sys.stderr.write(f"{prefix}{error}\n")
        return FAILED


def _work(name: str) -> Callable[["RagClient", Arguments], Coroutine[Any, Any, int]]:
    """What does a command's work and returns its exit code."""
    match name:
        case "ingest":
            from cli.rag.ingest import ingest

            return ingest
        case "query":
            from cli.rag.asking import query

            return query
        case "search":
            from cli.rag.asking import search

            return search
        case "list":
            from cli.rag.listing import listed

            return listed
        case "delete":
            from cli.rag.delete import delete

            return delete
    raise AssertionError(f"the command line took {name}")
