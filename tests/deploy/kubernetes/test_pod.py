"""A pod of mode single, run without Kubernetes: its own command, probes, preStop and SIGTERM, under streams.

The container is the image's: its user, without capabilities, on a read-only root.
"""

import json
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Queue
from urllib.parse import urlsplit

import httpx
import pytest

from tests.deploy.container import Container, made_container
from tests.deploy.kubernetes.releases import container as described_container
from tests.deploy.kubernetes.releases import needs_helm
from tests.tools.helm import Manifest, render
from tests.waiting import PATIENCE_S, wait_until

pytestmark = needs_helm
NUM_TOKENS = 600
STREAM = {"model": "rill", "prompt": "Once", "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}


@pytest.fixture
def container() -> Iterator[Container]:
    with made_container() as made:
        yield made


class Streams:
    """Asks for one stream after the other, as a busy client does, until a request is refused."""

    def __init__(self, base_url: str) -> None:
        self.finish_reasons: list[str] = []
        self.broken: list[str] = []
        self.started: Queue[int] = Queue()
        """The number of each stream, put there with its first event."""
        self._client = httpx.Client(base_url=base_url, timeout=120.0)
        self._thread = threading.Thread(target=self._run, name="streams")
        self._thread.start()

    def _run(self) -> None:
        with self._client:
            for number in range(10_000):
                if not self._stream(number):
                    return

    def _stream(self, number: int) -> bool:
        """Read a stream to its end. False where the server takes no request any more."""
        lines: list[str] = []
        try:
            with self._client.stream("POST", "/v1/completions", json=STREAM) as answer:
                if answer.status_code == 503:
                    return False
                answer.raise_for_status()
                for line in answer.iter_lines():
                    if line.startswith("data: "):
                        if not lines:
                            self.started.put(number)
                        lines.append(line.removeprefix("data: "))
        except httpx.ConnectError:
            return False
        except httpx.HTTPError as error:
            if not lines:  # a connection that was kept open was closed between two streams
                return False
            self.broken.append(f"{number}: {error!r} after {len(lines)} events")
            return False
        if lines[-1] != "[DONE]":
            self.broken.append(f"{number}: ended with {lines[-1]}")
        reasons = [choice["finish_reason"] for each in lines[:-1] for choice in json.loads(each)["choices"]]
        self.finish_reasons.append(reasons[-1])
        return True

    def next_start(self) -> int:
        """Wait until a stream that starts from now on has its first event, and return its number."""
        while not self.started.empty():
            self.started.get_nowait()
        return self.started.get(timeout=120.0)

    def wait(self) -> None:
        self._thread.join(120.0)
        assert not self._thread.is_alive()


def on_free_ports(arguments: list[str]) -> list[str]:
    """Return the arguments with free ports in the place of the container's."""
    return [f"{each.partition('=')[0]}=0" if "-port=" in each else each for each in arguments]


def prober(pod: Manifest, base_url: str) -> Callable[[str], int]:
    """Return a function that sends one of the container's probes and returns the status; 0 without an answer."""
    port = urlsplit(base_url).port

    def probe(name: str) -> int:
        found = pod[name]["httpGet"]
        assert found["port"] == "http"
        try:
            return httpx.get(f"http://127.0.0.1:{port}{found['path']}", timeout=PATIENCE_S).status_code
        except httpx.TransportError:
            return 0

    return probe


@pytest.mark.long
@pytest.mark.timeout(500)
def test_a_pod_starts_serves_and_ends_its_streams(container: Container, tmp_path: Path) -> None:
    rendered = render({"shutdown": {"preStopSeconds": 2, "exitTimeoutSeconds": 110}})
    pod = described_container(rendered, "server")
    arguments = on_free_ports(pod["args"])
    assert arguments != pod["args"]
    log_path = tmp_path / "log"
    with container.serving(log_path, arguments) as (process, base_url):
        probe = prober(pod, base_url)

        def has_started() -> bool:
            assert process.poll() is None, log_path.read_text()
            assert probe("livenessProbe") == 200, "a pod that loads would be killed"
            return probe("startupProbe") == 200

        wait_until(has_started, lambda: log_path.read_text())
        assert probe("readinessProbe") == 200
        streams = Streams(base_url)
        streams.next_start()
        # The kubelet runs preStop in the container. Requests are served until SIGTERM follows.
        command = pod["lifecycle"]["preStop"]["exec"]["command"]
        assert container.run(*command).returncode == 0
        assert probe("readinessProbe") == 200
        last = streams.next_start()
        process.send_signal(signal.SIGTERM)
        assert process.wait(120.0) == 0, log_path.read_text()
        streams.wait()
    assert streams.broken == []
    # The stream that had begun before SIGTERM has come to its end.
    assert len(streams.finish_reasons) >= last + 1
    assert set(streams.finish_reasons) == {"length"}
    assert "still open" not in log_path.read_text()
