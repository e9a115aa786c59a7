"""An image's container without Docker: its environment, as a user without rights or capabilities, on a read-only root.

Only the volumes and /tmp can be written, in folders of the test.
"""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

import pytest

from tests.deploy.dockerfile import DOCKERFILES, stages
from tests.paths import ROOT
from tests.waiting import PATIENCE_S

_, IMAGE = stages(DOCKERFILES[0])
USER = IMAGE.texts("USER")[0].split(":")[0]
UNPRIVILEGED = [
    *("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--no-new-privs"),
    *("--inh-caps=-all", "--bounding-set=-all"),
]
READ_ONLY = """
set -e
for folder in "$1"/*; do mount --bind "$folder" "$folder"; done
mount -o remount,bind,ro /
shift
exec "$@"
"""
FREE_PORTS = {"SLUICE_HTTP_PORT": "0", "SLUICE_GRPC_PORT": "0", "SLUICE_METRICS_PORT": "0"}


class Container:
    """Runs commands with folders in place of the image's."""

    def __init__(self, folder: Path, interpreter: str) -> None:
        self.writable = folder / "writable"
        self.environment = self._environment(folder, interpreter)
        for name in ("lib", "cache", "tmp"):
            (self.writable / name).mkdir(parents=True)
            os.chown(self.writable / name, int(USER), int(USER))

    def _environment(self, folder: Path, interpreter: str) -> dict[str, str]:
        """Return the image's environment with moved paths, and this environment's programs for any user."""
        programs = folder / "bin"
        programs.mkdir()
        for name, code in (
            ("sluice", "from sluice.cli.__main__ import main; raise SystemExit(main())"),
            ("python", None),
        ):
            command = [interpreter, *(() if code is None else ("-c", code))]
            (programs / name).write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
            (programs / name).chmod(0o755)
        moved = {
            name: value.replace("/var/lib/sluice", str(self.writable / "lib")).replace(
                "/var/cache/sluice", str(self.writable / "cache")
            )
            for name, value in IMAGE.environment().items()
        }
        libraries = os.pathsep.join((str(ROOT), sysconfig.get_path("purelib")))
        path = f"{programs}{os.pathsep}{os.defpath}"
        return moved | {"PATH": path, "PYTHONPATH": libraries, "TMPDIR": str(self.writable / "tmp")}

    def command(self, *words: str) -> list[str]:
        return [
            *("unshare", "--mount", "--propagation=private", "sh", "-c", READ_ONLY, "sh", str(self.writable)),
            *UNPRIVILEGED,
            *words,
        ]

    def run(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*words),
            env=self.environment | environment,
            cwd=self.writable / "lib",
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )

    def is_healthy(self, base_url: str) -> bool:
        port = urlsplit(base_url).port
        words = [word.replace(":8000/", f":{port}/") for word in IMAGE.healthcheck()]
        assert words != IMAGE.healthcheck()
        return self.run(*words).returncode == 0

    @contextmanager
    def serving(
        self, log_path: Path, arguments: Sequence[str] | None = None, **environment: str
    ) -> Iterator[tuple["subprocess.Popen[str]", str]]:
        """Run the image's own command, or its entry point with `arguments`.

        Yields the process and the address on which it listens.
        """
        words = [*IMAGE.command("ENTRYPOINT"), *(IMAGE.command("CMD") if arguments is None else arguments)]
        with log_path.open("w") as log:
            process = subprocess.Popen(
                self.command(*words),
                env=self.environment | FREE_PORTS | environment,
                cwd=self.writable / "lib",
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("Listening on "), log_path.read_text()
            yield process, line.split()[2].replace("0.0.0.0", "127.0.0.1")
        finally:
            process.kill()
            process.communicate()


def _interpreter() -> str | None:
    """Return a Python of this version that any user can run: this one may lie in root's home."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    for each in (sys.executable, f"/usr/bin/python{version}", f"/usr/local/bin/python{version}"):
        tried = subprocess.run([*UNPRIVILEGED, "sh", "-c", f"exec {each} -c 0"], capture_output=True, timeout=30)
        if tried.returncode == 0:
            return each
    return None


@contextmanager
def made_container() -> Iterator[Container]:
    """Make a container in a folder that all users may enter, unlike pytest's folders."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("setpriv", "unshare"))):
        pytest.skip("only root, with setpriv and unshare, can become somebody else on a read-only root")
    interpreter = _interpreter()
    if interpreter is None:
        pytest.skip("there is no Python of this version that others than root may run")
    with TemporaryDirectory(prefix="sluice-image-") as folder:
        Path(folder).chmod(0o755)
        made = Container(Path(folder), interpreter)
        if made.run("true").returncode != 0:
            pytest.skip("mounts cannot be changed here")
        yield made
