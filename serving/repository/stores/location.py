"""The location of a remote repository, as an operator writes it and as fsspec opens it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_URL = re.compile(r"(?P<protocol>[A-Za-z][A-Za-z0-9+.-]*)://(?P<rest>.*)", re.DOTALL)
_S3_ENDPOINT = re.compile(r"(?:(?P<scheme>https?)://(?P<host>[^/]+)|(?P<address>[^/:]+:[0-9]+))/(?P<path>.+)")
_S3 = ("s3", "s3a")
_LOCAL = ("file", "local")


@dataclass(frozen=True, slots=True)
class StoreLocation:
    """A location: `text` as it was given, `url` and `options` for fsspec."""

    text: str
    protocol: str
    url: str
    options: Mapping[str, Any] = field(default_factory=dict)


def store_location(text: str) -> StoreLocation | None:
    """Return the location of the remote store that `text` names; None for a local path."""
    found = _URL.fullmatch(text)
    if found is None or found["protocol"].lower() in _LOCAL:
        return None
    protocol, rest = found["protocol"].lower(), found["rest"]
    if protocol in _S3:
        return _s3(text, protocol, rest)
    if protocol == "as":  # Triton's spelling of Azure: as://ACCOUNT/CONTAINER/PATH
        account, _, path = rest.partition("/")
        return StoreLocation(text, "abfs", f"abfs://{path}", {"account_name": account})
    return StoreLocation(text, protocol, text)


def local_path(text: str) -> str:
    """Return the path in a local repository's `text`, which may begin with file://."""
    found = _URL.fullmatch(text)
    return found["rest"] if found is not None else text


def _s3(text: str, protocol: str, rest: str) -> StoreLocation:
    """Parse s3://BUCKET/PATH, or Triton's form for other servers: s3://[https://]HOST:PORT/BUCKET/PATH."""
    # s3fs tries again by itself; both together take minutes to find that nobody answers.
    options: dict[str, Any] = {"config_kwargs": {"retries": {"total_max_attempts": 1}}}
    endpoint = _S3_ENDPOINT.fullmatch(rest)
    if endpoint is None:
        return StoreLocation(text, protocol, text, options)
    options["endpoint_url"] = f"{endpoint['scheme'] or 'http'}://{endpoint['host'] or endpoint['address']}"
    return StoreLocation(text, protocol, f"s3://{endpoint['path']}", options)
