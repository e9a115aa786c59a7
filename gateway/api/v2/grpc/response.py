"""The response of a call on its stream: messages behind their prefixes, and a status, once."""

import grpc

from sluice.gateway.api.v2.grpc import wire
from sluice.gateway.api.v2.grpc.assembly import PREFIX
from sluice.gateway.api.v2.grpc.messages import WireMessage, message_size
from sluice.gateway.front.http2.header_blocks import write_fields
from sluice.gateway.front.http2.stream import Carrier, Stream

_OK = grpc.StatusCode.OK
_SMALL_MESSAGE = 16 << 10
"""Longest message that is copied next to its prefix, rather than sent behind it."""


class GrpcResponse(Stream):
    """What is sent for a call. Lives on the event loop's thread."""

    __slots__ = ("_code", "has_begun")

    def __init__(self, connection: Carrier, stream_id: int) -> None:
        super().__init__(connection, stream_id)
        self.has_begun = False
        """Whether the response's fields are sent."""
        self._code: grpc.StatusCode | None = None

    def code(self) -> grpc.StatusCode | None:
        """Return the status that the call has ended with; None before."""
        return self._code

    @property
    def is_complete(self) -> bool:
        """Whether everything is sent, or waits for the client's window only."""
        return self.is_ended or self.trailers is not None

    def send_only(self, message: WireMessage) -> None:
        """Send the only message of a response, and its end."""
        if self.is_complete:
            return
        self._code = _OK
        if isinstance(message, bytes) and len(message) <= _SMALL_MESSAGE:
            self.has_begun = True
            self.send_whole(wire.RESPONSE_FIELDS, PREFIX.pack(0, len(message)) + message, wire.OK_FIELDS)
        else:
            self.send_message(message, is_packed=False)
            self.send_trailers(wire.OK_FIELDS)

    def send_message(self, message: WireMessage, *, is_packed: bool) -> None:
        if self.is_ended:
            return
        if not self.has_begun:
            self.has_begun = True
            self.send_headers(wire.GZIP_FIELDS if is_packed else wire.RESPONSE_FIELDS)
        prefix = PREFIX.pack(is_packed, message_size(message))
        if isinstance(message, bytes) and len(message) <= _SMALL_MESSAGE:
            self.send_data(prefix + message)
            return
        first, *more = [message] if isinstance(message, bytes) else message
        if len(first) <= _SMALL_MESSAGE:
            self.send_data(prefix + first)
        else:
            self.send_data(prefix)
            self.send_data(first)
        for part in more:
            self.send_data(part)

    def finish(self, code: grpc.StatusCode, details: str, metadata: tuple[tuple[str, str | bytes], ...] = ()) -> None:
        """Send the status, once."""
        if self.is_complete:
            return
        self._code = code
        number = code.value[0]
        if not self.has_begun:
            self.has_begun = True
            self.send_trailers(wire.only_status_block(number, details, metadata))
        elif number == 0:
            self.send_trailers(wire.OK_FIELDS)
        else:
            self.send_trailers(write_fields(wire.status_fields(number, details, metadata)))
