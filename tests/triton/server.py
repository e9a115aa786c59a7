"""`sluice serve` over a model repository, as a process of its own on free ports."""

import re
import shutil
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests import paths
from tests.server_process import ServerProcess, serve_command, start_command
from tests.waiting import PATIENCE_S

MODELS = paths.DATA / "triton" / "models"
NOT_LOADED = {"on_demand", "bad_load"}
OF_THE_EXAM = {"ensemble_stream", "misbehave", "reshaped", "shout", "trickle"}
"""Models that nothing but the whole exam asks."""
EXAM_FLAGS = (
    "--model-control-mode=explicit",
    "--allow-model-file-override=true",
    "--http-header-forward-pattern=x-fwd-.*",
    "--grpc-header-forward-pattern=x-fwd-.*",
    "--allow-client-shm=true",
    "--cache-config=local,size=10485760",
)
"""How the real server was set up when its answers were recorded."""
FREE_PORTS = ("--http-port=0", "--grpc-port=0", "--metrics-port=0")


def copy_models(repository: Path, names: Iterable[str]) -> Path:
    """A repository of its own with the examined models of these names, so that nothing is written beside theirs."""
    for name in names:
        shutil.copytree(MODELS / name, repository / name, ignore=shutil.ignore_patterns("__pycache__"))
    return repository


def http_address(server: ServerProcess) -> str:
    """The address as tritonclient expects it: without a scheme."""
    return server.base_url.removeprefix("http://")


@contextmanager
def serving(repository: Path, log_path: Path, *flags: str) -> Iterator[ServerProcess]:
    """Run a server whose models are loaded. It must shut down without an error."""
    command = serve_command("--model-repository", str(repository), *FREE_PORTS, *flags)
    with log_path.open("w") as log:
        process = start_command(command, log)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"Listening on (\S+) \(metrics ([^,]+), gRPC (\S+)\)\n", line)
        assert found, line + log_path.read_text()
        server = ServerProcess(process, log_path, found[1], found[2], line, grpc_address=found[3])
        server.wait_ready()
        yield server
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0, server.log
    finally:
        process.kill()
        process.communicate()
