from typing import Any

import pytest

from cli.doctor.facts import Gpus, Machine
from cli.doctor.findings import Level
from cli.doctor.machine_checks import check_machine
from engine.config import Runtime
from tests.cli.doctor.facts import gpu, gpus, machine

NONE = Gpus(reason="NVIDIA's driver does not answer")


def told(found: Machine, runtime: Runtime = Runtime.AUTO) -> dict[str, Level]:
    """The worst level of each subject."""
    levels: dict[str, Level] = {}
    for finding in check_machine(found, runtime):
        worst = max(levels.get(finding.subject, Level.OK), finding.level, key=list(Level).index)
        levels[finding.subject] = worst
        assert finding.remedy or finding.level in (Level.OK, Level.NOTE), finding
    return levels


def test_a_machine_for_tensorrt_llm_is_well() -> None:
    assert set(told(machine(gpus())).values()) == {Level.OK}


def test_without_a_gpu_it_says_so_and_that_the_cpu_serves() -> None:
    found = machine(NONE, versions={"sluice": "0.1.0", "openvino": "2026.4.1"}, torch_cuda=None)
    assert told(found)["GPU"] is Level.NOTE
    assert told(found, Runtime.TENSORRT_LLM) == told(found) | {"GPU": Level.FAIL, "TensorRT-LLM": Level.FAIL}
    text = next(finding.text for finding in check_machine(found, Runtime.AUTO) if finding.subject == "GPU")
    assert "no NVIDIA GPU" in text and "OpenVINO" in text


@pytest.mark.parametrize(
    ("changed", "subject", "level"),
    [
        ({"found": gpus(gpu(capability=(7, 5)))}, "GPU 0", Level.FAIL),
        ({"found": gpus(gpu(free=40))}, "GPU 0", Level.WARN),
        ({"found": gpus(gpu(), gpu(1, capability=(7, 0)))}, "GPU 1", Level.FAIL),
        ({"found": gpus(cuda=(12, 4))}, "CUDA", Level.FAIL),
        ({"found": gpus(), "torch_cuda": (13, 1)}, "CUDA", Level.WARN),
        ({"found": gpus(), "torch_cuda": None}, "torch", Level.FAIL),
        ({"found": gpus(), "versions": {"sluice": "0.1.0"}}, "TensorRT-LLM", Level.WARN),
        ({"found": gpus(), "disk": 1}, "disk", Level.WARN),
        ({"found": gpus(), "ports": (8000,)}, "ports", Level.WARN),
    ],
)
def test_what_is_wrong_is_said_of_its_subject(changed: dict[str, Any], subject: str, level: Level) -> None:
    levels = told(machine(**changed))
    assert levels.pop(subject) is level
    assert set(levels.values()) == {Level.OK}


def test_a_cpu_without_bf16_is_told() -> None:
    texts = [finding.text for finding in check_machine(machine(NONE, dtypes=("FP32",)), Runtime.AUTO)]
    assert any("no bf16" in text for text in texts)
