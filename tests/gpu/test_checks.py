"""The checks of `make test-gpu` themselves, on stand-ins: what they would say on a machine with GPUs."""

from pathlib import Path
from typing import Any

import pytest

from gateway.telemetry.machine import GpuSample
from tests.gateway.telemetry.test_machine import page
from tests.gpu import nvidia_smi
from tests.gpu.conftest import RepositoryServer
from tests.gpu.models import ONNX_COLUMNS, ONNX_ROWS, configure, onnx_model, write_place
from tests.gpu.report import Claim, table
from tests.gpu.test_language_models import clear_tokens, ids
from tests.server_process import running_command
from tests.vllm.conftest import PROMPTS, RILL, complete

_MIB = 1 << 20
ROW = "GPU-1, 0, NVIDIA H100, 580.1, 81559, 1000, 500, 700.00"
SAMPLE = GpuSample(
    "GPU-1", 0.5, 81559 * _MIB, 1500 * _MIB, 300.0, 700.0, 1.0, index=0, name="NVIDIA H100", driver_version="580.1"
)


@pytest.mark.parametrize("row", [ROW, ROW.replace("700.00", "[N/A]")])
def test_equal_values_are_no_difference(row: str) -> None:
    assert nvidia_smi.differences(nvidia_smi.parse(f"{row}\n"), page(SAMPLE)) == []


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (ROW.replace("GPU-1", "GPU-2"), "GPU-2 is missing"),
        (ROW.replace("H100", "H200"), "name is NVIDIA H100, nvidia-smi has NVIDIA H200"),
        (ROW.replace("580.1", "590.2"), "driver_version is 580.1, nvidia-smi has 590.2"),
        (ROW.replace("81559", "40000"), "nv_gpu_memory_total_bytes is"),
        (ROW.replace("1000", "9000"), "nv_gpu_memory_used_bytes is"),
        (ROW.replace("700.00", "350.00"), "nv_gpu_power_limit is 700.0"),
    ],
)
def test_another_value_is_a_difference(row: str, expected: str) -> None:
    differences = nvidia_smi.differences(nvidia_smi.parse(f"{row}\n"), page(SAMPLE))
    assert any(expected in each for each in differences), differences


def phase(when: str, outcome: str, longrepr: Any = None) -> pytest.TestReport:
    return pytest.TestReport("test", ("", None, ""), {}, outcome, longrepr, when, duration=1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("phases", "row"),
    [
        ([("setup", "passed"), ("call", "passed"), ("teardown", "passed")], "| claim | shown |  | 4.5 |"),
        ([("setup", "skipped", ("", 1, "Skipped: no GPU: a|b"))], "| claim | skipped | no GPU: a\\|b | 1.5 |"),
        ([("setup", "passed"), ("call", "failed", "assert\n  0")], "| claim | failed | assert 0 | 3.0 |"),
        ([("call", "passed"), ("teardown", "failed", "left")], "| claim | failed | left | 3.0 |"),
        ([], "| claim | not run |  | 0.0 |"),
    ],
)  # fmt: skip
def test_a_row_says_how_a_claims_test_ended(phases: list[tuple[str, ...]], row: str) -> None:
    claim = Claim("claim")
    for each in phases:
        claim.add(phase(*each))
    assert table([claim])[-1] == row


# torch says of TorchScript that it is deprecated, at each of its functions.
@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_the_models_answer_on_a_machine_without_a_gpu(empty_server: RepositoryServer) -> None:
    pytest.importorskip("torch")
    repository = empty_server.repository
    for backend in ("pytorch", "python"):
        write_place(repository / f"cpu_{backend}", backend, "{ count: 2 kind: KIND_CPU }")
        empty_server.load(f"cpu_{backend}")
        assert empty_server.infer(f"cpu_{backend}", [1.0]) == [-1.0]
    configure(repository / "cpu_sums", "onnxruntime", ["{ kind: KIND_CPU }"], (ONNX_ROWS, ONNX_COLUMNS))
    (repository / "cpu_sums" / "1" / "model.onnx").write_bytes(onnx_model())
    empty_server.load("cpu_sums")
    assert empty_server.infer("cpu_sums", [1.0, 2.0, *([0.0] * (ONNX_ROWS - 2))]) == ONNX_COLUMNS * [3.0]


@pytest.mark.torch
def test_clear_tokens_are_our_executors(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with running_command(tmp_path / "log", str(RILL), "--dtype=f32") as server:
        server.wait_ready()
        expected = clear_tokens(PROMPTS[0], 0.01)
        assert len(expected) > 4
        assert ids(complete(server, PROMPTS[0], max_tokens=len(expected))) == expected
