"""`sluice rag ingest`."""

import asyncio
import sys

from rich.console import Console

from cli.rag.arguments import Arguments
from cli.rag.client import RagClient
from cli.rag.failures import RagError
from cli.rag.files import Selection, find_files
from cli.rag.ingestion import Ingestion, Options
from cli.rag.progress import shown
from cli.rag.retries import RetryPolicy
from cli.rag.tally import Tally
from cli.rag.terminal import harmless
from gateway.options.option import FAILED


async def ingest(client: RagClient, arguments: Arguments) -> int:
    """Send what is new, say what was done, and return the exit code."""
    own = arguments.of_command
    options = Options(
        own["collection"], Selection(own["include"]), own["jobs"], own["prune"], own["force"], own["dry_run"]
    )
    found = await asyncio.to_thread(find_files, own["paths"], options.selection)
    if not found:
        sys.stderr.write("sluice rag ingest: no documents found; --include takes files of other types\n")
    ingestion = Ingestion(client, options, RetryPolicy())
    try:
        async with shown(ingestion.tally, Console(stderr=True, soft_wrap=True)):
            await ingestion.run(found)
    except (RagError, asyncio.CancelledError):
        _report(ingestion.tally, options)
        sys.stderr.write("sluice rag ingest: stopped; the same command goes on from here\n")
        raise
    _report(ingestion.tally, options)
    return FAILED if ingestion.tally.failures else 0


def _report(tally: Tally, options: Options) -> None:
    for name, reason in tally.failures:
        sys.stderr.write(f"failed: {harmless(name)}: {harmless(reason)}\n")
    dry = " (dry run: nothing was changed)" if options.is_dry else ""
    sys.stdout.write(f"{options.collection}: {tally.summary()}{dry}\n")
