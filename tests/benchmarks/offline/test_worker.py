import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.figures import BenchmarkError
from benchmarks.offline.protocol import WorkerOptions
from benchmarks.offline.worker import Launch, running_worker

REQUESTS = [([1, 2, 3], 4), ([5], 6)]


def launch(model: str) -> Launch:
    module = "tests.benchmarks.offline.echo_worker"
    return Launch("Echo", Path(sys.executable), module, WorkerOptions(model, 1, 2), ("ECHO=1",))


@pytest.mark.slow
def test_a_worker_answers_each_job_and_is_gone_after(tmp_path: Path) -> None:
    others = set(psutil.Process().children())
    with running_worker(launch("good"), tmp_path / "log") as worker:
        assert worker.version == "echo 1"
        assert worker.launch_s > 0
        assert worker.batch(REQUESTS) > 0
        times = worker.single(([1], 5))
        assert worker.rss_mb() > 1
        (started,) = set(psutil.Process().children()) - others
    assert len(times) == 5
    assert times == sorted(times)
    assert times[0] >= 0
    assert not started.is_running()
    assert "a library's greeting" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("short", "Echo generated 9 tokens, asked for 10"),
        ("crashing", r"Echo ended; see .*log"),
        ("unloadable", "ended"),
    ],
)
@pytest.mark.slow
def test_a_worker_that_misbehaves_gives_no_figure(model: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match=message), running_worker(launch(model), tmp_path / "log") as worker:
        worker.batch(REQUESTS)
