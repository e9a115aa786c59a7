"""The rules of `make test-gpu`: reasons for skipping, nine minutes for all tests, and a table of claims at the end.

Each test has the marker `gpu` with the claim that it shows. Without `-m gpu` all are skipped.
"""

import os
import subprocess
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from sluice.cli.gpus import GpuFacts, read_driver
from tests.gpu import nvidia_smi, report
from tests.server_process import ServerProcess, running_command

LIMIT_S = 530.0
"""Nine minutes, less what pytest needs before and after."""
LONGEST_S = 240.0
PATIENCE_S = 60.0
_CLAIMS = pytest.StashKey[dict[str, report.Claim]]()
_STARTED = time.monotonic()


def _is_chosen(config: pytest.Config) -> bool:
    return bool(config.getoption("markexpr") == "gpu")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_CLAIMS] = {}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Name the claims, and put those that start engines last, so that a slow start costs no other its time."""
    if _is_chosen(config):
        items.sort(key=lambda item: item.path.stem == "test_language_models")
    for item in items:
        marker = item.get_closest_marker("gpu")
        if marker is not None:
            config.stash.setdefault(_CLAIMS, {})[item.nodeid] = report.Claim(claim_of(item, marker))
            if not _is_chosen(config):
                item.add_marker(pytest.mark.skip(reason="`make test-gpu` runs it"))


def claim_of(item: pytest.Item, marker: pytest.Mark) -> str:
    """Return the claim of a test: its marker's text with the test's parameters filled in."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return str(marker.args[0]).format(**parameters)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Give a test the time that is left, before pytest-timeout reads how much it has."""
    if item.get_closest_marker("gpu") and _is_chosen(item.config):
        left_s = LIMIT_S - (time.monotonic() - _STARTED)
        if left_s < 1:
            item.add_marker(pytest.mark.skip(reason="the nine minutes were over"))
        else:
            item.add_marker(pytest.mark.timeout(min(LONGEST_S, left_s)), append=False)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    phase = yield
    claim = item.config.stash.get(_CLAIMS, {}).get(item.nodeid)
    if claim is not None:
        claim.add(phase)
    return phase


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the table, and write it with the machine's description to a file."""
    claims = [*config.stash.get(_CLAIMS, {}).values()]
    if not claims or not _is_chosen(config):
        return
    lines = ["", *report.machine(), "", *report.table(claims), ""]
    report.FILE.parent.mkdir(exist_ok=True)
    report.FILE.write_text("\n".join(lines).lstrip())
    terminalreporter.write_line("\n".join(lines))
    terminalreporter.write_line(f"For an issue: {report.FILE}")


@pytest.fixture(scope="session")
def gpus() -> tuple[GpuFacts, ...]:
    """The GPUs of this machine, as NVML reports them."""
    driver = read_driver()
    if not driver.gpus:
        pytest.skip(f"no NVIDIA GPU: {driver.reason or 'the driver shows none'}")
    return driver.gpus


@pytest.fixture(scope="session")
def smi(gpus: tuple[GpuFacts, ...]) -> list[nvidia_smi.Gpu]:
    """The GPUs as nvidia-smi reports them at the start."""
    return ask_nvidia_smi()


def ask_nvidia_smi() -> list[nvidia_smi.Gpu]:
    try:
        done = subprocess.run(nvidia_smi.COMMAND, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        pytest.skip("nvidia-smi is not installed")
    return nvidia_smi.parse(done.stdout)


@dataclass
class RepositoryServer:
    """A running server, and the model repository that tests put their models into."""

    server: ServerProcess
    repository: Path

    def load(self, name: str) -> None:
        response = httpx.post(f"{self.server.base_url}/v2/repository/models/{name}/load", timeout=PATIENCE_S)
        assert response.status_code == 200, response.text

    def unload(self, name: str) -> None:
        httpx.post(f"{self.server.base_url}/v2/repository/models/{name}/unload", timeout=PATIENCE_S)

    def infer(self, name: str, values: list[float]) -> list[float]:
        """Return the first output of a model whose only input is a row of FP32 values."""
        tensor = {"name": "INPUT__0", "datatype": "FP32", "shape": [1, len(values)], "data": values}
        url = f"{self.server.base_url}/v2/models/{name}/infer"
        response = httpx.post(url, json={"inputs": [tensor]}, timeout=PATIENCE_S)
        assert response.status_code == 200, response.text
        return [float(each) for each in response.json()["outputs"][0]["data"]]

    def metrics(self) -> str:
        return httpx.get(self.server.metrics_url, timeout=PATIENCE_S).text


@pytest.fixture(scope="session")
def empty_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RepositoryServer]:
    """A server without a model yet. CUDA numbers GPUs as the driver does."""
    repository = tmp_path_factory.mktemp("repository")
    log = tmp_path_factory.mktemp("log") / "server"
    environment = {**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}  # noqa: TID251 - for the server's process
    arguments = [f"--model-repository={repository}", "--model-control-mode=explicit", "--allow-client-shm=true"]
    with running_command(log, *arguments, "--metrics-interval-ms=100", environment=environment) as server:
        server.wait_ready()
        yield RepositoryServer(server, repository)


@pytest.fixture
def triton(gpus: tuple[GpuFacts, ...], empty_server: RepositoryServer) -> RepositoryServer:
    """The same, on a machine with a GPU."""
    return empty_server
