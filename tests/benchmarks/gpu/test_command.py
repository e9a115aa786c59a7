"""`python -m benchmarks.gpu` on the CPU: its parts on small shapes, and parts that fail alone."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu.parts import PARTS, Part

WITHOUT_A_GPU = {"metrics"}
"""Parts that there is nothing to measure for."""


def run(out: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    status = command.main(["--tiny", "--device=cpu", f"--out={out}", *arguments])
    return status, json.loads((out / "summary.json").read_text())["parts"]


@pytest.mark.torch
@pytest.mark.timeout(400)
def test_every_part_measures_something_on_the_cpu(tmp_path: Path) -> None:
    status, parts = run(tmp_path)
    assert [*parts] == [part.name for part in PARTS]
    assert not {name: result["error"] for name, result in parts.items() if "error" in result}
    assert status == 0
    skipped = {name for name, result in parts.items() if "skipped" in result}
    assert skipped <= WITHOUT_A_GPU | {"kernels"}
    assert all(parts[name]["figures"] for name in parts.keys() - skipped)
    assert parts["executor"]["figures"]["8B under pressure"]["preemptions"] == 0
    assert parts["server"]["figures"]["seed"]["is_reproducible"]
    assert json.loads((tmp_path / "decoder.json").read_text())["figures"] == parts["decoder"]["figures"]
    assert (tmp_path / "decode-trace.json.gz").stat().st_size


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("exit 3", "its process ended with 3; see ceilings.log"),
        ("kill -11 $$", "its process ended with -11; see ceilings.log"),
        ("exec sleep 60", "it took more than 1 s; see ceilings.log"),
    ],
)
@pytest.mark.slow
def test_a_part_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, expected: str) -> None:
    """Its figures until then stay, and the next part runs."""
    monkeypatch.setattr(command, "PATIENCE", 1)
    monkeypatch.setattr(command, "LEAST_S", 0)
    write = f"""echo '{{"figures": {{"memory": {{}}}}}}' > {tmp_path}/ceilings.json"""
    programs = {"ceilings": f"{write}; {program}", "profile": "exit 0"}
    parts = (Part("ceilings", 1 if "sleep" in program else 60, "ceilings"), Part("profile", 60, "profile"))
    monkeypatch.setattr(command, "PARTS", parts)
    monkeypatch.setattr(command, "_command", lambda part, *_: ["sh", "-c", programs[part.name]])
    status, results = run(tmp_path)
    assert status == 1
    assert results["ceilings"]["error"] == expected
    assert results["ceilings"]["figures"] == {"memory": {}} or "more than" in expected
    assert "profile" in results


@pytest.mark.slow
def test_a_library_that_is_missing_is_the_error_of_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    status, parts = run(tmp_path, "--parts=ceilings,versions")
    assert status == 1
    assert parts["ceilings"]["error"] == "ImportError: no torch here"
    assert parts["versions"]["figures"]["python"]


@pytest.mark.slow
def test_wheels_of_a_folder_are_there_for_the_run_alone(tmp_path: Path) -> None:
    metadata = "carried-1.dist-info"
    with zipfile.ZipFile(tmp_path / "carried-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried.py", "print('carried')")
        wheel.writestr(f"{metadata}/METADATA", "Metadata-Version: 2.1\nName: carried\nVersion: 1\n")
        wheel.writestr(f"{metadata}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{metadata}/RECORD", "")
    program = [sys.executable, "-c", "import carried"]
    with command.installed_wheels(tmp_path) as environment:
        assert subprocess.run(program, env=environment, capture_output=True, text=True).stdout == "carried\n"
    assert subprocess.run(program, env=environment, capture_output=True).returncode


def test_parts_beyond_the_time_are_not_started(tmp_path: Path) -> None:
    status, parts = run(tmp_path, "--limit=0")
    assert status == 0
    assert {result["skipped"] for result in parts.values()} == {"the time was over"}


def test_an_unknown_part_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([f"--out={tmp_path}", "--parts=ceilings,speed"]) == 2
    assert "no part speed" in capsys.readouterr().err
