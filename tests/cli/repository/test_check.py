"""`sluice repository check`: its text, its JSON and its exit codes."""

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sluice.cli.__main__ import main
from sluice.cli.repository.check import AnsiStyle
from sluice.cli.repository.command import command
from tests.stand_ins.model_folders import make_checkpoint

PYTHON = """backend: "python"
input [ { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ -1 ] } ]
"""
NOTED = f"{PYTHON}optimization {{ priority: PRIORITY_MAX }}\n"
REMEDIED = PYTHON.replace("INT32 dims: [ -1 ] } ]\noutput", "FLOAT dims: [ -1 ] } ]\noutput")


def write(
    root: Path, name: str, config: str, code: str = "class TritonPythonModel:\n    def execute(self, r): ...\n"
) -> None:
    (root / name / "1").mkdir(parents=True)
    (root / name / "config.pbtxt").write_text(config)
    (root / name / "1" / "model.py").write_text(code)


def check(*arguments: str | Path) -> int:
    try:
        return command(["check", *map(str, arguments)])
    except SystemExit as end:
        assert isinstance(end.code, int)
        return end.code


def test_everything_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "a", PYTHON)
    assert check(tmp_path) == 0
    assert capsys.readouterr().out == ("ok     a  python, version 1\n\n1 model: 1 ok, 0 with notes, 0 would not load\n")


def test_each_model_has_its_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "fine", PYTHON)
    write(tmp_path, "noted", NOTED)
    write(tmp_path, "remedied", REMEDIED)
    assert check(tmp_path) == 1
    assert capsys.readouterr().out == (
        "ok     fine      python, version 1\n"
        "notes  noted     python, version 1\n"
        f"       note: {tmp_path}/noted/config.pbtxt:4: optimization.priority is not obeyed: models share the "
        "processors evenly\n"
        "error  remedied  python, version 1\n"
        f"       error: {tmp_path}/remedied/config.pbtxt:2:22: data_type has no value named TYPE_FLOAT\n"
        "         write: data_type: TYPE_FP32\n"
        "\n"
        "3 models: 1 ok, 1 with notes, 1 would not load\n"
    )


def test_models_of_python_based_backends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "models" / "my.echo" / "1").mkdir(parents=True)
    (tmp_path / "backends" / "echo").mkdir(parents=True)
    (tmp_path / "backends" / "echo" / "model.py").write_text("import nowhere")
    assert check("--backend-directory", tmp_path / "backends", tmp_path / "models") == 1
    assert f"{tmp_path}/backends/echo/model.py:1: it imports 'nowhere'" in capsys.readouterr().out
    (tmp_path / "backends" / "echo" / "model.py").write_text("import numpy")
    assert check("--backend-directory", tmp_path / "backends", tmp_path / "models") == 0
    assert capsys.readouterr().out.startswith("ok     my.echo  echo, version 1\n")
    assert check("--backend-directory", tmp_path / "nowhere", tmp_path / "models") == 2


def test_notes_fail_where_that_is_asked(tmp_path: Path) -> None:
    write(tmp_path, "noted", NOTED)
    assert (check(tmp_path), check("--strict", tmp_path)) == (0, 1)


def test_for_machines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "fine", PYTHON)
    write(tmp_path, "remedied", REMEDIED)
    assert check("--json", tmp_path) == 1
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert report["summary"] == {"models": 2, "ok": 1, "notes": 0, "error": 1}
    fine, remedied = report["models"]
    assert fine == {
        "name": "fine", "folders": [f"{tmp_path}/fine"], "verdict": "ok", "backend": "python", "versions": [1],
        "errors": [], "notes": [],
    }  # fmt: skip
    assert remedied["errors"] == [
        {
            "message": "data_type has no value named TYPE_FLOAT",
            "field": "input[0].data_type",
            "file": f"{tmp_path}/remedied/config.pbtxt",
            "line": 2,
            "column": 22,
            "write": "data_type: TYPE_FP32",
        }
    ]


