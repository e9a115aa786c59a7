"""onnxruntime reports to its makers when it is imported: it keeps an identity and events in HOME, to send them. In a
process of ours, or of a model that we run, it does not."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import paths

SENTENCE_ENCODER = paths.ROOT / "models" / "sentence_encoder"
MODEL = """
import onnxruntime

class TritonPythonModel:
    def initialize(self, args):
        onnxruntime.InferenceSession(f"{args['model_repository']}/../sentence_encoder/1/model.onnx")

    def execute(self, requests):
        pass
"""


def left_files(home: Path, *arguments: str, **variables: str) -> set[str]:
    """Run Python with a HOME and a temporary folder of its own. Return the names of the files that it left there."""
    (home / "tmp").mkdir(parents=True)
    # Nothing else of the environment: where a variable says that a service of CI runs it, it reports nothing by itself.
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}  # noqa: TID251
    environment = kept | {"HOME": str(home), "TMPDIR": str(home / "tmp"), "XDG_CACHE_HOME": ""} | variables
    subprocess.run((sys.executable, *arguments), env=environment, check=True, capture_output=True)
    return {each.name for each in home.rglob("*") if each.is_file()}


def after(room: str) -> str:
    return f"import {room}, onnxruntime; onnxruntime.InferenceSession({str(SENTENCE_ENCODER / '1' / 'model.onnx')!r})"


@pytest.mark.slow
def test_it_would_report_and_ones_own_setting_wins(tmp_path: Path) -> None:
    found = left_files(tmp_path / "plain", "-c", after("sys"))
    assert {"deviceid", "onnxruntime.db"} <= found, (
        "it reports no more: the switch in sluice/__init__.py has no purpose"
    )
    found = left_files(tmp_path / "own", "-c", after("sluice"), ORT_DISABLE_TELEMETRY="0")
    assert {"deviceid", "onnxruntime.db"} <= found


@pytest.mark.slow
def test_it_reports_nothing_in_our_processes(tmp_path: Path) -> None:
    assert not left_files(tmp_path / "home", "-c", after("sluice.serving.backends.onnxruntime.backend"))


@pytest.mark.slow
def test_it_reports_nothing_from_models_that_a_command_loads(tmp_path: Path) -> None:
    shutil.copytree(SENTENCE_ENCODER, tmp_path / "models" / "sentence_encoder")
    (tmp_path / "models" / "own" / "1").mkdir(parents=True)
    (tmp_path / "models" / "own" / "1" / "model.py").write_text(MODEL)
    check = ("-m", "sluice.cli", "repository", "check", "--load", str(tmp_path / "models"))
    assert not {"deviceid", "onnxruntime.db", ".ses"} & left_files(tmp_path / "home", *check)
