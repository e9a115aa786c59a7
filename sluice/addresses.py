"""Addresses of sockets, as they are written."""


def host_and_port(host: str, port: int | str | None) -> str:
    """Return `host:port`, an address of IPv6 in brackets: `[::1]:8001`."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
