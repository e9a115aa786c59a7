"""Owner keys of collections: a collection that has any can be read and changed only with one of them."""

import hashlib
import hmac

from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.rag.types import CollectionSpec
from sluice.pipelines.text.types import OWNER_KEY, OWNER_KEY_HEADER

MAX_CHARS = 256


def check_new_key(key: str) -> None:
    """Check a new owner key. Raises SluiceError INVALID for one that some protocol could not carry."""
    if len(key) > MAX_CHARS or not key.isascii() or not key.isprintable():
        message = f"an owner key must be at most {MAX_CHARS} printable ASCII characters ({OWNER_KEY_HEADER})"
        raise SluiceError(ErrorCode.INVALID, message, param=OWNER_KEY)


def hash_key(key: str) -> str:
    """Return the hash that stores keep instead of the key. Keys are long and random: one round of SHA-256 is enough."""
    return hashlib.sha256(b"sluice collection key\0" + key.encode()).hexdigest()


def grants_access(spec: CollectionSpec, key: str) -> bool:
    """Whether `key`, "" for none, grants access to the collection. Takes constant time."""
    if not spec.key_hashes:
        return True
    given = hash_key(key)
    return bool(sum(hmac.compare_digest(given, each) for each in spec.key_hashes))


def check_access(spec: CollectionSpec, key: str) -> None:
    """Check that `key` grants access to the collection. Raises SluiceError FORBIDDEN, which never repeats the key."""
    if grants_access(spec, key):
        return
    fault = (
        f"the {OWNER_KEY_HEADER} given is not one of its keys"
        if key
        else f"send its key in the header {OWNER_KEY_HEADER}"
    )
    message = f"collection '{spec.name}' has an owner: {fault} (request parameter {OWNER_KEY} in the v2 protocol)"
    raise SluiceError(ErrorCode.FORBIDDEN, message, param="collection")
