"""CURVE keys of engines and their clients, the folder of the keys of those that may connect to an engine over TCP, and
the rules of connections over TCP that both ends share."""

import logging
import os
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import zmq
import zmq.auth
from zmq.utils import z85

from sluice.errors import ErrorCode, SluiceError

HEARTBEAT_MS = 200
ENGINE_SILENT_MS, CLIENT_SILENT_MS = 600, 1500
"""ZeroMQ asks the other end this often whether it lives, and takes it for lost without an answer for this long. Both
ends answer on a thread of ZeroMQ's, however busy they are. Streams of an engine that was only slow to answer go on
elsewhere, or in itself; an engine that takes a client for lost has to compute its prompts anew, so it waits longer."""
UNSENT_MS = 5000
"""The kernel gives a connection up whose data was not taken for this long."""
HANDSHAKE_MS = 5000


class CurveKeys(NamedTuple):
    """A pair of CURVE keys in Z85, 40 characters each."""

    public: bytes
    secret: bytes


class ClientCurve(NamedTuple):
    """The keys of a client: its own pair, and the public key by which it knows the engine."""

    keys: CurveKeys
    server: bytes


def make_certificates(folder: Path, name: str) -> tuple[Path, Path]:
    """Make a pair of keys, and return its files: the public one, NAME.key, and the secret one, NAME.key_secret, which
    only this user can read. Raises INVALID where one is there already, or the name is no name of a file."""
    public, secret = folder / f"{name}.key", folder / f"{name}.key_secret"
    if not name or Path(name).name != name:
        raise SluiceError(ErrorCode.INVALID, f"a name of keys must be a name of a file, got {name!r}", param="name")
    for file in (public, secret):
        if file.exists():
            raise SluiceError(ErrorCode.INVALID, f"{file} is there already; keys are never replaced", param="name")
    before = os.umask(0o077)  # nobody else may read the secret key, not for a moment
    try:
        folder.mkdir(parents=True, exist_ok=True)
        zmq.auth.create_certificates(folder, name)
    except OSError as error:
        raise SluiceError(ErrorCode.INVALID, f"keys cannot be written: {error}", param="folder") from error
    finally:
        os.umask(before)
    public.chmod(0o644)
    return public, secret


def read_public(file: Path) -> bytes:
    """Return the public key in a certificate. Raises INVALID."""
    return _read(file)[0]


def read_pair(file: Path) -> CurveKeys:
    """Return the keys in a secret certificate. Raises INVALID."""
    public, secret = _read(file)
    if secret is None:
        message = f"{file} has no secret key; the file that has it ends in .key_secret"
        raise SluiceError(ErrorCode.INVALID, message, param="curve_key")
    return CurveKeys(public, secret)


def _read(file: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = zmq.auth.load_certificate(file)
        for key in (public, secret):
            if key is not None:
                zmq.curve_public(key)  # checks the form of the key
    except (OSError, ValueError, zmq.ZMQError) as error:
        message = f"{file} is no certificate as `sluice engine keys` makes them: {error}"
        raise SluiceError(ErrorCode.INVALID, message, param="curve_key") from error
    return public, secret


def watch_connection(socket: "zmq.Socket[bytes]", endpoint: str, silent_ms: int) -> None:
    """Let the connections that the socket makes or takes at `endpoint`, which is used next, notice that the other end
    is gone: that it has not answered for `silent_ms`, or has taken nothing for seconds."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, silent_ms)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.TCP_MAXRT, UNSENT_MS)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))


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
