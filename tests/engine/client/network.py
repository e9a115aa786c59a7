"""A network in memory, in place of ZeroMQ: the sockets of one event loop's engines and clients, which reach each other
by their endpoints, as much of them as `engine` asks for."""

import asyncio
import errno
import itertools
import struct
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import zmq

_RETRY_S = 0.02
"""How long a socket that has lost its engine waits until it looks for the next one at that endpoint."""


class Network:
    """The context of all sockets of a test."""

    def __init__(self) -> None:
        self.routers: dict[str, Router] = {}
        """The sockets of engines, by endpoint."""
        self.dealers: list[Dealer] = []
        self.numbers = itertools.count(-2, -1)
        """File numbers that no file has."""
        self.ports = itertools.count(1)

    def socket(self, kind: int) -> "Router | Dealer":
        return Router(self) if kind == zmq.ROUTER else Dealer(self)

    def term(self) -> None:
        pass

    def find(self, endpoint: str) -> "Router | None":
        """Return the socket at an endpoint; of a file the one that it leads to now."""
        scheme, _, place = endpoint.partition("://")
        return self.routers.get(f"ipc://{Path(place).resolve()}" if scheme == "ipc" else endpoint)

    def cut(self, endpoint: str) -> None:
        """Cut the connections of this endpoint's clients. Both ends hear of it."""
        for dealer in [*self.dealers]:
            if dealer.endpoint == endpoint:
                dealer.lose()


class _Socket:
    linger = 0
    closed = False

    def __init__(self, network: Network) -> None:
        self.network = network
        self._number = next(network.numbers)
        self._loop: Any = asyncio.get_running_loop()

    def fileno(self) -> int:
        return self._number

    def close(self, linger: int | None = None) -> None:
        self.closed = True

    def set_hwm(self, value: int) -> None:
        pass

    def setsockopt(self, option: int, value: object) -> None:
        pass


class Router(_Socket):
    """An engine's socket."""

    def __init__(self, network: Network) -> None:
        super().__init__(network)
        self.endpoints: list[str] = []
        self.inbox: deque[list[bytes]] = deque()
        self.peers: dict[bytes, Dealer] = {}
        self.on_frame: Callable[[bytes], bytes | None] = lambda content: content
        """Sees each message that the engine sends and returns what comes, None for nothing."""
        self.is_deaf = False
        """Whether what clients send is lost."""
        self._arrival = asyncio.Event()

    def bind(self, endpoint: str) -> None:
        scheme, _, place = endpoint.partition("://")
        if scheme == "ipc":
            endpoint = f"ipc://{Path(place).resolve()}"
        elif place.endswith(":0"):
            endpoint = f"{endpoint[:-1]}{next(self.network.ports)}"
        if endpoint in self.network.routers:
            raise zmq.ZMQError(errno.EADDRINUSE)
        self.network.routers[endpoint] = self
        self.endpoints.append(endpoint)

    def getsockopt_string(self, option: int) -> str:
        return self.endpoints[-1]

    def poll(self, timeout_ms: int) -> int:
        return 0

    def take(self, parts: list[bytes]) -> None:
        if not self.is_deaf:
            self.inbox.append(parts)
            self._arrival.set()

    async def until_arrival(self, timeout_s: float) -> None:
        """Wait until a message has come, or so long."""
        self._arrival.clear()
        if not self.inbox and timeout_s:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._arrival.wait()

    def recv_multipart(self, flags: int = 0) -> list[bytes]:
        if not self.inbox:
            raise zmq.Again
        return self.inbox.popleft()

    def send_multipart(self, parts: Sequence[Any], flags: int = 0, copy: bool = True) -> None:
        client, *payload = map(bytes, parts)
        dealer = self.peers.get(client)
        if dealer is None:
            raise zmq.ZMQError(errno.EHOSTUNREACH)
        content = self.on_frame(payload[0])
        if content is not None:
            dealer.arrive([content, *payload[1:]])

    def close(self, linger: int | None = None) -> None:
        """Go, as at the end of the engine's process."""
        super().close()
        for endpoint in self.endpoints:
            self.network.routers.pop(endpoint, None)
        for dealer in [*self.peers.values()]:
            dealer.lose()


class Dealer(_Socket):
    """A client's socket. It connects when there is an engine at its endpoint, again after that is lost."""

    _identities = itertools.count()

    def __init__(self, network: Network) -> None:
        super().__init__(network)
        self.endpoint = ""
        self._router: Router | None = None
        self._identity = b""
        self._unsent: deque[bytes] = deque()
        self._inbox: deque[list[bytes]] = deque()
        self._monitor: Monitor | None = None
        network.dealers.append(self)

    def connect(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._find()

    def _find(self) -> None:
        if self.closed:
            return
        self._router = self.network.find(self.endpoint)
        if self._router is None:
            self._loop.call_later(_RETRY_S, self._find)
            return
        self._identity = b"client %d" % next(self._identities)
        self._router.peers[self._identity] = self
        while self._unsent:
            self.send(self._unsent.popleft())

    def lose(self) -> None:
        """Lose the connection."""
        if self._router is None:
            return
        self._router.peers.pop(self._identity, None)
        self._router = None
        if self._monitor is not None:
            self._monitor.note(zmq.EVENT_DISCONNECTED)
        self._loop.call_later(_RETRY_S, self._find)

    def send(self, content: bytes, flags: int = 0) -> None:
        if self._router is None:
            self._unsent.append(content)
        else:
            self._router.take([self._identity, content])

    def arrive(self, parts: list[bytes]) -> None:
        self._inbox.append(parts)
        self._loop.signal(self._number)

    def recv(self, flags: int = 0) -> bytes:
        [content] = self._take()
        return content

    def recv_multipart(self, flags: int = 0, copy: bool = True) -> list[Any]:
        return [SimpleNamespace(buffer=memoryview(part)) for part in self._take()]

    def _take(self) -> list[bytes]:
        if not self._inbox:
            raise zmq.Again
        return self._inbox.popleft()

    def get(self, option: int) -> int:
        return int(zmq.POLLIN) if self._inbox else 0

    def get_monitor_socket(self, events: int) -> "Monitor":
        self._monitor = Monitor(self.network)
        return self._monitor

    def disable_monitor(self) -> None:
        self._monitor = None

    def close(self, linger: int | None = None) -> None:
        super().close()
        self.network.dealers.remove(self)
        if self._router is not None:
            self._router.peers.pop(self._identity, None)


class Monitor(_Socket):
    """Tells a client what became of its connection."""

    def __init__(self, network: Network) -> None:
        super().__init__(network)
        self._events: deque[int] = deque()

    def note(self, event: int) -> None:
        self._events.append(event)
        self._loop.signal(self._number)

    def get(self, option: int) -> int:
        return int(zmq.POLLIN) if self._events else 0

    def recv_multipart(self, flags: int = 0) -> list[bytes]:
        return [struct.pack("=hi", self._events.popleft(), 0), b""]
