"""`--http-restricted-api` and `--grpc-restricted-protocol`: parts of a protocol that ask for a header."""

import hmac
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum


class Api(StrEnum):
    """A part of the protocols, under Triton's names. OpenAI's routes belong to the parts that do the same."""

    HEALTH = "health"
    METADATA = "metadata"
    INFERENCE = "inference"
    SHARED_MEMORY = "shared-memory"
    MODEL_CONFIG = "model-config"
    MODEL_REPOSITORY = "model-repository"
    STATISTICS = "statistics"
    TRACE = "trace"
    LOGGING = "logging"


@dataclass(frozen=True, slots=True)
class Restriction:
    """Requests to `apis` must have the header `key`, in lower case, with exactly `value`."""

    apis: frozenset[Api]
    key: str
    value: str = field(repr=False)

    def admits(self, given: str | None) -> bool:
        """Whether `given`, the header's value, is the right one. Takes as long for a wrong one as for the right one."""
        return given is not None and hmac.compare_digest(given.encode("utf-8", "replace"), self.value.encode())


class Restrictions:
    """All of a protocol, by part."""

    def __init__(self, given: Iterable[Restriction] = ()) -> None:
        self._by_api = {api: each for each in given for api in each.apis}

    def __bool__(self) -> bool:
        return bool(self._by_api)

    def of(self, api: Api | None) -> Restriction | None:
        """What requests to that part must fulfil; None for nothing."""
        return self._by_api.get(api) if api is not None else None


def restriction(text: str) -> Restriction:
    """API,API:KEY=VALUE. Raises ValueError, which says what is allowed."""
    names, colon, pair = text.partition(":")
    key, equals, value = pair.partition("=")
    apis = [name.strip() for name in names.split(",")]
    is_named = all(name in set(Api) for name in apis) and len(set(apis)) == len(apis)
    if not (colon and equals and is_named and key.strip() and value.strip()):
        raise ValueError(f"API,API:KEY=VALUE, where APIs are of {', '.join(Api)}")
    return Restriction(frozenset(map(Api, apis)), key.strip().lower(), value.strip())


def repeated_api(given: Iterable[Restriction]) -> Api | None:
    """A part that two of them restrict, which nobody could fulfil; None where there is none."""
    seen: set[Api] = set()
    for each in given:
        if seen & each.apis:
            return min(seen & each.apis)
        seen |= each.apis
    return None
