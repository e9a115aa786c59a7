"""Who shares computed prompts: the salt of the language model's prefix cache."""

import hashlib

from pipelines.rag import owner_keys
from serving.request import Parameters

PARAMETER = "cache_salt"


def derived_salt(tenant: str, collection_key: str) -> str:
    """The same for the same two, and telling neither; "" where both are empty, for what all share.

    Else one tenant could learn from how fast an answer comes which documents another one's prompts held.
    """
    if not tenant and not collection_key:
        return ""
    digest = hashlib.sha256(b"sluice cache salt\0")
    for part in (tenant, collection_key):
        digest.update(hashlib.sha256(part.encode()).digest())
    return digest.hexdigest()


def salt_of(tenant: str, parameters: Parameters) -> str:
    """The one that the request names, else the derived one. The parameters' types are checked."""
    given = parameters.get(PARAMETER, "")
    return str(given) or derived_salt(tenant, str(parameters.get(owner_keys.PARAMETER, "")))
