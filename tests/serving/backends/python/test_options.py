"""Options of the command line, and parameters of models."""

import logging
import sys
from pathlib import Path

import pytest

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.backends.python.backend import PythonBackend
from sluice.serving.backends.python.options import PythonOptions, check_parameters, parse_options
from tests.serving.backends.python.parts import TEXT, ask, children, context, loaded, source_of, write_model

CODE = """
class TritonPythonModel:
    def execute(self, requests):
        return [text(sys.executable) for _ in requests]
"""


def test_options_are_obeyed_or_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    given = {
        "shm-default-byte-size": "1048576",
        "shm-growth-byte-size": "1048576",
        "shm-region-prefix-name": "mine",
        "thread-pool-size": "4",
        "stub-timeout-seconds": "7",
        "python-runtime": "/opt/python",
        "speed": "11",
    }
    assert parse_options(given) == PythonOptions(7.0, Path("/opt/python"))
    said = [record.message for record in caplog.records]
    assert [line.split()[0].removeprefix("--backend-config=python,") for line in said] == [
        *("shm-default-byte-size", "shm-growth-byte-size", "shm-region-prefix-name", "thread-pool-size", "speed")
    ]
    assert said[0].endswith("changes nothing: shared memory is anonymous, and grows and shrinks with the tensors")
    assert said[-1].endswith("is not known and has no effect")
    assert parse_options({}) == PythonOptions()


@pytest.mark.parametrize("value", ["soon", "0", "-1", "inf", "nan"])
def test_a_time_limit_is_a_number_of_seconds(value: str) -> None:
    with pytest.raises(SluiceError, match="takes a number of seconds above 0") as caught:
        parse_options({"stub-timeout-seconds": value})
    assert caught.value.code is ErrorCode.INVALID


def test_options_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    backend, options = PythonBackend(), context(backend_options={"python": {"shm-growth-byte-size": "1"}})
    for _ in range(2):
        backend._parse_options(options)
    assert len([record for record in caplog.records if "shm-growth-byte-size" in record.message]) == 1


async def test_models_run_in_another_interpreter(tmp_path: Path) -> None:
    runtime = tmp_path / "python"
    runtime.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"')
    runtime.chmod(0o755)
    options = {"python": {"python-runtime": str(runtime)}}
    async with loaded(write_model(tmp_path / "model", CODE), backend_options=options) as model:
        assert await ask(model, "") == sys.executable
    options["python"]["python-runtime"] = str(tmp_path / "no-python")
    with pytest.raises(SluiceError, match="no-python' cannot be run: No such file or directory"):
        async with loaded(write_model(tmp_path / "model", CODE), backend_options=options):
            pass


async def test_a_process_that_does_not_come_up_is_given_up(tmp_path: Path) -> None:
    """The interpreter answers what it is, and then hangs."""
    runtime = tmp_path / "python"
    runtime.write_text(f'#!/bin/sh\n[ "$1" = -I ] && exec {sys.executable} "$@"\nexec sleep 1000')
    runtime.chmod(0o755)
    options = {"python": {"python-runtime": str(runtime), "stub-timeout-seconds": "0.2"}}
    with pytest.raises(SluiceError, match=r"Timed out after 0\.2 s: the process 'model_0' is not up"):
        async with loaded(write_model(tmp_path / "model", CODE), backend_options=options):
            pass
    assert not children()


@pytest.mark.parametrize("value", ["yes", "no"])
def test_a_parameter_says_something_that_there_is(tmp_path: Path, value: str) -> None:
    """`sluice repository check` and a load refuse others alike."""
    parameter = f'parameters {{ key: "FORCE_CPU_ONLY_INPUT_TENSORS" value {{ string_value: "{value}" }} }}'
    check_parameters(source_of(tmp_path / "model", f'backend: "python" {parameter} {TEXT}').config)
