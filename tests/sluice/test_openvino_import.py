"""OpenVINO's converter, which reports to OpenVINO's makers, stays out of our processes until somebody calls it."""

import subprocess
import sys
from functools import cache

import pytest

LIST = (
    "import sys, openvino; print(*(name for name in sys.modules if name.startswith('openvino')), openvino.__version__)"
)
CONVERT = """
import openvino
for _ in range(2):
    try:
        openvino.convert_model("/none.onnx")
    except Exception as error:
        print(type(error).__module__)
"""


@cache
def run(program: str) -> list[str]:
    done = subprocess.run((sys.executable, "-c", program), capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.slow
@pytest.mark.parametrize(
    "room", ["sluice.engine.runners.openvino", "sluice.serving.backends.openvino", "sluice.serving.backends.tensorflow"]
)
def test_nothing_that_reports_is_imported(room: str) -> None:
    assert "openvino_telemetry" in run(LIST), "OpenVINO reports no more: sluice/openvino_import.py has no purpose"
    assert "openvino_telemetry" not in run(f"import {room}; {LIST}")


@pytest.mark.slow
def test_the_converter_comes_when_it_is_called() -> None:
    expected = ["openvino.tools.ovc.error"] * 2
    assert run(f"import sluice.engine.runners.openvino\n{CONVERT}") == expected
    assert run(f"import openvino, sluice.engine.runners.openvino\n{CONVERT}") == expected
