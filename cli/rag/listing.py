"""`sluice rag list`."""

import json
import sys
from collections.abc import Callable
from typing import Any

from cli.rag.arguments import Arguments
from cli.rag.client import RagClient
from cli.rag.terminal import harmless


async def listed(client: RagClient, arguments: Arguments) -> int:
    """Print the collections, or the documents of one."""
    collection, as_json = arguments.of_command["collection"], arguments.of_command["json"]
    if collection is None:
        for info in await client.collections():
            _print(info, as_json, _collection_line)
        return 0
    async for info in client.documents(collection):
        _print(info, as_json, _document_line)
    return 0


def _print(info: Any, as_json: bool, line: Callable[[Any], str]) -> None:
    sys.stdout.write((json.dumps(info, ensure_ascii=False) if as_json else harmless(line(info))) + "\n")


def _collection_line(info: Any) -> str:
    lock = ", has an owner" if info["is_protected"] else ""
    counts = f"{info['num_documents']} documents, {info['num_chunks']} chunks"
    return f"{info['name']}: {counts} (encoder {info['encoder']}, {info['dim']} dimensions{lock})"


def _document_line(info: Any) -> str:
    title = f"  {info['title']}" if info["title"] != info["id"] else ""
    return f"{info['id']}  {info['format']}, {info['num_chunks']} chunks{title}"
