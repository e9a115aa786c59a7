"""The GPU metrics of a server against nvidia-smi."""

import shutil
import subprocess
import time
from urllib.request import urlopen

from benchmarks.gpu.parts import Notes, Setting, Skipped
from benchmarks.server import running_server
from tests.gpu import nvidia_smi

PATIENCE_S = 10.0


class Different(Exception):
    """Metrics that say something else than nvidia-smi."""


def measure(setting: Setting, notes: Notes) -> None:
    if shutil.which("nvidia-smi") is None:
        raise Skipped("nvidia-smi is not installed")
    repository = setting.work / "repository"
    repository.mkdir()
    options = [f"--model-repository={repository}", "--model-control-mode=explicit", "--metrics-interval-ms=100"]
    with running_server(None, setting.out / "metrics-server.log", *options) as server:
        until = time.monotonic() + PATIENCE_S
        # Other programs may change their memory between the two answers.
        while (found := _differences(server.metrics_url, notes)) and time.monotonic() < until:
            time.sleep(0.2)
    if found:
        raise Different("; ".join(found))


def _differences(url: str, notes: Notes) -> list[str]:
    answer = subprocess.run(nvidia_smi.COMMAND, capture_output=True, text=True, check=True).stdout
    with urlopen(url, timeout=PATIENCE_S) as response:
        page = response.read().decode()
    gpus = nvidia_smi.parse(answer)
    if not gpus:
        raise Skipped("nvidia-smi shows no GPU")
    found = nvidia_smi.differences(gpus, page)
    notes.note("against nvidia-smi", gpus=len(gpus), differences=len(found))
    return found
