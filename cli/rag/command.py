"""The command `sluice rag`: puts documents into a running server's collections and asks questions of them."""

import asyncio
import sys
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from sluice.cli.rag.arguments import Arguments, parse_arguments
from sluice.gateway.options.config import read_client_options
from sluice.gateway.options.option import FAILED, USAGE_ERROR, OptionError

if TYPE_CHECKING:
    from sluice.cli.rag.client import RagClient


def command(argv: list[str]) -> int:
    """Put documents into a running server's collections, and ask questions of them."""
    arguments = parse_arguments(argv)
    prefix = f"sluice rag {arguments.command}: error: "
    try:
        options = read_client_options(arguments.server)
    except OptionError as error:
        sys.stderr.write(f"{prefix}{error}\n")
        return USAGE_ERROR
    # Imported late: bad options should be reported fast.
    from sluice.cli.rag.client import RagClient, RagError
    from sluice.cli.rag.local_documents import FilesError

    async def run() -> int:
        async with RagClient(options) as client:
            return await _find_command(arguments.command)(client, arguments)

    try:
        return asyncio.run(run())
    except FilesError as error:
        sys.stderr.write(f"{prefix}{error}\n")
        return USAGE_ERROR
    except RagError as error:
        sys.stderr.write(f"{prefix}{error}\n")
        return FAILED


def _find_command(name: str) -> Callable[["RagClient", Arguments], Coroutine[Any, Any, int]]:
    """Return the function that runs a command and returns its exit code. Imports only what that command needs."""
    match name:
        case "ingest":
            from sluice.cli.rag.ingest import ingest

            return ingest
        case "query":
            from sluice.cli.rag.query import query

            return query
        case "search":
            from sluice.cli.rag.query import search

            return search
        case "list":
            from sluice.cli.rag.collections import list_contents

            return list_contents
        case "delete":
            from sluice.cli.rag.collections import delete_contents

            return delete_contents
    raise AssertionError(f"the command line took {name}")
