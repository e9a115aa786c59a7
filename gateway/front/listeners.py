"""The sockets of the server. They are bound before anything slow begins, so that a taken port is reported at once."""

import errno
import itertools
import select
import shutil
import socket
from asyncio import BaseTransport
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

from sluice.addresses import host_and_port
from sluice.run_folder import make_socket_folder

_BACKLOG = 2048
UNREAD_LOOK_S = 0.02
"""When to look again at a connection that shall close but has something to read."""


class ListenError(OSError):
    """The server cannot listen on an address. The text is one line for the operator."""


class Listeners(NamedTuple):
    """The sockets of HTTP, one for each worker, and of metrics; None without metrics. gRPC binds its own."""

    http: tuple[socket.socket, ...]
    metrics: socket.socket | None

    def close(self) -> None:
        """Close all of them."""
        for each in (*self.http, self.metrics):
            if each is not None:
                each.close()


def listen(host: str, port: int, flag: str, *, shares_port: bool = False, host_flag: str = "--host") -> socket.socket:
    """Return a listening TCP socket; `flag` is the option that set `port`. Raises ListenError.

    With `shares_port` other processes may listen on it too, if they do the same; each takes some of the connections.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ListenError(f"{host_flag} {host!r} is no address of this machine: {error.strerror}") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shares_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ListenError(_explain(error, host, port, flag)) from None
    listener.setblocking(False)
    return listener


def listen_together(
    host: str, port: int, flag: str, number: int, *, shares_port: bool = False
) -> tuple[socket.socket, ...]:
    """Return so many sockets that listen on one port, each of which gets some of the connections. Raises ListenError.

    Each may be served by another process, one after the other: what waits to be accepted stays as long as this process
    has it open.
    """
    first = listen(host, port, flag, shares_port=shares_port)
    if number == 1:
        return (first,)
    port = first.getsockname()[1]
    if not shares_port:
        first.close()  # alone it has shown that nobody else listens there
    else:
        number -= 1
    more = tuple(listen(host, port, flag, shares_port=True) for _ in range(number))
    return (first, *more) if shares_port else more


def _explain(error: OSError, host: str, port: int, flag: str) -> str:
    match error:
        case PermissionError():
            return f"port {port} may not be used without privileges; choose one above 1023 with {flag}"
        case OSError(errno=errno.EADDRINUSE):
            return f"port {port} on {host} is taken; choose another with {flag} (0 takes a free one)"
        case _:
            return f"cannot listen on {host} port {port}: {error.strerror}"


class GrpcEndpoint(NamedTuple):
    """Where gRPC is served, and whether it takes TLS connections only."""

    port: int
    uses_tls: bool


class OtherPorts(NamedTuple):
    """The ports of a server beside that of HTTP; None for those that there are not."""

    metrics: int | None = None
    grpc: GrpcEndpoint | None = None


class SocketFolder:
    """A folder of sockets between the processes of one server, which only this user can reach."""

    def __init__(self) -> None:
        self.path = make_socket_folder("sockets")
        self._numbers = itertools.count(1)

    def choose(self) -> Path:
        """Return a place for the socket of another engine."""
        return self.path / f"engine-{next(self._numbers)}"

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)


def listener_url(listener: socket.socket) -> str:
    """Return `http://address:port` of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://{host_and_port(host, port)}"


def is_loopback(listener: socket.socket) -> bool:
    """Whether only this machine can reach the socket."""
    return ip_address(listener.getsockname()[0]).is_loopback


def has_unread(transport: BaseTransport) -> bool:
    """Return whether the peer has sent something, or has left, and the transport has not read it. One that is closing
    reads no more.

    When a process goes on after it stood still (SIGSTOP, a paused machine), timers may run before what came meanwhile
    is read: the wait for events was interrupted and is over. Whatever closes a silent connection looks here first, or
    its client loses a request that nobody saw.
    """
    if transport.is_closing():
        return False
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
    return bool(poll.poll(0))