@pytest.mark.slow
def test_loading_finds_what_no_look_can(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "fine", PYTHON)
    write(tmp_path, "raises", PYTHON, "raise RuntimeError('not this one')")
    write(tmp_path, "remedied", REMEDIED)
    assert check(tmp_path / ".." / tmp_path.name) == 1
    assert "raises    python, version 1" in capsys.readouterr().out
    assert check("--load", "--json", tmp_path) == 1
    models = {each["name"]: each for each in json.loads(capsys.readouterr().out)["models"]}
    assert models["fine"]["verdict"] == "ok"
    (error,) = models["raises"]["errors"]
    assert error["message"].startswith("version 1 cannot be loaded: ")
    assert "RuntimeError: not this one" in error["message"]
    assert [each["line"] for each in models["remedied"]["errors"]] == [2]


def test_a_language_model_says_what_would_run_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    version = tmp_path / "m" / "1"
    make_checkpoint(version, with_tokenizer=True)
    (version / "model.safetensors").touch()
    parameter = 'parameters { key: "%s" value { string_value: "%s" } }\n'
    values = (("runtime", "openvino"), ("max_num_seqs", "8"), ("gpu_device_ids", "0"))
    parameters = "".join(parameter % each for each in values)
    (tmp_path / "m" / "config.pbtxt").write_text(f'backend: "tensorrtllm"\n{parameters}')
    assert check(tmp_path) == 0
    assert capsys.readouterr().out == (
        "ok     m  tensorrtllm, version 1\n"
        "       runtime: openvino, as it was asked for\n"
        "       obeyed: max_num_seqs, runtime\n"
        "       without effect: gpu_device_ids: there is no GPU to set up\n"
        "\n"
        "1 model: 1 ok, 0 with notes, 0 would not load\n"
    )
    assert check("--json", tmp_path) == 0
    (report,) = json.loads(capsys.readouterr().out)["models"]
    assert report["runtime"] == {
        "runtime": "openvino",
        "reason": "it was asked for",
        "obeyed": ["max_num_seqs", "runtime"],
        "unused": ["gpu_device_ids: there is no GPU to set up"],
    }


@pytest.mark.slow
def test_ensembles_over_two_repositories(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "one", "a", PYTHON)
    ensemble = tmp_path / "other" / "e"
    (ensemble / "1").mkdir(parents=True)
    (ensemble / "config.pbtxt").write_text(
        PYTHON.replace('backend: "python"', 'platform: "ensemble"')
        + """ensemble_scheduling { step { model_name: "a" model_version: -1
          input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "OUT" } } }"""
    )
    assert check("--load", tmp_path / "one", tmp_path / "other") == 0
    assert check(tmp_path / "other") == 1
    assert "contains models that are not available or ambiguous: a" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((), "sluice repository check: error: the following arguments are required: PATH (see sluice repository check "
             "--help)\n"),
        (("--lode", "{root}"), "sluice repository check: error: unknown option --lode; did you mean --load? (see "
         "sluice repository check --help)\n"),
        (("{root}/nowhere",), "sluice repository check: error: {root}/nowhere is no folder\n"),
        (("{root}/a",), "sluice repository check: error: {root}/a is a model, not a repository of models; its "
                        "repository is {root}\n"),
    ],
)  # fmt: skip
def test_what_cannot_be_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], error: str
) -> None:
    write(tmp_path, "a", PYTHON)
    assert check(*(each.format(root=tmp_path) for each in arguments)) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", error.format(root=tmp_path))


def test_a_command_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        command([])
    assert end.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_it_is_a_command_of_sluice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "a", PYTHON)
    assert main(["repository", "check", str(tmp_path)]) == 0
    assert "1 model: 1 ok" in capsys.readouterr().out


def test_a_check_imports_no_runtime_that_no_model_needs(tmp_path: Path) -> None:
    (tmp_path / "o" / "1").mkdir(parents=True)
    (tmp_path / "o" / "1" / "model.onnx").write_bytes(b"onnx")
    write(tmp_path, "p", PYTHON)
    heavy = ["openvino", "torch", "transformers", "fastapi"]
    script = (
        f"import sys; from sluice.cli.__main__ import main; main(['repository', 'check', {str(tmp_path)!r}]); "
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colours_are_for_terminals() -> None:
    assert AnsiStyle(_Terminal())("ok", "32") == "\x1b[32mok\x1b[0m"
    assert AnsiStyle(io.StringIO())("ok", "32") == "ok"
