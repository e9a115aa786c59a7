"""Addresses of sockets as they are written, and which of them are this machine's."""

from contextlib import suppress
from ipaddress import ip_address
from urllib.parse import urlsplit


def host_and_port(host: str, port: int | str | None) -> str:
    """Return `host:port`, an address of IPv6 in brackets: `[::1]:8001`."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def is_loopback(url: str) -> bool:
    """Whether `url`, or HOST:PORT, is an address of this machine, which no proxy may answer: its own is another one."""
    host = urlsplit(url if "://" in url else f"//{url}").hostname or ""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    with suppress(ValueError):
        return ip_address(host).is_loopback or ip_address(host).is_unspecified
    return False
