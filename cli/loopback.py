"""URLs of this machine, which no proxy may answer: a proxy's loopback is another machine."""

from ipaddress import ip_address
from urllib.parse import urlsplit

DIRECT_GRPC = (("grpc.enable_http_proxy", 0),)
"""Options of a gRPC channel that uses no proxy, whatever http_proxy says."""


def is_loopback(url: str) -> bool:
    """Whether `url`, or HOST:PORT, is an address of this machine. httpx's `trust_env` and gRPC's proxy ask it."""
    host = urlsplit(url if "://" in url else f"//{url}").hostname or ""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified
