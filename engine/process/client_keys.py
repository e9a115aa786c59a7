"""Which clients may connect to an engine over TCP: those whose public keys are in a folder."""

import logging
from pathlib import Path
from time import perf_counter

import zmq
from zmq.utils import z85

from sluice.engine.process.curve import read_public
from sluice.errors import ErrorCode, SluiceError

log = logging.getLogger(__name__)

DOMAIN = b"sluice"
LOOK_S = 0.2
"""Least seconds between two looks at the folder."""
LOG_S = 10.0
"""Least seconds between two lines in the log about refused clients."""
_ENDPOINT = "inproc://zeromq.zap.01"
"""The place at which ZeroMQ asks about each connection (RFC 27, ZAP)."""


class RareLog:
    """Writes warnings, one each `LOG_S` at most, with the number of those left out since."""

    def __init__(self) -> None:
        self._last = -LOG_S
        self._num_left_out = 0

    def warn(self, message: str, *values: object) -> None:
        now = perf_counter()
        if now - self._last < LOG_S:
            self._num_left_out += 1
            return
        more = f" ({self._num_left_out} more such lines left out)" if self._num_left_out else ""
        self._last, self._num_left_out = now, 0
        log.warning(f"{message}%s", *values, more)


class ClientKeys:
    """Answers ZeroMQ's questions whether a client may connect. Used by the thread that polls `socket`."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", folder: Path) -> None:
        """Raises INVALID for a folder that cannot be read."""
        self._folder = folder
        self._mark: object = None
        self._looked = -LOOK_S
        self._names: dict[bytes, str] = {}
        self._refusals, self._bad_files = RareLog(), RareLog()
        try:
            self._read()
        except OSError as error:
            message = f"the folder of allowed clients cannot be read: {error}"
            raise SluiceError(ErrorCode.INVALID, message, param="allowed_clients") from error
        if not self._names:
            log.warning("%s has no certificate (*.key) yet: no client may connect", folder)
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(_ENDPOINT)

    def answer(self) -> None:
        """Answer the questions that have come."""
        while True:
            try:
                version, number, _, address, _, mechanism, *credentials = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            name = self._name(credentials[0]) if mechanism == b"CURVE" and credentials else None
            if name is None:
                self._refusals.warn("a client at %s was refused: its key is not in %s", address.decode(), self._folder)
            code, text = (b"200", b"OK") if name is not None else (b"400", b"this key is not allowed")
            self.socket.send_multipart((version, number, code, text, (name or "").encode(), b""))

    def close(self) -> None:
        self.socket.close()

    def _name(self, key: bytes) -> str | None:
        """Return the name of the file with the key."""
        now = perf_counter()
        if now - self._looked >= LOOK_S:
            self._looked = now
            try:
                self._read()
            except OSError as error:
                self._bad_files.warn("the allowed clients stay as they were: %s", error)
        return self._names.get(z85.encode(key))

    def _read(self) -> None:
        """Read the certificates again, if one of them has changed. Raises OSError."""
        files = sorted(each for each in self._folder.iterdir() if each.suffix == ".key")
        mark = [(each, (found := each.stat()).st_mtime_ns, found.st_size) for each in files]
        if mark == self._mark:
            return
        names = {}
        for file in files:
            try:
                names[read_public(file)] = file.stem
            except SluiceError as error:
                self._bad_files.warn("%s", error.message)
        self._mark, self._names = mark, names
