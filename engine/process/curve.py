"""CURVE keys of engines and their clients, and the rules of connections over TCP that both ends share."""

import os
from pathlib import Path
from typing import NamedTuple

import zmq
import zmq.auth

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
