"""A real Postgres with pgvector, from the pgserver wheel: one for the whole test session, a schema for each test."""

import atexit
import os
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path
from urllib.parse import quote

import psutil
import psycopg

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

    def __init__(self, **settings: str) -> None:
        self._reserved = ReservedPort()
        self.port = self._reserved.number
        self._program = Path(tempfile.mkdtemp(prefix="sluice-postgres-program-"))
        self._binaries = _install(self._program)
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

    @contextmanager
    def without_pgvector(self) -> Iterator[None]:
        """Take the extension out of the server's own installation meanwhile."""
        (control,) = self._program.rglob("vector.control")
        hidden = control.rename(control.with_suffix(".hidden"))
        try:
            yield
        finally:
            hidden.rename(control)

    def remove(self) -> None:
        """Stop the server and delete its data."""
        if (self._folder / "data" / "postmaster.pid").exists():
            self.crash()
        for folder in (self._folder, self._program):
            shutil.rmtree(folder, ignore_errors=True)

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


def _install(folder: Path) -> Path:
    """Install the wheel's server by links to its files, and return its binaries."""
    folder.chmod(0o755)  # for who runs the server where the tests run as root
    wheel = BINARIES.parents[1]
    for part in (wheel / "pginstall", wheel.with_name("pgserver.libs")):
        if part.exists():
            shutil.copytree(part, folder / part.relative_to(wheel.parent), copy_function=_link)
    return folder / "pgserver" / "pginstall" / "bin"


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # of another file system
        shutil.copy2(source, target)


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


def new_schema() -> str:
    """Return the URL of a schema that is not there yet."""
    return f"{shared_server().url(shared_database())}?schema=test_{next(_numbers)}"
