"""Keeps Sluice's own documentation in a collection, for the bundled pipeline to answer from."""

import asyncio
import logging

from gateway.bundled import DOCUMENTATION_COLLECTION, documentation
from pipelines.rag.library import Library, PutStatus
from pipelines.rag.types import DocumentFormat
from pipelines.rag.upload import Upload
from sluice.errors import SluiceError

log = logging.getLogger(__name__)

_MOST = 1000
"""More documents than it ever has."""


async def read_documentation(library: Library) -> None:
    """Bring the collection `sluice` to what this Sluice's documentation says. What has not changed costs nothing.

    A store that is down is only told of in the log: the server serves all the same.
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


async def _put_all(library: Library) -> int:
    found = documentation()
    num_changed = 0
    for name, path in found.items():
        content = await asyncio.to_thread(path.read_bytes)
        result = await library.put(DOCUMENTATION_COLLECTION, Upload(name, content, DocumentFormat.MARKDOWN))
        num_changed += result.status is not PutStatus.UNCHANGED
    for info in await library.documents(DOCUMENTATION_COLLECTION, limit=_MOST):
        if info.id not in found:
            await library.delete_document(DOCUMENTATION_COLLECTION, info.id)
    return num_changed
