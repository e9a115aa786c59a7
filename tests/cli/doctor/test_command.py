"""`sluice doctor` on this machine, whether it has GPUs or not."""

import json
import socket
from pathlib import Path

import pytest

from sluice.bundled import models_folder
from sluice.cli.doctor.command import command
from sluice.cli.gpus import NvidiaDriver
from tests.stand_ins.model_folders import make_compiled_engine
from tests.stand_ins.paths import STAND_INS

MODEL = models_folder() / "rill" / "1"
FREE_PORTS = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = command([*FREE_PORTS, *arguments])
    return code, capsys.readouterr().out


def test_the_machine_alone_is_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    code, output = run(capsys)
    assert code == 0
    assert len(output.splitlines()) <= 24
    assert "CPU" in output and "libraries" in output and output.rstrip().splitlines()[-1].startswith("Will work")


def test_a_model_is_told_with_its_runtime(capsys: pytest.CaptureFixture[str]) -> None:
    code, output = run(capsys, "--json", "--runtime", "openvino", str(MODEL))
    report = json.loads(output)
    texts = [finding["text"] for finding in report["findings"] if finding["subject"] == "rill"]
    assert (code, report["verdict"]) in ((0, "ok"), (0, "note"))
    assert any("runs on OpenVINO: it was asked for" in text for text in texts)


def test_a_repository_s_language_models_are_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, parameters in (
        ("good", f'parameters {{ key: "gpt_model_path" value {{ string_value: "{MODEL}" }} }}'),
        ("empty", ""),
    ):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "config.pbtxt").write_text(f'backend: "llm"\n{parameters}')
    code, output = run(capsys, "--json", "--runtime", "openvino", str(tmp_path))
    levels = {(finding["subject"], finding["level"]) for finding in json.loads(output)["findings"]}
    assert code == 1 and ("empty", "fail") in levels
    assert ("good", "ok") in levels and ("good", "fail") not in levels
    _, default_output = run(capsys, "--json", str(tmp_path))
    assert "runs on" in default_output and "it was asked for" not in default_output


def test_what_is_asked_of_a_machine_without_it_fails(capsys: pytest.CaptureFixture[str]) -> None:
    code, output = run(capsys, "--runtime", "tensorrt_llm", "--tensor-parallel-size", "64", str(MODEL))
    assert code == 1
    assert output.rstrip().splitlines()[-1].startswith("Will not work as it is")


def test_a_model_that_runs_on_gpus_alone_needs_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorRT-LLM's image, started without the GPUs."""
    monkeypatch.syspath_prepend(str(STAND_INS))
    monkeypatch.setattr("sluice.cli.doctor.machine.read_driver", lambda: NvidiaDriver(reason="no driver"))
    code, output = run(capsys, "--json", str(make_compiled_engine(tmp_path / "engine")))
    assert code == 1
    failing = {each["subject"]: each["text"] for each in json.loads(output)["findings"] if each["level"] == "fail"}
    assert failing["GPU"] == "no NVIDIA GPU: no driver"


def test_a_port_that_is_taken_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command([*FREE_PORTS, "--http-port", str(port)])
        monkeypatch.setenv("SLUICE_HTTP_PORT", str(port))
        command(FREE_PORTS[2:])
    assert capsys.readouterr().out.count(f"{port} is taken") == 2
    monkeypatch.setenv("SLUICE_HTTP_PORT", "many")
    assert command([]) == 2
    assert "SLUICE_HTTP_PORT must be a whole number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("/no/such/folder", "/no/such/folder is no folder"),
        ("/", "is neither a model's folder"),
        ("acme/never-downloaded", ""),
    ],
)
def test_paths_that_are_no_model(path: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = command([*FREE_PORTS, path])
    streams = capsys.readouterr()
    if error:
        assert code == 2 and error in streams.err
    else:
        assert code == 0 and "not in the hub's local cache" in " ".join(streams.out.split())
