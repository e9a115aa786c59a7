"""`sluice rag query` and `sluice rag search`."""

import json
import sys
from collections.abc import Sequence

from sluice.cli.rag.arguments import DEFAULT_COLLECTION, Arguments
from sluice.cli.rag.client import RagClient, RagError
from sluice.cli.server import DONE, JsonObject
from sluice.cli.terminal import format_passages, format_sources, strip_control
from sluice.gateway.bundled import DOCUMENTATION_COLLECTION

_SEARCH_FIELDS = ("question", "top_k", "mode", "filter")
_QUERY_FIELDS = (*_SEARCH_FIELDS, "model", "max_tokens", "temperature")


async def query(client: RagClient, arguments: Arguments) -> int:
    """Print the answer, then its sources."""
    own = arguments.of_command
    collection, fields = await _choose_collection(client, own), _fields(own, _QUERY_FIELDS)
    if own["json"]:
        _print_json(await client.query(collection, fields))
    elif own["no_stream"]:
        answer = await client.query(collection, fields)
        _print(f"{answer['answer']}\n")
        _print_sources(answer)
    else:
        await _print_stream(client, collection, fields)
    return 0


async def search(client: RagClient, arguments: Arguments) -> int:
    """Print the passages that were found."""
    own = arguments.of_command
    found = await client.search(await _choose_collection(client, own), _fields(own, _SEARCH_FIELDS))
    if own["json"]:
        _print_json(found)
    else:
        sys.stdout.writelines(f"{line}\n" for line in format_passages(found["data"]))
    return 0


async def _choose_collection(client: RagClient, own: JsonObject) -> str:
    """Return the named collection, else the default one, or Sluice's documentation while that does not exist."""
    named: str | None = own["collection"]
    if named is not None:
        return named
    names = {each["name"] for each in await client.collections()}
    if DEFAULT_COLLECTION in names or DOCUMENTATION_COLLECTION not in names:
        return DEFAULT_COLLECTION
    sys.stderr.write("Asking Sluice's own documentation. For yours: sluice rag ingest PATH\n")
    return DOCUMENTATION_COLLECTION


async def _print_stream(client: RagClient, collection: str, fields: JsonObject) -> None:
    """Print the answer as it arrives. Raises RagError if it ends early."""
    retrieved: JsonObject = {"sources": []}
    is_complete = False
    async with client.query_events(collection, fields) as events:
        async for name, payload in events:
            if name == "sources":
                retrieved = payload
            elif name == "token":
                _print(payload["text"])
            elif name == "error":
                _print("\n")
                raise RagError(payload["error"]["message"])
            is_complete = name == DONE
    _print("\n")
    if not is_complete:
        raise RagError("the answer broke off: the server ended it without saying why")
    _print_sources(retrieved)


def _fields(own: JsonObject, names: Sequence[str]) -> JsonObject:
    return {name: own[name] for name in names if own[name] is not None}


def _print(text: str) -> None:
    sys.stdout.write(strip_control(text))
    sys.stdout.flush()


def _print_sources(retrieved: JsonObject) -> None:
    if "encoding" in retrieved:
        counts = "{num_encoded} of {num_chunks} chunks so far".format_map(retrieved["encoding"])
        sys.stderr.write(f"The collection's documents are being encoded: {counts}\n")
    lines = list(format_sources(retrieved["sources"])) or ["none: nothing in the collection fits the question"]
    sys.stdout.writelines(["\nSources:\n", *(f"{line}\n" for line in lines)])


def _print_json(payload: JsonObject) -> None:
    sys.stdout.write(json.dumps(payload, ensure_ascii=False, indent=2) + "\n")
