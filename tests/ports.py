"""Ports for servers of others, which cannot take port 0 and say which they got."""

import os
import socket
import weakref


class ReservedPort:
    """A port of 127.0.0.1 that the kernel gives to nobody else while this object lives.

    The server that is meant to listen there can, any number of times: a socket that is bound and does not listen
    stands in no one's way who sets SO_REUSEADDR, as Redis, Postgres and Prometheus do.
    """

    def __init__(self) -> None:
        reserving = socket.socket()
        reserving.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserving.bind(("127.0.0.1", 0))
        self.number: int = reserving.getsockname()[1]
        weakref.finalize(self, os.close, reserving.detach())
