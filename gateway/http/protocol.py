"""uvicorn's HTTP protocol with the bounds that it lacks: on the size of a head, and on the time it takes.

It also keeps the headers' names as they were sent: uvicorn passes them on in lower case, and Triton's clients find the
forwarded ones among the request's parameters as they wrote them.
"""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.http.cork import CorkedTransport

MAX_HEAD_BYTES = 64 << 10
"""Request line and headers. The parser itself would collect them without end."""
HEAD_TIMEOUT_S = 30.0
"""From the first byte of a request (or from connecting) to the end of its headers."""

NAMES_AS_SENT = "sluice.header_names"
"""The extension of the ASGI scope that has the headers' names as the client wrote them, in order."""

_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class BoundedHttpProtocol(HttpToolsProtocol):
    """Closes connections whose request head never ends."""

    _head_bytes = 0
    _head_began = 0.0
    _is_in_head = True
    _head_timer: asyncio.TimerHandle

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.transport = CorkedTransport(transport, self.loop)  # type: ignore[assignment]
        self._begin_head()
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._watch_head)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._names: list[bytes] = []
        self.scope["extensions"] = {NAMES_AS_SENT: self._names}  # type: ignore[dict-item]
        self._begin_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._names.append(name)
        super().on_header(name, value)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.transport.write(_TOO_LARGE)
                self.transport.close()

    def on_headers_complete(self) -> None:
        self._end_head()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_timer.cancel()
        super().connection_lost(exc)

    def _begin_head(self) -> None:
        self._is_in_head = True
        self._head_bytes = 0
        self._head_began = self.loop.time()

    def _end_head(self) -> None:
        self._is_in_head = False

    def _watch_head(self) -> None:
        """One timer a connection, which looks again when a head that is under way would be late: not one a request."""
        age_s = self.loop.time() - self._head_began
        if self._is_in_head and age_s >= HEAD_TIMEOUT_S:
            self.timeout_keep_alive_handler()
            return
        wait_s = HEAD_TIMEOUT_S - age_s if self._is_in_head else HEAD_TIMEOUT_S
        self._head_timer = self.loop.call_later(wait_s, self._watch_head)
