"""Categories of requests that need a header of their own: `--http-restricted-api` and `--grpc-restricted-protocol`."""

import hmac
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum


class ApiCategory(StrEnum):
    """A part of the protocols, under Triton's name. OpenAI's routes belong to the parts that do the same."""

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
    """Requests of `categories` must have the header `key`, in lower case, with exactly `value`."""

    categories: frozenset[ApiCategory]
    key: str
    value: str = field(repr=False)

    def admits(self, sent: bytes | None) -> bool:
        """Whether `sent`, the header's value, is the right one. Takes as long for a wrong one as for the right one."""
        return sent is not None and hmac.compare_digest(sent, self.value.encode())


class Restrictions:
    """All restrictions of one protocol, by category."""

    def __init__(self, restrictions: Iterable[Restriction] = ()) -> None:
        self._by_category = {category: each for each in restrictions for category in each.categories}

    def __bool__(self) -> bool:
        return bool(self._by_category)

    def find(self, category: ApiCategory | None) -> Restriction | None:
        """Return the restriction on requests of `category`; None where there is none."""
        return self._by_category.get(category) if category is not None else None


def parse_restriction(text: str) -> Restriction:
    """Parse API,API:KEY=VALUE. Raises ValueError, which says what is allowed."""
    names, colon, pair = text.partition(":")
    key, equals, value = pair.partition("=")
    categories = [name.strip() for name in names.split(",")]
    is_named = all(name in set(ApiCategory) for name in categories) and len(set(categories)) == len(categories)
    if not (colon and equals and is_named and key.strip() and value.strip()):
        raise ValueError(f"API,API:KEY=VALUE, where APIs are of {', '.join(ApiCategory)}")
    return Restriction(frozenset(map(ApiCategory, categories)), key.strip().lower(), value.strip())


def find_repeated_category(restrictions: Iterable[Restriction]) -> ApiCategory | None:
    """Return a category that two restrictions name, so that no request could fulfil both; None without one."""
    seen: set[ApiCategory] = set()
    for each in restrictions:
        if seen & each.categories:
            return min(seen & each.categories)
        seen |= each.categories
    return None
