"""Commands where OpenVINO cannot be imported: a package of its name, found before it, raises ImportError."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine.config import EngineConfig, Runtime
from engine.loop.load import load_runner
from sluice.bundled import models_folder
from sluice.errors import ErrorCode, SluiceError

MODEL = models_folder() / "rill" / "1"
REASON = "libopenvino.so: cannot open shared object file"
FREE_PORTS = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    package = folder / "path" / "openvino"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"raise ImportError({REASON!r})\n")
    command = ["env", f"PYTHONPATH={package.parent}", sys.executable, "-m", "cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def findings(done: subprocess.CompletedProcess[str]) -> dict[tuple[str, str], str]:
    """Return the texts of a report of `sluice doctor --json`, by subject and level."""
    report = json.loads(done.stdout)
    return {(each["subject"], each["level"]): each["text"] for each in report["findings"]}


def test_every_command_can_be_explained(tmp_path: Path) -> None:
    done = run(tmp_path, "--help")
    assert (done.returncode, done.stderr) == (0, "")


def test_doctor_says_that_the_bundled_runtime_is_broken(tmp_path: Path) -> None:
    done = run(tmp_path, "doctor", "--json", "--runtime", "openvino", *FREE_PORTS, str(MODEL))
    assert done.returncode == 1, done.stderr
    found = findings(done)
    assert found["OpenVINO", "fail"] == f"it cannot be imported: {REASON}"
    assert found["rill", "fail"] == f"OpenVINO cannot be imported: {REASON}"


@pytest.mark.torch
def test_doctor_finds_nothing_wrong_where_torch_is_to_serve(tmp_path: Path) -> None:
    done = run(tmp_path, "doctor", "--json", "--runtime", "torch", *FREE_PORTS, str(MODEL))
    assert done.returncode == 0, done.stdout
    assert findings(done)["OpenVINO", "note"] == f"it cannot be imported: {REASON}"


def test_a_build_for_it_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, "build", str(MODEL), "--output", str(tmp_path / "models"), "--runtime", "openvino")
    message = f"sluice build: error: a build for OpenVINO needs it, and it cannot be imported: {REASON}\n"
    assert (done.returncode, done.stderr) == (2, message)


def test_a_build_for_another_runtime_does_without(tmp_path: Path) -> None:
    arguments = ["--output", str(tmp_path / "models"), "--runtime", "tensorrt_llm", "--dry-run"]
    done = run(tmp_path, "build", str(MODEL), *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert "sluice serve --model-repository" in done.stdout


def test_an_engine_says_which_runtime_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "engine.runners.openvino.runner", None)  # its import raises ImportError
    with pytest.raises(SluiceError, match=r"--runtime openvino cannot be imported: .*; `sluice doctor`") as caught:
        load_runner(EngineConfig(model_path=str(MODEL), runtime=Runtime.OPENVINO))
    assert (caught.value.code, caught.value.param) == (ErrorCode.UNAVAILABLE, "runtime")
