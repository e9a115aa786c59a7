from typing import Any

import pytest

from cli.doctor.facts import Capability, Gpus, Machine, ModelFacts
from cli.doctor.findings import Finding, Level
from cli.doctor.model_checks import Wanted, check_model
from engine.config import Runtime
from engine.model_folder import ModelFormat
from engine.runtimes import RuntimeChoice
from sluice.errors import ErrorCode, SluiceError
from tests.cli.doctor.facts import LLAMA_70B, gpu, gpus, machine, model

ON_GPU = RuntimeChoice(Runtime.TENSORRT_LLM, "TensorRT-LLM is installed and there are GPUs")
ON_CPU = RuntimeChoice(Runtime.OPENVINO, "there is no NVIDIA GPU")
ENGINE = ModelFormat.TENSORRT_LLM_ENGINE
FOUR = gpus(*(gpu(index) for index in range(4)))


def findings(
    what: ModelFacts, where: Machine, wanted: Wanted | None = None, choice: RuntimeChoice | SluiceError = ON_GPU
) -> list[Finding]:
    return list(check_model(what, where, choice, wanted or Wanted()))


def wrong(found: list[Finding]) -> list[tuple[Level, str]]:
    assert all(finding.remedy for finding in found if finding.level in (Level.WARN, Level.FAIL))
    return [(finding.level, finding.text) for finding in found if finding.level in (Level.WARN, Level.FAIL)]


def test_a_model_that_fits_is_well_and_the_context_is_told() -> None:
    found = findings(model(), machine(gpus()))
    assert not wrong(found)
    assert "caches" in found[-1].text or "could cache" in found[-1].text
    assert "requests of 131072" in found[-1].text


@pytest.mark.parametrize(
    ("what", "where", "level", "said"),
    [
        ({"size": LLAMA_70B}, {"found": gpus()}, Level.FAIL, "it does not fit"),
        (
            {"quantization": "nvfp4"},
            {"found": gpus()},
            Level.FAIL,
            "nvfp4 needs compute capability 10.0, GPU 0 has 9.0",
        ),
        ({"quantization": "fp8"}, {"found": gpus(gpu(capability=(8, 0)))}, Level.FAIL, "fp8 needs compute capability"),
        ({"has_tokenizer": False}, {"found": gpus()}, Level.FAIL, "has no tokenizer"),
        ({"num_gpus": 2}, {"found": gpus()}, Level.FAIL, "it is to run on 2 GPUs, and this machine has 1"),
        ({"kind": ENGINE, "built_by": "1.1.0"}, {"found": gpus()}, Level.FAIL, "compiled by TensorRT-LLM 1.1.0, 1.2.1"),
        (
            {"kind": ENGINE, "built_by": "1.2.1"},
            {"found": gpus(), "versions": {"tensorrt-llm": "1.3.0"}},
            Level.FAIL,
            "runs none any more",
        ),
        (
            {"kind": ENGINE, "built_by": "1.2.1", "built_for": Capability(8, 0)},
            {"found": gpus()},
            Level.FAIL,
            "compiled on compute capability 8.0, GPU 0 has 9.0",
        ),
        (
            {"num_gpus": 2},
            {"found": gpus(gpu(), gpu(1, name="NVIDIA A100"))},
            Level.WARN,
            "its GPUs differ (NVIDIA H100, NVIDIA A100)",
        ),
        (
            {"notes": {"tokenizer_sha256": "a"}, "tokenizer_sha256": "b"},
            {"found": gpus()},
            Level.WARN,
            "is not the one that it was built with",
        ),
    ],
)
def test_what_will_not_work_is_said(what: dict[str, Any], where: dict[str, Any], level: Level, said: str) -> None:
    ((found, text),) = wrong(findings(model(**what), machine(**where)))
    assert (found, said in text) == (level, True), text


def test_several_gpus_share_the_weights() -> None:
    fitting = findings(model(size=LLAMA_70B), machine(FOUR), Wanted(num_gpus=4))
    assert not wrong(fitting)
    ((level, text),) = wrong(findings(model(size=LLAMA_70B), machine(FOUR), Wanted(num_gpus=2)))
    assert level is Level.WARN and "one request may have 131072" in text
    assert not wrong(findings(model(size=LLAMA_70B), machine(FOUR), Wanted(num_gpus=2, max_model_len=4096)))


def test_a_smaller_cache_type_holds_more() -> None:
    def tokens(dtype: str) -> int:
        text = findings(model(), machine(gpus()), Wanted(kv_cache_dtype=dtype))[-1].text
        return int(text.partition("could cache ")[2].partition(" tokens")[0])

    assert tokens("fp8") == pytest.approx(2 * tokens("auto"), abs=2)


def test_on_the_cpu_memory_and_architecture_count() -> None:
    none = Gpus(reason="no driver")
    assert not wrong(findings(model(), machine(none), choice=ON_CPU))
    ((level, text),) = wrong(findings(model(size=LLAMA_70B), machine(none), choice=ON_CPU))
    assert level is Level.FAIL and "does not fit" in text
    quantized = Wanted(quantization="int4", max_model_len=4096)
    assert not wrong(findings(model(size=LLAMA_70B), machine(none), quantized, ON_CPU))
    compressed = findings(model(size=LLAMA_70B, quantization="int4"), machine(none), quantized, ON_CPU)
    assert "does not fit" in compressed[-1].text  # what is compressed already becomes no smaller
    ((level, text),) = wrong(findings(model(openvino_problem="no graph for mamba"), machine(none), choice=ON_CPU))
    assert (level, text) == (Level.FAIL, "no graph for mamba")


@pytest.mark.parametrize(
    ("asked", "choice", "said"),
    [
        ({"kv_cache_dtype": "fp8"}, ON_CPU, "OpenVINO has no KV cache of fp8"),
        ({"kv_cache_dtype": "u8"}, ON_GPU, "TensorRT-LLM has no KV cache of u8"),
        ({"quantization": "fp8"}, ON_CPU, "OpenVINO does not compress weights to fp8"),
        ({"quantization": "fp8"}, ON_GPU, "these are not compressed to fp8"),
    ],
)
def test_types_that_the_runtime_does_not_have(asked: dict[str, Any], choice: RuntimeChoice, said: str) -> None:
    ((level, text),) = wrong(findings(model(), machine(gpus()), Wanted(**asked), choice))
    assert level is Level.FAIL and said in text


def test_where_no_runtime_would_serve_it_that_is_the_finding() -> None:
    error = SluiceError(ErrorCode.UNAVAILABLE, "TensorRT-LLM is not installed")
    assert findings(model(), machine(gpus()), choice=error)[-1].text == error.message


def test_versions_that_moved_on_are_noted() -> None:
    found = findings(model(transformers_version="6.0.0", notes={"sluice_version": "0.0.9"}), machine(gpus()))
    notes = [finding.text for finding in found if finding.level is Level.NOTE]
    assert len(notes) == 2 and "transformers 6.0.0" in notes[0] and "Sluice 0.0.9" in notes[1]
