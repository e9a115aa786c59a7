"""Keeps Sluice's own documentation in a collection, from which the bundled pipeline answers."""

import asyncio
import logging

from gateway.bundled import DOCUMENTATION_COLLECTION, documentation
from pipelines.rag.library import DocumentLibrary, PutStatus
from pipelines.rag.types import DocumentFormat, Upload
from sluice.errors import SluiceError

log = logging.getLogger(__name__)

_MAX_DOCUMENTS = 1000
"""An upper bound on the number of documents, so that one page lists them all."""


async def ingest_documentation(library: DocumentLibrary) -> None:
    """Update the collection `sluice` to this version's documentation. Unchanged documents are not encoded again.

    A failure, such as a store that is down, is only logged: the server serves without its documentation.
    """
    try:
        num_changed = await _put_all(library)
    except SluiceError as error:
        log.warning("Sluice's documentation is not in collection '%s': %s", DOCUMENTATION_COLLECTION, error.message)
        return
    except Exception:
        log.exception("Sluice's documentation is not in collection '%s'", DOCUMENTATION_COLLECTION)
        return
    if num_changed:
        log.info("collection '%s': %d documents of Sluice's documentation read", DOCUMENTATION_COLLECTION, num_changed)


async def _put_all(library: DocumentLibrary) -> int:
    found = documentation()
    num_changed = 0
    for name, path in found.items():
        content = await asyncio.to_thread(path.read_bytes)
        result = await library.put(DOCUMENTATION_COLLECTION, Upload(name, content, DocumentFormat.MARKDOWN))
        num_changed += result.status is not PutStatus.UNCHANGED
    for info in await library.documents(DOCUMENTATION_COLLECTION, limit=_MAX_DOCUMENTS):
        if info.id not in found:
            await library.delete_document(DOCUMENTATION_COLLECTION, info.id)
    return num_changed
