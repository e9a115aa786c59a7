"""The socket at which the server's other processes, engines and HTTP workers, bring the lines that they log."""

import asyncio
import logging
import os
import secrets
import socket
import struct

import msgspec

from sluice.gateway.watch.logs.ring import LogLine, LogRing

log = logging.getLogger(__name__)

MAX_LINE_BYTES = 1 << 16
"""No process sends a longer line. One that does is not read any further."""
_CREDENTIALS = struct.Struct("3i")


class LogSocket:
    """Adds lines of other processes to a ring. Only processes of this user are heard. Belongs to the event loop."""

    def __init__(self, ring: LogRing) -> None:
        """The name is an abstract one: nothing of it is left in a folder, however this process ends."""
        self._ring = ring
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        name = f"\0sluice-log-{os.getpid()}-{secrets.token_hex(8)}"
        self._socket.bind(name)
        self._socket.listen()
        self._socket.setblocking(False)
        self._readers: set[asyncio.Task[None]] = set()
        ring.socket_name = name
        self._accepting = asyncio.create_task(self._accept(), name="log-socket")

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            peer, _ = await loop.sock_accept(self._socket)
            if not _is_of_this_user(peer):
                peer.close()
                continue
            reading = asyncio.create_task(self._read(peer), name="log-lines")
            self._readers.add(reading)
            reading.add_done_callback(self._readers.discard)

    async def _read(self, peer: socket.socket) -> None:
        """Add the lines of one process until it ends."""
        reader, writer = await asyncio.open_unix_connection(sock=peer, limit=MAX_LINE_BYTES)
        try:
            async for line in reader:
                self._ring.add(msgspec.json.decode(line, type=LogLine))
        except ConnectionError:
            pass
        except (ValueError, msgspec.MsgspecError) as error:
            log.warning("lines of another process cannot be read, and are not shown from here on: %s", error)
        finally:
            writer.close()

    def close(self) -> None:
        """Take no more lines."""
        self._ring.socket_name = ""
        for task in (self._accepting, *self._readers):
            task.cancel()
        self._socket.close()


def _is_of_this_user(peer: socket.socket) -> bool:
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(credentials)[1]
    return user == os.getuid()
