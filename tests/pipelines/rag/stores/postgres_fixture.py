"""A real Postgres with pgvector, from the pgserver wheel: one for the whole test session, a schema for each test."""

import atexit
import os
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from itertools import count
from pathlib import Path
from urllib.parse import quote

import psutil
import psycopg

from pipelines.rag.stores.postgres.store import PostgresStore
from tests.ports import ReservedPort

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it asks for XDG_RUNTIME_DIR, which nothing here needs
    from pgserver._commands import POSTGRES_BIN_PATH

BINARIES = Path(POSTGRES_BIN_PATH)
PASSWORD = "s3cret/pass word"
_UNPRIVILEGED = "nobody"
"""The user that runs the server if the tests run as root, which Postgres refuses."""
_SETTINGS = {"fsync": "off", "full_page_writes": "off", "unix_socket_directories": ""}
_numbers = count()


class PostgresServer:
    """A server that can be stopped, frozen and started again on its port. Its owner is `postgres`, with PASSWORD."""

    def __init__(self, binaries: Path = BINARIES, **settings: str) -> None:
        self._reserved = ReservedPort()
        self.port = self._reserved.number
        self._binaries = binaries
        self._settings = {**_SETTINGS, **settings}
        self._user = _UNPRIVILEGED if os.geteuid() == 0 else None
        self._folder = Path(tempfile.mkdtemp(prefix="sluice-postgres-"))
        if self._user is not None:
            shutil.chown(self._folder, self._user)
        password_file = self._folder / "password"
        password_file.write_text(PASSWORD)
        password_file.chmod(0o644)
        options = ("--username=postgres", "--encoding=utf8", "--locale=C", "--auth=scram-sha-256", "--no-sync")
        self._run("initdb", *options, f"--pwfile={password_file}")

    def url(self, database: str = "postgres", user: str = "postgres", password: str = PASSWORD) -> str:
        return f"postgresql://{user}:{quote(password, safe='')}@127.0.0.1:{self.port}/{database}"

    def start(self) -> None:
        """Wait until the server takes connections."""
        options = f"-h 127.0.0.1 -p {self.port}" + "".join(f" -c {k}='{v}'" for k, v in self._settings.items())
        self._run("pg_ctl", "start", "--wait", "--timeout=30", f"--log={self._folder / 'log'}", f"--options={options}")

    def crash(self) -> None:
        """Kill all its processes at once. `start` recovers it."""
        self._run("pg_ctl", "stop", "--wait", "--mode=immediate")

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Freeze the server: connections stay up, and nothing responds on them."""
        postmaster = psutil.Process(int((self._folder / "data" / "postmaster.pid").read_text().split()[0]))
        processes = [postmaster, *postmaster.children(recursive=True)]
        for process in processes:
            process.suspend()
        try:
            yield
        finally:
            for process in processes:
                process.resume()

    def remove(self) -> None:
        """Stop the server and delete its data."""
        if (self._folder / "data" / "postmaster.pid").exists():
            self.crash()
        shutil.rmtree(self._folder, ignore_errors=True)

    def create_database(self, template: str = "template1") -> str:
        """Create a database, empty or a copy of one without connections, and return its name."""
        name = f"test_{os.getpid()}_{next(_numbers)}"
        self.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        return name

    def execute(self, statement: str, database: str = "postgres") -> None:
        with psycopg.connect(self.url(database), autocommit=True) as connection:
            connection.execute(statement.encode())

    def _run(self, program: str, *options: str) -> None:
        command = [str(self._binaries / program), "-D", str(self._folder / "data"), *options]
        # Its output to a file: the server inherits it, and a pipe would stay open as long as that runs.
        with (self._folder / "output").open("w+") as output:
            done = subprocess.run(command, stdout=output, stderr=output, cwd=self._folder, user=self._user, check=False)
            output.seek(0)
            assert done.returncode == 0, output.read()


@cache
def shared_server() -> PostgresServer:
    """The server of the session, started once and stopped at its end."""
    server = PostgresServer()
    atexit.register(server.remove)
    server.start()
    return server


@cache
def shared_database() -> str:
    """The database of stores with a schema each, which is much faster to create than a database."""
    return shared_server().create_database()


@asynccontextmanager
async def postgres_store() -> AsyncIterator[PostgresStore]:
    """An open store in an empty schema of its own."""
    server, database, schema = shared_server(), shared_database(), f"test_{next(_numbers)}"
    store = PostgresStore(f"{server.url(database)}?schema={schema}")
    await store.open()
    try:
        yield store
    finally:
        await store.close()
        server.execute(f"DROP SCHEMA {schema} CASCADE", database)
