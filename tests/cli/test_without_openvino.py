"""Commands where OpenVINO cannot be imported: a package of its name, found before it, raises ImportError."""

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from sluice.bundled import models_folder
from sluice.engine.config import EngineConfig, Runtime
from sluice.engine.loop.load import load_runner
from sluice.errors import ErrorCode, SluiceError
from tests.waiting import PATIENCE_S

MODEL = models_folder() / "rill" / "1"
REASON = "libopenvino.so: cannot open shared object file"
FREE_PORTS = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]


RUN_EACH = """
import contextlib, io, json, sys
from sluice.cli.__main__ import main
for argv in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(argv)
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""


class Ended(NamedTuple):
    code: int
    out: str
    err: str

    def findings(self) -> dict[tuple[str, str], str]:
        """Return the texts of a report of `sluice doctor --json`, by subject and level."""
        return {(each["subject"], each["level"]): each["text"] for each in json.loads(self.out)["findings"]}


def run(folder: Path, *commands: list[str]) -> list[Ended]:
    """Run commands one after the other, in one process."""
    package = folder / "path" / "openvino"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"raise ImportError({REASON!r})\n")
    command = ["env", f"PYTHONPATH={package.parent}", sys.executable, "-c", RUN_EACH]
    done = subprocess.run(command, input=json.dumps(commands), capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return [Ended(*json.loads(line)) for line in done.stdout.splitlines()]


def doctor(runtime: str) -> list[str]:
    return ["doctor", "--json", "--runtime", runtime, *FREE_PORTS, str(MODEL)]


def test_commands_say_that_the_bundled_runtime_is_broken_and_do_without_where_they_can(tmp_path: Path) -> None:
    build = ["build", str(MODEL), "--output", str(tmp_path / "models"), "--runtime"]
    help_, looked, refused, planned = run(
        tmp_path, ["--help"], doctor("openvino"), [*build, "openvino"], [*build, "tensorrt_llm", "--dry-run"]
    )
    assert (help_.code, help_.err) == (0, "")
    assert looked.code == 1
    assert looked.findings()["OpenVINO", "fail"] == f"it cannot be imported: {REASON}"
    assert looked.findings()["rill", "fail"] == f"OpenVINO cannot be imported: {REASON}"
    message = f"sluice build: error: a build for OpenVINO needs it, and it cannot be imported: {REASON}\n"
    assert (refused.code, refused.err) == (2, message)
    assert (planned.code, planned.err) == (0, "")
    assert "sluice serve --model-repository" in planned.out


@pytest.mark.torch
def test_doctor_finds_nothing_wrong_where_torch_is_to_serve(tmp_path: Path) -> None:
    [done] = run(tmp_path, doctor("torch"))
    assert done.code == 0, done.out
    assert done.findings()["OpenVINO", "note"] == f"it cannot be imported: {REASON}"


def test_an_engine_says_which_runtime_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sluice.engine.runners.openvino.runner", None)  # its import raises ImportError
    with pytest.raises(SluiceError, match=r"--runtime openvino cannot be imported: .*; `sluice doctor`") as caught:
        load_runner(EngineConfig(model_path=str(MODEL), runtime=Runtime.OPENVINO))
    assert (caught.value.code, caught.value.param) == (ErrorCode.UNAVAILABLE, "runtime")
