"""`sluice rag delete`."""

import sys

from cli.rag.arguments import Arguments
from cli.rag.client import RagClient
from cli.rag.failures import Refused
from cli.rag.terminal import harmless
from gateway.options.option import FAILED, USAGE_ERROR

_NOT_FOUND = 404


async def delete(client: RagClient, arguments: Arguments) -> int:
    """Delete what is named, and return the exit code."""
    own = arguments.of_command
    if own["all"] == bool(own["ids"]):
        return _fail("name documents, or give --all for the whole collection", USAGE_ERROR)
    if not own["all"]:
        return await _delete_documents(client, own["collection"], own["ids"])
    if not own["yes"]:
        if not sys.stdin.isatty():
            return _fail("there is no terminal to ask; --yes deletes without", USAGE_ERROR)
        if not _is_confirmed(own["collection"]):
            return _fail("nothing was deleted", FAILED)
    await client.delete_collection(own["collection"])
    sys.stdout.write(f"collection {own['collection']} deleted\n")
    return 0


async def _delete_documents(client: RagClient, collection: str, ids: list[str]) -> int:
    code = 0
    for document_id in ids:
        try:
            await client.delete_document(collection, document_id)
        except Refused as refused:
            if refused.status != _NOT_FOUND:
                raise
            code = _fail(str(refused), FAILED)
        else:
            sys.stdout.write(f"{harmless(document_id)} deleted\n")
    return code


def _is_confirmed(collection: str) -> bool:
    sys.stdout.write(f"delete the collection {collection} with all that it holds? [y/N] ")
    sys.stdout.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"sluice rag delete: error: {message}\n")
    return code
