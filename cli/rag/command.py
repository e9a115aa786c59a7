"""The command `sluice rag`: puts documents into a running server's collections and asks questions of them."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from sluice.cli.errors import reports_errors
from sluice.cli.rag.arguments import Arguments, parse_arguments
from sluice.gateway.options.config import read_client_options

if TYPE_CHECKING:
    from sluice.cli.rag.client import RagClient


def command(argv: list[str]) -> int:
    """Put documents into a running server's collections, and ask questions of them."""
    arguments = parse_arguments(argv)
    return reports_errors(f"sluice rag {arguments.command}")(_run)(arguments)


def _run(arguments: Arguments) -> int:
    options = read_client_options(arguments.server)
    from sluice.cli.rag.client import RagClient  # imported late: bad options should be reported fast

    async def run() -> int:
        async with RagClient(options) as client:
            return await _find_command(arguments.command)(client, arguments)

    return asyncio.run(run())


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
