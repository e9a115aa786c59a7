"""`sluice rag list` and `sluice rag delete`: collections and the documents in them."""

import json
import sys
from collections.abc import Callable
from typing import Any

from sluice.cli.errors import CommandError
from sluice.cli.rag.arguments import Arguments
from sluice.cli.rag.client import RagClient, RejectedRequestError
from sluice.cli.terminal import confirm, strip_control
from sluice.gateway.options.option import FAILED, USAGE_ERROR

_NOT_FOUND = 404


async def list_contents(client: RagClient, arguments: Arguments) -> int:
    """Print the collections, or the documents of one."""
    collection, as_json = arguments.of_command["collection"], arguments.of_command["json"]
    if collection is None:
        for info in await client.collections():
            _print(info, as_json, _collection_line)
        return 0
    async for info in client.documents(collection):
        _print(info, as_json, _document_line)
    return 0


def _print(info: Any, as_json: bool, format_line: Callable[[Any], str]) -> None:
    sys.stdout.write((json.dumps(info, ensure_ascii=False) if as_json else strip_control(format_line(info))) + "\n")


def _collection_line(info: Any) -> str:
    lock = ", has an owner" if info["is_protected"] else ""
    counts = f"{info['num_documents']} documents, {info['num_chunks']} chunks"
    return f"{info['name']}: {counts} (encoder {info['encoder']}, {info['dim']} dimensions{lock})"


def _document_line(info: Any) -> str:
    title = f"  {info['title']}" if info["title"] != info["id"] else ""
    return f"{info['id']}  {info['format']}, {info['num_chunks']} chunks{title}"


async def delete_contents(client: RagClient, arguments: Arguments) -> int:
    """Delete documents or a whole collection, and return the exit code."""
    own = arguments.of_command
    if own["all"] == bool(own["ids"]):
        raise CommandError("name documents, or give --all for the whole collection", USAGE_ERROR)
    if not own["all"]:
        return await _delete_documents(client, own["collection"], own["ids"])
    if not own["yes"]:
        question = f"delete the collection {own['collection']} with all that it holds?"
        confirm(question, "--yes deletes without", "nothing was deleted")
    await client.delete_collection(own["collection"])
    sys.stdout.write(f"collection {own['collection']} deleted\n")
    return 0


async def _delete_documents(client: RagClient, collection: str, ids: list[str]) -> int:
    code = 0
    for document_id in ids:
        try:
            await client.delete_document(collection, document_id)
        except RejectedRequestError as error:
            if error.status != _NOT_FOUND:
                raise
            sys.stderr.write(f"sluice rag delete: error: {error}\n")
            code = FAILED
        else:
            sys.stdout.write(f"{strip_control(document_id)} deleted\n")
    return code
