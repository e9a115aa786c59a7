"""Owner keys of collections: who may read and change one that has any."""

import hashlib
import hmac

from pipelines.rag.types import CollectionSpec
from sluice.errors import ErrorCode, SluiceError

HEADER = "x-sluice-collection-key"
"""The HTTP header that carries a key. As a request parameter it is called `collection_key`."""
PARAMETER = "collection_key"


MAX_CHARS = 256


def check_new(key: str) -> None:
    """Raises SluiceError INVALID for a key that not every protocol could carry: its owner would be locked out there."""
    if len(key) > MAX_CHARS or not key.isascii() or not key.isprintable():
        message = f"an owner key must be at most {MAX_CHARS} printable ASCII characters ({HEADER})"
        raise SluiceError(ErrorCode.INVALID, message, param=PARAMETER)


def hash_of(key: str) -> str:
    """What a store keeps of a key. Keys are made by machines and long, so one round is enough."""
    return hashlib.sha256(b"sluice collection key\0" + key.encode()).hexdigest()


def opens(spec: CollectionSpec, key: str) -> bool:
    """Whether `key`, "" for none, opens the collection. Takes as long for a wrong one as for the right one."""
    if not spec.key_hashes:
        return True
    given = hash_of(key)
    return bool(sum(hmac.compare_digest(given, each) for each in spec.key_hashes))


def check(spec: CollectionSpec, key: str) -> None:
    """Raises SluiceError FORBIDDEN, which never repeats the key."""
    if opens(spec, key):
        return
    fault = f"the {HEADER} given is not one of its keys" if key else f"send its key in the header {HEADER}"
    message = f"collection '{spec.name}' has an owner: {fault} (request parameter {PARAMETER} in the v2 protocol)"
    raise SluiceError(ErrorCode.FORBIDDEN, message, param="collection")
