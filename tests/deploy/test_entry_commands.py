"""The image's commands, run without Docker as the image would run them.

They run as a user without rights or capabilities on a read-only root: only the volumes and /tmp can be written.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

import httpx
import pytest

from tests.deploy.dockerfile import DOCKERFILES, stages
from tests.paths import ROOT
from tests.server_process import PATIENCE_S, running_server

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
KEY = "a key"


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
        for name, code in (("sluice", "from cli.__main__ import main; raise SystemExit(main())"), ("python", None)):
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
    def serving(self, log_path: Path, **environment: str) -> Iterator[tuple["subprocess.Popen[str]", str]]:
        """Run the image's own command. Yields the process and the address on which it listens."""
        words = [*IMAGE.command("ENTRYPOINT"), *IMAGE.command("CMD")]
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


@pytest.fixture
def container() -> Iterator[Container]:
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


def test_the_container_is_as_closed_as_it_should_be(container: Container) -> None:
    """The restrictions hold, or the other tests would prove nothing."""
    shown = container.run(
        "sh", "-c", "id -u; grep CapEff /proc/self/status; touch $HOME/a && touch $TMPDIR/a && echo wrote"
    )
    assert shown.stdout.split() == [USER, "CapEff:", "0" * 16, "wrote"]
    for place in ("/tmp", "/var/tmp"):
        assert "Read-only" in container.run("touch", f"{place}/written").stderr


def test_the_gpu_image_s_engine_has_another_python_than_its_gateway(tmp_path: Path) -> None:
    """An interpreter of another name alone finds TensorRT-LLM (the stand-in), with the paths of this machine."""
    other = tmp_path / "image-python"
    other.symlink_to(sys.executable)
    stand_in = ROOT / "tests" / "stand_ins"
    libraries = os.pathsep.join((str(stand_in), str(ROOT), sysconfig.get_path("purelib")))
    python = tmp_path / "engine-python"
    text = (DOCKERFILES[1].parent / "engine-python").read_text()
    python.write_text(text.replace("/usr/bin/python3", str(other)).replace("/opt/sluice-engine", libraries))
    python.chmod(0o755)
    arguments = (f"--engine-python={python}", "--runtime=tensorrt_llm")
    with running_server(ROOT / "models" / "rill", tmp_path / "log", *arguments) as server:
        server.wait_ready()
        engine = server.engine()
        assert engine.cmdline()[0] == str(other)
        assert engine.environ()["PYTHONPATH"] == libraries
        with server.client() as client:
            answer = client.post("/v1/completions", json={"model": server.model, "prompt": "Hello", "max_tokens": 3})
            assert answer.status_code == 200, answer.text


def test_the_image_s_command_serves_and_its_probe_says_so(container: Container, tmp_path: Path) -> None:
    assert not container.is_healthy("http://127.0.0.1:1")
    log_path = tmp_path / "log"
    with container.serving(log_path, SLUICE_API_KEY=KEY) as (process, base_url):
        deadline = time.monotonic() + PATIENCE_S
        while not container.is_healthy(base_url):
            assert time.monotonic() < deadline, log_path.read_text()
        with httpx.Client(base_url=base_url, headers={"authorization": f"Bearer {KEY}"}, timeout=PATIENCE_S) as client:
            body = {"model": "rill", "messages": [{"role": "user", "content": "Hello!"}]}
            answer = client.post("/v1/chat/completions", json=body)
            assert answer.json()["choices"][0]["message"]["content"]
            put = client.put("/v1/rag/docs/documents/a.md", content="# Pumps\n\nOil them every 40 days.\n")
            assert put.status_code == 201, put.text
        process.send_signal(getattr(signal, IMAGE.texts("STOPSIGNAL")[0]))
        assert process.wait(PATIENCE_S) == 0, log_path.read_text()
    assert (container.writable / "lib" / "sluice" / "rag.sqlite").is_file()
    assert "Traceback" not in log_path.read_text()
    assert list((container.writable / "tmp").glob("sluice-*")) == []
