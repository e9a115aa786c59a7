from typing import Any

import pytest

from sluice.cli.doctor.facts import MachineFacts, ModelFacts
from sluice.cli.doctor.findings import DoctorFinding
from sluice.cli.doctor.model_checks import ServingOptions, check_model
from sluice.cli.gpus import ComputeCapability, NvidiaDriver
from sluice.engine.config import Runtime
from sluice.engine.model_folder import ModelFormat
from sluice.engine.runtimes import RuntimeChoice
from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.watch.live.findings import Severity
from tests.cli.doctor.builders import LLAMA_70B, driver, gpu, machine, model

ON_GPU = RuntimeChoice(Runtime.TENSORRT_LLM, "TensorRT-LLM is installed and there are GPUs")
ON_CPU = RuntimeChoice(Runtime.OPENVINO, "there is no NVIDIA GPU")
ENGINE = ModelFormat.TENSORRT_LLM_ENGINE
BUILT_FOR_8_0 = {"kind": ENGINE, "built_by": "1.2.1", "built_for": ComputeCapability(8, 0)}
OTHER_TOKENIZER = {"manifest": {"tokenizer_sha256": "a"}, "tokenizer_sha256": "b"}
FOUR = driver(*(gpu(index) for index in range(4)))


def findings(
    what: ModelFacts,
    where: MachineFacts,
    wanted: ServingOptions | None = None,
    choice: RuntimeChoice | SluiceError = ON_GPU,
) -> list[DoctorFinding]:
    return list(check_model(what, where, choice, wanted or ServingOptions()))


def problems(found: list[DoctorFinding]) -> list[tuple[Severity, str]]:
    assert all(finding.remedy for finding in found if finding.level in (Severity.WARN, Severity.FAIL))
    return [(finding.level, finding.text) for finding in found if finding.level in (Severity.WARN, Severity.FAIL)]


def test_a_model_that_fits_has_no_problem_and_its_context_is_reported() -> None:
    found = findings(model(), machine(driver()))
    assert not problems(found)
    assert "caches" in found[-1].text or "could cache" in found[-1].text
    assert "requests of 131072" in found[-1].text


@pytest.mark.parametrize(
    ("model_fields", "machine_fields", "text"),
    [
        ({"size": LLAMA_70B}, {}, "it does not fit"),
        ({"quantization": "nvfp4"}, {}, "nvfp4 needs compute capability 10.0, GPU 0 has 9.0"),
        ({"quantization": "fp8"}, {"driver": driver(gpu(capability=(8, 0)))}, "fp8 needs compute capability"),
        ({"has_tokenizer": False}, {}, "has no tokenizer"),
        ({"num_gpus": 2}, {}, "it is to run on 2 GPUs, and this machine has 1"),
        ({"kind": ENGINE, "built_by": "1.1.0"}, {}, "compiled by TensorRT-LLM 1.1.0, 1.2.1"),
        ({"kind": ENGINE, "built_by": "1.2.1"}, {"versions": {"tensorrt-llm": "1.3.0"}}, "runs none any more"),
        (BUILT_FOR_8_0, {}, "compiled on compute capability 8.0, GPU 0 has 9.0"),
        ({"num_gpus": 2}, {"driver": driver(gpu(), gpu(1, name="A100"))}, "warn: its GPUs differ (NVIDIA H100, A100)"),
        (OTHER_TOKENIZER, {}, "warn: tokenizer.json is not the one that it was built with"),
    ],
)
def test_what_will_not_work_is_reported(
    model_fields: dict[str, Any], machine_fields: dict[str, Any], text: str
) -> None:
    where = machine(**{"driver": driver(), **machine_fields})
    ((level, found),) = problems(findings(model(**model_fields), where))
    *_, expected = text.partition("warn: ")
    assert (level is Severity.WARN, (expected or text) in found) == (bool(expected), True), found


def test_several_gpus_share_the_weights() -> None:
    fitting = findings(model(size=LLAMA_70B), machine(FOUR), ServingOptions(num_gpus=4))
    assert not problems(fitting)
    ((level, text),) = problems(findings(model(size=LLAMA_70B), machine(FOUR), ServingOptions(num_gpus=2)))
    assert level is Severity.WARN and "one request may have 131072" in text
    assert not problems(findings(model(size=LLAMA_70B), machine(FOUR), ServingOptions(num_gpus=2, max_model_len=4096)))


def test_a_smaller_cache_type_holds_more() -> None:
    def tokens(dtype: str) -> int:
        text = findings(model(), machine(driver()), ServingOptions(kv_cache_dtype=dtype))[-1].text
        return int(text.partition("could cache ")[2].partition(" tokens")[0])

    assert tokens("fp8") == pytest.approx(2 * tokens("auto"), abs=2)


def test_on_the_cpu_memory_and_architecture_count() -> None:
    none = NvidiaDriver(reason="no driver")
    assert not problems(findings(model(), machine(none), choice=ON_CPU))
    ((level, text),) = problems(findings(model(size=LLAMA_70B), machine(none), choice=ON_CPU))
    assert level is Severity.FAIL and "does not fit" in text
    quantized = ServingOptions(quantization="int4", max_model_len=4096)
    assert not problems(findings(model(size=LLAMA_70B), machine(none), quantized, ON_CPU))
    compressed = findings(model(size=LLAMA_70B, quantization="int4"), machine(none), quantized, ON_CPU)
    assert "does not fit" in compressed[-1].text  # what is compressed already becomes no smaller
    ((level, text),) = problems(
        findings(model(problems={Runtime.OPENVINO: "no graph for mamba"}), machine(none), choice=ON_CPU)
    )
    assert (level, text) == (Severity.FAIL, "no graph for mamba")


@pytest.mark.parametrize(
    ("fields", "choice", "text"),
    [
        ({"kv_cache_dtype": "fp8"}, ON_CPU, "OpenVINO has no KV cache of fp8"),
        ({"kv_cache_dtype": "u8"}, ON_GPU, "TensorRT-LLM has no KV cache of u8"),
        ({"quantization": "fp8"}, ON_CPU, "OpenVINO does not compress weights to fp8"),
        ({"quantization": "fp8"}, ON_GPU, "these are not compressed to fp8"),
    ],
)
def test_types_that_the_runtime_does_not_have(fields: dict[str, Any], choice: RuntimeChoice, text: str) -> None:
    ((level, found_text),) = problems(findings(model(), machine(driver()), ServingOptions(**fields), choice))
    assert level is Severity.FAIL and text in found_text


def test_where_no_runtime_would_serve_it_that_is_the_finding() -> None:
    error = SluiceError(ErrorCode.UNAVAILABLE, "TensorRT-LLM is not installed")
    assert findings(model(), machine(driver()), choice=error)[-1].text == error.message


def test_versions_that_moved_on_are_noted() -> None:
    found = findings(model(transformers_version="6.0.0", manifest={"sluice_version": "0.0.9"}), machine(driver()))
    notes = [finding.text for finding in found if finding.level is Severity.NOTE]
    assert len(notes) == 2 and "transformers 6.0.0" in notes[0] and "Sluice 0.0.9" in notes[1]
