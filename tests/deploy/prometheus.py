"""Runs a real Prometheus with the shipped configuration, and promtool."""

import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests import paths
from tests.ports import ReservedPort
from tests.waiting import PATIENCE_S, wait_until

SHIPPED = paths.ROOT / "deploy" / "prometheus"
SCRAPE_S = 1

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="prometheus and promtool are not installed (apt-get install prometheus)",
)


def promtool(*arguments: str | Path, input: str | None = None) -> subprocess.CompletedProcess[str]:
    command = ["promtool", *map(str, arguments)]
    return subprocess.run(command, input=input, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def configured(folder: Path, target: str, api_key: str) -> Path:
    """Write the shipped configuration to `folder`, changed for one server and short intervals."""
    shutil.copytree(SHIPPED, folder, dirs_exist_ok=True)
    key_file = folder / "api_key"
    key_file.write_text(api_key)
    path = folder / "prometheus.yml"
    config = yaml.safe_load(path.read_text())
    every = f"{SCRAPE_S}s"
    config["global"] |= {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every}
    [ours] = [each for each in config["scrape_configs"] if each["job_name"] == "sluice"]
    ours["authorization"]["credentials_file"] = str(key_file)
    path.write_text(yaml.safe_dump(config))
    (folder / "targets" / "sluice.yml").write_text(yaml.safe_dump([{"targets": [target]}]))
    recording = folder / "recording" / "sluice.yml"
    recording.write_text(recording.read_text().replace("interval: 1m", f"interval: {every}"))
    return path


def backfill(data: Path, series: Mapping[str, float], begin_s: float, end_s: float) -> None:
    """Write samples of `series` every 15 seconds between two times, as if they had been recorded."""
    names = {series_name.partition("{")[0] for series_name in series}
    lines = [f"# TYPE {name} gauge" for name in sorted(names)]
    for name, value in series.items():
        lines += [f"{name} {value} {begin_s + step * 15:.3f}" for step in range(int((end_s - begin_s) / 15))]
    recorded = data.with_suffix(".openmetrics")
    recorded.write_text("\n".join([*lines, "# EOF", ""]))
    made = promtool("tsdb", "create-blocks-from", "openmetrics", recorded, data)
    assert made.returncode == 0, made.stderr + made.stdout


class Prometheus:
    """The API of a running Prometheus."""

    def __init__(self, url: str, log_path: Path) -> None:
        self._client = httpx.Client(base_url=url, timeout=10.0)
        self._log_path = log_path

    def get(self, path: str, **parameters: str) -> Any:
        answer = self._client.get(f"/api/v1/{path}", params=parameters)
        body = answer.json()
        assert body["status"] == "success", body
        return body["data"]

    def query(self, promql: str) -> list[dict[str, Any]]:
        """Return the series of an instant query, without those that are NaN."""
        result: list[dict[str, Any]] = self.get("query", query=promql)["result"]
        return [series for series in result if series["value"][1] != "NaN"]

    def wait(self, condition: Callable[[], bool], what: object) -> None:
        """Wait until the condition holds. Fails after a deadline, and says `what` is missing then."""
        wait_until(condition, lambda: f"{what}\n{self._log_path.read_text()[-3000:]}")

    def is_ready(self) -> bool:
        try:
            return self._client.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def close(self) -> None:
        self._client.close()


@contextmanager
def running_prometheus(config: Path, data: Path) -> Iterator[Prometheus]:
    port = ReservedPort()
    where = (f"--storage.tsdb.path={data}", f"--web.listen-address=127.0.0.1:{port.number}")
    with started(["prometheus", f"--config.file={config}", *where], port.number, config.parent) as prometheus:
        yield prometheus


@contextmanager
def started(
    command: Sequence[str], port: int, folder: Path, environment: Mapping[str, str] | None = None
) -> Iterator[Prometheus]:
    """Run `command` and yield its Prometheus once it is ready. Its log goes to `folder`."""
    log_path = folder / "prometheus.log"
    with log_path.open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    prometheus = Prometheus(f"http://127.0.0.1:{port}", log_path)
    try:
        prometheus.wait(prometheus.is_ready, "Prometheus did not start")
        yield prometheus
    finally:
        prometheus.close()
        process.terminate()
        process.wait(PATIENCE_S)
