from dataclasses import replace
from typing import Any

import pytest

from sluice.cli.doctor.facts import MachineFacts
from sluice.cli.doctor.machine_checks import check_machine
from sluice.cli.gpus import NvidiaDriver
from sluice.engine.config import Runtime
from sluice.gateway.watch.live.findings import Severity
from tests.cli.doctor.builders import driver, gpu, machine

NO_GPU = NvidiaDriver(reason="NVIDIA's driver does not answer")


def worst_levels(machine: MachineFacts, runtime: Runtime = Runtime.AUTO) -> dict[str, Severity]:
    """Return the worst level of each subject."""
    levels: dict[str, Severity] = {}
    for finding in check_machine(machine, runtime):
        worst = max(levels.get(finding.subject, Severity.OK), finding.level, key=list(Severity).index)
        levels[finding.subject] = worst
        assert finding.remedy or finding.level in (Severity.OK, Severity.NOTE), finding
    return levels


def test_a_machine_for_tensorrt_llm_is_well() -> None:
    assert set(worst_levels(machine(driver())).values()) == {Severity.OK}


def test_without_a_gpu_it_says_so_and_that_the_cpu_serves() -> None:
    found = machine(NO_GPU, versions={"sluice": "0.1.0", "openvino": "2026.4.1"}, torch_cuda=None)
    assert worst_levels(found)["GPU"] is Severity.NOTE
    assert worst_levels(found, Runtime.TENSORRT_LLM) == worst_levels(found) | {
        "GPU": Severity.FAIL,
        "TensorRT-LLM": Severity.FAIL,
    }
    text = next(finding.text for finding in check_machine(found, Runtime.AUTO) if finding.subject == "GPU")
    assert "no NVIDIA GPU" in text and "OpenVINO" in text


def test_the_cpu_serves_by_the_runtime_that_is_asked_for() -> None:
    found = machine(NO_GPU, versions={"sluice": "0.1.0", "torch": "2.13.0"}, torch_cuda=None)
    (text,) = (each.text for each in check_machine(found, Runtime.TORCH) if each.subject == "GPU")
    assert text.endswith("Language models run on the CPU, by torch")


@pytest.mark.parametrize(
    ("gpus", "runtime", "level"),
    [
        (NO_GPU, Runtime.AUTO, Severity.FAIL),
        (driver(), Runtime.AUTO, Severity.NOTE),
        (driver(), Runtime.OPENVINO, Severity.FAIL),
        (NO_GPU, Runtime.TORCH, Severity.NOTE),
    ],
)
def test_a_broken_bundled_runtime_matters_where_it_would_serve(
    gpus: NvidiaDriver, runtime: Runtime, level: Severity
) -> None:
    found = replace(machine(gpus), bundled_problem="a file is missing", cpu_dtypes=())
    assert worst_levels(found, runtime)["OpenVINO"] is level


@pytest.mark.parametrize(
    ("changed", "subject", "level"),
    [
        ({"driver": driver(gpu(capability=(7, 5)))}, "GPU 0", Severity.FAIL),
        ({"driver": driver(gpu(free=40))}, "GPU 0", Severity.WARN),
        ({"driver": driver(gpu(), gpu(1, capability=(7, 0)))}, "GPU 1", Severity.FAIL),
        ({"driver": driver(cuda=(12, 4))}, "CUDA", Severity.FAIL),
        ({"driver": driver(), "torch_cuda": (13, 1)}, "CUDA", Severity.WARN),
        ({"driver": driver(), "torch_cuda": None}, "torch", Severity.FAIL),
        ({"driver": driver(), "versions": {"sluice": "0.1.0"}, "torch_cuda": None}, "TensorRT-LLM", Severity.WARN),
        ({"driver": driver(), "disk": 1}, "disk", Severity.WARN),
        ({"driver": driver(), "ports": (8000,)}, "ports", Severity.WARN),
    ],
)
def test_what_is_wrong_is_said_of_its_subject(changed: dict[str, Any], subject: str, level: Severity) -> None:
    levels = worst_levels(machine(**changed))
    assert levels.pop(subject) is level
    assert set(levels.values()) == {Severity.OK}


def test_a_cpu_without_bf16_is_worst_levels() -> None:
    texts = [finding.text for finding in check_machine(machine(NO_GPU, dtypes=("FP32",)), Runtime.AUTO)]
    assert any("no bf16" in text for text in texts)


def test_environments_are_checked() -> None:
    def findings(*environment: str, runtime: Runtime = Runtime.AUTO) -> list[tuple[Severity, str, str]]:
        found = {Runtime.VLLM: (environment[0], environment[1])} if environment else {}
        facts = replace(machine(NO_GPU, versions={}, torch_cuda=None), environments=found)
        checked = check_machine(facts, runtime)
        return [(each.level, each.text, each.remedy) for each in checked if each.subject == "vLLM"]

    assert findings() == []
    assert findings("/v/python", "0.32.0") == [(Severity.OK, "0.32.0, in the environment of /v/python", "")]
    [(level, _, remedy)] = findings("/v/python", "")
    assert (level, remedy) == (Severity.FAIL, "sluice runtime install vllm --force")
    [(level, text, remedy)] = findings(runtime=Runtime.VLLM)
    assert (level, text) == (Severity.FAIL, "it is asked for and not installed")
    assert "sluice runtime install vllm" in remedy
