"""Asks the real tritonserver the questions of `tests/data/triton/exchanges.jsonl` and writes its answers beside them.

    python -m tests.goldens.record_triton ENVIRONMENT

ENVIRONMENT is a virtual environment with nvidia-pytriton, whose wheel has the server, and numpy below 2: with numpy 2
the server's Python stub reads arrays wrongly without an error. A new question is a line without a response.
"""

import argparse
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.error import URLError
from urllib.request import urlopen

from tests import paths
from tests.triton.records import Exchange, read_exchanges
from tests.triton.replay import EXCHANGES
from tests.triton.wire import open_wire

DATA = paths.DATA / "triton"
LOADED_ON_REQUEST = {"on_demand", "bad_load"}
START_DEADLINE_S = 120.0
STOP_DEADLINE_S = 10.0


@dataclass(frozen=True, slots=True)
class Installation:
    """The parts of an environment that belong to the server."""

    site_packages: Path
    python_library: Path
    python_version: str

    @classmethod
    def find(cls, environment: Path) -> "Installation":
        places = "s.get_path('purelib'), s.get_config_var('LIBDIR'), s.get_python_version()"
        command = [str(environment / "bin" / "python"), "-c", f"import sysconfig as s; print({places})"]
        answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        return cls(Path(answer[0]), Path(answer[1]), answer[2])

    @property
    def server(self) -> Path:
        return self.site_packages / "pytriton" / "tritonserver"

    def copy_backends(self, target: Path) -> None:
        """Copy the backends, with the stub for this interpreter in the Python backend's folder."""
        shutil.copytree(self.server / "backends", target)
        stub = self.server / "python_backend_stubs" / self.python_version / "triton_python_backend_stub"
        shutil.copy(stub, target / "python")


@dataclass(frozen=True, slots=True)
class Ports:
    http: int
    grpc: int
    metrics: int

    @classmethod
    def free(cls) -> "Ports":
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
        numbers = [bound.getsockname()[1] for bound in sockets]
        for bound in sockets:
            bound.close()
        return cls(*numbers)


@contextmanager
def real_server(environment: Path, models: Path) -> Iterator[Ports]:
    """Run tritonserver on a copy of `models`, since its stubs write byte code beside them."""
    with TemporaryDirectory(prefix="triton-") as folder:
        working_directory, ports = Path(folder), Ports.free()
        installation = Installation.find(environment)
        installation.copy_backends(working_directory / "backends")
        shutil.copytree(models, working_directory / "models")
        with (working_directory / "log").open("wb") as log:
            process = subprocess.Popen(
                _command(installation, working_directory, ports),
                env=_variables(environment, installation),
                stdout=log,
                stderr=log,
                cwd=working_directory,
            )
            try:
                _wait_until_ready(process, ports, working_directory / "log")
                yield ports
            finally:
                _stop(process)


def _command(installation: Installation, working_directory: Path, ports: Ports) -> list[str]:
    models = sorted(path.name for path in (working_directory / "models").iterdir())
    return [
        str(installation.server / "bin" / "tritonserver"),
        f"--model-repository={working_directory / 'models'}",
        f"--backend-directory={working_directory / 'backends'}",
        f"--cache-directory={installation.server / 'caches'}",
        "--cache-config=local,size=10485760",
        f"--http-port={ports.http}",
        f"--grpc-port={ports.grpc}",
        f"--metrics-port={ports.metrics}",
        "--http-header-forward-pattern=x-fwd-.*",
        "--grpc-header-forward-pattern=x-fwd-.*",
        "--exit-timeout-secs=3",
        "--model-control-mode=explicit",
        *(f"--load-model={model}" for model in models if model not in LOADED_ON_REQUEST),
    ]


def _variables(environment: Path, installation: Installation) -> dict[str, str]:
    """Return the server's environment. The stub takes its packages from the first python3 on the path."""
    libraries = (installation.site_packages / "nvidia_pytriton.libs", installation.python_library)
    return {
        "PATH": f"{environment.absolute() / 'bin'}:/usr/local/bin:/usr/bin:/bin",
        "LD_LIBRARY_PATH": ":".join(map(str, libraries)),
    }


def _wait_until_ready(process: subprocess.Popen[bytes], ports: Ports, log: Path) -> None:
    deadline = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urlopen(f"http://127.0.0.1:{ports.http}/v2/health/ready"):
                return
        except (URLError, ConnectionError):
            time.sleep(0.2)
    raise RuntimeError(f"tritonserver does not become ready:\n{log.read_text(errors='replace')[-4000:]}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def record(questions: Iterable[Exchange], ports: Ports) -> Iterator[Exchange]:
    """Yield each exchange with its answer. Raises RuntimeError where the server ends or does not answer.

    Questions that end the server are left out. A missing answer may also be chance.
    """
    with open_wire(f"http://127.0.0.1:{ports.http}", f"127.0.0.1:{ports.grpc}") as wire:
        for question in questions:
            try:
                answer = wire.ask(question)
            except ConnectionRefusedError as error:
                raise RuntimeError(f"the server is gone at {question.name}") from error
            if answer.get("status") == 0 or answer.get("code") == "DEADLINE_EXCEEDED":
                raise RuntimeError(f"the server does not answer {question.name}")
            yield replace(question, response=answer)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environment", type=Path)
    parser.add_argument("--output", type=Path, default=EXCHANGES)
    options = parser.parse_args(arguments)
    with real_server(options.environment, DATA / "models") as ports:
        lines = [json.dumps(exchange.to_json()) for exchange in record(read_exchanges(EXCHANGES), ports)]
    options.output.write_text("\n".join([*lines, ""]))
    sys.stdout.write(f"{len(lines)} exchanges\n")


if __name__ == "__main__":
    main(sys.argv[1:])
