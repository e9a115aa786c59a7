"""The URL of a fleet whose engines register themselves in a Redis: redis://HOST:PORT/DB#NAME."""

import re
from typing import NamedTuple, Self
from urllib.parse import urldefrag, urlsplit

from sluice.addresses import host_and_port
from sluice.errors import invalid
from sluice.state.interface import REDIS_SCHEMES

_DEFAULT_NAME = "default"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


class FleetUrl(NamedTuple):
    """A Redis, and a fleet in it. The URL of the Redis may have a password."""

    redis: str
    name: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a URL; one without #NAME means the fleet `default`. Raises INVALID, which does not repeat the URL."""
        expected = "redis://HOST:PORT/DB#FLEET, where FLEET has letters, digits, dots, hyphens and underscores"
        try:
            url, name = urldefrag(text)
            parts = urlsplit(url)
            is_url = url.startswith(REDIS_SCHEMES) and bool(parts.hostname) and parts.port != 0
        except ValueError:
            raise invalid("engines", f"a fleet in a Redis is named by {expected}") from None
        if not is_url or not url.isprintable() or _NAME.fullmatch(name or _DEFAULT_NAME) is None:
            raise invalid("engines", f"a fleet in a Redis is named by {expected}")
        return cls(url, name or _DEFAULT_NAME)

    @property
    def place(self) -> str:
        """Name the fleet for logs, without a password."""
        parts = urlsplit(self.redis)
        return f"{host_and_port(parts.hostname or '', parts.port or 6379)}#{self.name}"
