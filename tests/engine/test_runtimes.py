"""The runtime that a folder gets, and the error where it cannot be had."""

import json
import shutil
import subprocess
import sys
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from sluice.engine.config import EngineConfig, EngineRole, Runtime, Task
from sluice.engine.model_folder import ModelFormat, model_format, served_task
from sluice.engine.runtimes import RUNTIMES, RuntimeChoice, choose_runtime
from sluice.engine.sampling_fields import OPTIONAL_FIELDS
from sluice.errors import ErrorCode, SluiceError
from sluice.machine import num_gpus
from tests import paths
from tests.stand_ins.model_folders import BUILT, make_compiled_engine

TENSORRT_LLM, OPENVINO = RUNTIMES[Runtime.TENSORRT_LLM], RUNTIMES[Runtime.OPENVINO]
ALL = frozenset(Runtime)
HUGGINGFACE = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
CONVERTED = {"architecture": "LlamaForCausalLM", "dtype": "float16"}
COMPILED = {"pretrained_config": CONVERTED, "build_config": {}}


def folder_with(path: Path, config: Any, *files: str) -> Path:
    path.mkdir()
    (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    for file in files:
        (path / file).touch()
    return path


def choose(path: Path, *, gpus: int = 0, installed: Collection[Runtime] = (), **config: Any) -> RuntimeChoice:
    """`installed`: the runtimes that are."""
    return choose_runtime(
        EngineConfig(model_path=str(path), **config),
        count_gpus=lambda: gpus,
        is_installed=lambda spec, python: not spec.library or spec.runtime in installed,
    )


@pytest.mark.parametrize(
    ("config", "files", "expected"),
    [
        (HUGGINGFACE, ("model.safetensors",), ModelFormat.HUGGINGFACE),
        (CONVERTED, ("rank0.safetensors",), ModelFormat.TENSORRT_LLM_CHECKPOINT),
        ({**CONVERTED, "architectures": ["Llama"]}, ("rank0.safetensors",), ModelFormat.HUGGINGFACE),
        (COMPILED, ("rank0.engine",), ModelFormat.TENSORRT_LLM_ENGINE),
        (COMPILED, (), ModelFormat.TENSORRT_LLM_ENGINE),
        (HUGGINGFACE, ("openvino_model.xml",), ModelFormat.OPENVINO_IR),
        ("not json", (), ModelFormat.HUGGINGFACE),
    ],
)
def test_a_format_is_found_from_files(
    tmp_path: Path, config: Any, files: tuple[str, ...], expected: ModelFormat
) -> None:
    assert model_format(folder_with(tmp_path / "model", config, *files)) is expected


def test_a_folder_without_a_model_has_no_format(tmp_path: Path) -> None:
    assert model_format(tmp_path) is None
    assert model_format(tmp_path / "absent") is None


def test_gpus_are_counted_by_their_devices(tmp_path: Path) -> None:
    assert num_gpus(tmp_path) == 0
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia2x"):
        (tmp_path / name).touch()
    assert num_gpus(tmp_path) == 2


@pytest.mark.parametrize(
    ("gpus", "installed", "expected", "reason"),
    [
        (0, (), Runtime.OPENVINO, "there is no NVIDIA GPU"),
        (0, ALL, Runtime.OPENVINO, "there is no NVIDIA GPU"),
        (
            2,
            (),
            Runtime.OPENVINO,
            "there are 2 GPUs, but TensorRT-LLM is not installed; there are 2 GPUs, but vLLM is not installed; "
            "there are 2 GPUs, but torch is not installed",
        ),
        (2, {Runtime.TORCH, Runtime.VLLM}, Runtime.VLLM, "vLLM is installed and there are 2 GPUs"),
        (2, {Runtime.VLLM}, Runtime.VLLM, "vLLM is installed and there are 2 GPUs"),
        (2, ALL, Runtime.TENSORRT_LLM, "TensorRT-LLM is installed and there are 2 GPUs"),
    ],
)
def test_a_checkpoint_runs_where_it_can(
    tmp_path: Path, gpus: int, installed: Collection[Runtime], expected: Runtime, reason: str
) -> None:
    choice = choose(folder_with(tmp_path / "model", HUGGINGFACE), gpus=gpus, installed=installed)
    assert choice == RuntimeChoice(expected, reason)


@pytest.mark.parametrize(
    ("version", "config", "expected", "reason"),
    [
        ("2.13.0", {}, Runtime.TORCH, "torch is installed and there are 2 GPUs"),
        ("2.13.0+cpu", {}, Runtime.OPENVINO, "torch is built without CUDA"),
        ("2.13.0", {"device": "cpu"}, Runtime.OPENVINO, "the CPU is asked for"),
        ("2.13.0", {"tensor_parallel_size": 2}, Runtime.TORCH, "several GPUs are to share each layer"),
    ],
)
def test_torch_is_chosen_on_a_gpu_that_it_can_use_where_no_other_library_is(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    config: dict[str, Any],
    expected: Runtime,
    reason: str,
) -> None:
    monkeypatch.setattr("sluice.engine.runners.torch.runtime.version", lambda distribution: version)
    path = folder_with(tmp_path / "model", HUGGINGFACE)
    choice = choose(path, gpus=2, installed={Runtime.TORCH}, **config)
    assert choice.runtime is expected
    assert reason in choice.reason


@pytest.mark.parametrize(
    ("runtime", "device", "allowed"),
    [
        (Runtime.OPENVINO, "cuda", "auto or cpu"),
        (Runtime.VLLM, "cpu", "auto"),
        (Runtime.TORCH, "tpu", "auto or cpu or"),
    ],
)
def test_a_device_that_the_runtime_does_not_take_is_refused(
    tmp_path: Path, runtime: Runtime, device: str, allowed: str
) -> None:
    path = folder_with(tmp_path / "model", HUGGINGFACE)
    with pytest.raises(SluiceError, match=f"device must be {allowed}.* on .*, got '{device}'") as caught:
        choose(path, installed=ALL, runtime=runtime, device=device)
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID, "device")


@pytest.mark.parametrize("config", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_what_only_gpus_do_asks_for_their_runtimes(tmp_path: Path, config: dict[str, Any]) -> None:
    path = folder_with(tmp_path / "model", HUGGINGFACE)
    assert choose(path, installed=ALL, **config).runtime is Runtime.TENSORRT_LLM
    assert choose(path, gpus=2, installed={Runtime.VLLM}, **config).runtime is Runtime.VLLM
    with pytest.raises(SluiceError, match="it is not installed") as refused:
        choose(path, **config)
    assert refused.value.code is ErrorCode.UNAVAILABLE


@pytest.mark.parametrize("config", [{"tensor_parallel_size": 4}, {"pipeline_parallel_size": 2}])
def test_torch_is_not_chosen_for_more_gpus_than_there_are_nor_for_layers_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]
) -> None:
    monkeypatch.setattr("sluice.engine.runners.torch.runtime.version", lambda distribution: "2.13.0")
    path = folder_with(tmp_path / "model", HUGGINGFACE)
    with pytest.raises(SluiceError, match="it is not installed") as refused:
        choose(path, gpus=2, installed={Runtime.TORCH}, **config)
    assert refused.value.code is ErrorCode.UNAVAILABLE


@pytest.mark.parametrize(("config", "file"), [(CONVERTED, "rank0.safetensors"), (COMPILED, "rank0.engine")])
def test_its_own_formats_need_tensorrt_llm(tmp_path: Path, config: dict[str, Any], file: str) -> None:
    path = folder_with(tmp_path / "model", config, file)
    assert choose(path, installed=ALL).runtime is Runtime.TENSORRT_LLM
    with pytest.raises(SluiceError, match=r"sluice doctor") as missing:
        choose(path)
    assert missing.value.code is ErrorCode.UNAVAILABLE
    with pytest.raises(SluiceError, match="which OpenVINO cannot run") as wrong:
        choose(path, runtime=Runtime.OPENVINO)
    assert wrong.value.code is ErrorCode.INVALID


def test_an_ir_stays_with_openvino(tmp_path: Path) -> None:
    path = folder_with(tmp_path / "model", HUGGINGFACE, "openvino_model.xml")
    choice = choose(path, gpus=1, installed=ALL)
    assert choice == RuntimeChoice(Runtime.OPENVINO, "the folder holds an OpenVINO IR")
    with pytest.raises(SluiceError, match="is an OpenVINO IR, which TensorRT-LLM cannot run"):
        choose(path, installed=ALL, runtime=Runtime.TENSORRT_LLM)


def test_what_is_asked_for_is_taken(tmp_path: Path) -> None:
    path = folder_with(tmp_path / "model", HUGGINGFACE)
    assert choose(path, gpus=1, installed=ALL, runtime=Runtime.OPENVINO).runtime is Runtime.OPENVINO
    assert choose(path, installed=ALL, runtime=Runtime.TENSORRT_LLM).runtime is Runtime.TENSORRT_LLM
    with pytest.raises(SluiceError, match="it was asked for"):
        choose(path, gpus=1, runtime=Runtime.TENSORRT_LLM)


@pytest.mark.parametrize("fields", [{"kv_host_cache_bytes": 1 << 30}, {"kv_disk_cache": "/blocks"}])
@pytest.mark.parametrize(
    ("runtime", "own"),
    [(Runtime.TENSORRT_LLM, "kv_cache_config.host_cache_size=SIZE"), (Runtime.VLLM, "kv_offloading_size=GIB")],
)
def test_kv_tiers_are_refused_with_the_runtimes_own(
    tmp_path: Path, fields: dict[str, Any], runtime: Runtime, own: str
) -> None:
    path = folder_with(tmp_path / "model", HUGGINGFACE)
    with pytest.raises(SluiceError, match=f"keeps its own blocks; --runtime-setting {own}") as caught:
        choose(path, gpus=1, installed=ALL, runtime=runtime, **fields)
    assert caught.value.param in fields
    assert choose(path, installed=ALL, runtime=Runtime.OPENVINO, **fields).runtime is Runtime.OPENVINO


def test_not_every_runtime_hands_over_prompts(tmp_path: Path) -> None:
    path, role = folder_with(tmp_path / "model", HUGGINGFACE), EngineRole.PREFILL
    with pytest.raises(SluiceError, match="role prefill is for another runtime") as caught:
        choose(path, gpus=1, installed=ALL, runtime=Runtime.VLLM, role=role)
    assert caught.value.param == "role"
    with pytest.raises(SluiceError, match="role prefill is for models that generate; this one serves to embed"):
        choose(path, installed=ALL, runtime=Runtime.OPENVINO, task=Task.EMBED, role=role)
    for runtime in (Runtime.OPENVINO, Runtime.TENSORRT_LLM):
        assert choose(path, gpus=1, installed=ALL, runtime=runtime, role=role).runtime is runtime


@pytest.mark.parametrize(
    ("fields", "gpus", "installed", "expected"),
    [
        ({"task": Task.EMBED}, 0, ALL, Runtime.OPENVINO),
        ({"task": Task.EMBED}, 2, ALL, Runtime.VLLM),
        ({"task": Task.EMBED, "runtime": Runtime.VLLM}, 0, ALL, Runtime.VLLM),
        ({"task": Task.EMBED, "runtime": Runtime.TENSORRT_LLM}, 2, ALL, Runtime.TENSORRT_LLM),
        ({"task": Task.SCORE}, 0, ALL, Runtime.VLLM),
        ({"task": Task.SCORE}, 0, (), "vLLM would run .*serves such a folder for score.*not installed"),
        (
            {"task": Task.SCORE, "runtime": Runtime.OPENVINO},
            0,
            ALL,
            "for score; use --runtime tensorrt_llm or --runtime vllm",
        ),
    ],
)
def test_a_task_takes_a_runtime_that_serves_it(
    tmp_path: Path, fields: dict[str, Any], gpus: int, installed: Collection[Runtime], expected: Runtime | str
) -> None:
    path = folder_with(tmp_path / "model", HUGGINGFACE)
    if isinstance(expected, Runtime):
        assert choose(path, gpus=gpus, installed=installed, **fields).runtime is expected
        return
    with pytest.raises(SluiceError, match=expected):
        choose(path, gpus=gpus, installed=installed, **fields)


@pytest.mark.parametrize(
    ("config", "file", "expected"),
    [
        (HUGGINGFACE, "modules.json", Task.EMBED),
        ({"architectures": ["BertForSequenceClassification"]}, "model.safetensors", Task.SCORE),
        (HUGGINGFACE, "model.safetensors", Task.GENERATE),
        ("not json", "model.safetensors", Task.GENERATE),
    ],
)
def test_a_task_is_found_from_files(tmp_path: Path, config: Any, file: str, expected: Task) -> None:
    path = folder_with(tmp_path / "model", config, file)
    assert served_task(EngineConfig(model_path=str(path))) is expected
    assert served_task(EngineConfig(model_path=str(path), task=Task.GENERATE)) is Task.GENERATE


def test_every_runtime_is_registered() -> None:
    assert RUNTIMES.keys() == set(Runtime) - {Runtime.AUTO}
    for name, spec in RUNTIMES.items():
        assert spec.runtime is name
        assert spec.formats and spec.kv_cache_dtypes[0] == "auto"
        assert find_spec(spec.process) is not None
        assert spec.ignored_fields <= set(EngineConfig.__struct_fields__)
        assert set(spec.sampling_fields) <= set(OPTIONAL_FIELDS)


def test_one_runtime_comes_with_the_gateway() -> None:
    assert [spec.runtime for spec in RUNTIMES.values() if not spec.library] == [Runtime.OPENVINO]
    assert OPENVINO.is_installed("/no/python")
    OPENVINO.check_process("/no/python")


DECLARE = """
import sys
import sluice.engine.runtimes

assert not {"openvino", "tensorrt_llm", "torch", "transformers"} & sys.modules.keys()
"""


def test_declaring_runtimes_imports_no_heavy_library() -> None:
    subprocess.run([sys.executable, "-c", DECLARE], cwd=paths.ROOT, check=True, timeout=60)


def test_the_sizes_of_a_step_are_the_runtime_s_or_the_engine_s(tmp_path: Path) -> None:
    config = EngineConfig(model_path=str(folder_with(tmp_path / "model", HUGGINGFACE)))
    assert OPENVINO.step_sizes(config) == (64, 512)
    assert TENSORRT_LLM.step_sizes(config) == (256, 8192)
    compiled = EngineConfig(model_path=str(make_compiled_engine(tmp_path / "engine")))
    assert TENSORRT_LLM.step_sizes(compiled) == (BUILT["max_batch_size"], BUILT["max_num_tokens"])


@pytest.mark.slow
def test_another_python_is_asked_for_the_library(tmp_path: Path) -> None:
    """One that finds it, one that does not, and none at all."""
    stand_ins = paths.TESTS / "stand_ins"
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec env PYTHONPATH={stand_ins} {sys.executable} "$@"\n')
    python.chmod(0o755)
    assert TENSORRT_LLM.is_installed(str(python))
    assert not TENSORRT_LLM.is_installed(shutil.which("false"))
    assert not TENSORRT_LLM.is_installed(shutil.which("true"))  # no Python, though it does as it is told
    with pytest.raises(
        SluiceError, match=r"engine_python must be a Python that can be run, got '/no/python'"
    ) as raised:
        TENSORRT_LLM.is_installed("/no/python")
    assert raised.value.code is ErrorCode.UNAVAILABLE


@pytest.mark.slow
def test_another_python_must_have_what_the_process_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One with TensorRT-LLM and nothing else is how most begin."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    with pytest.raises(SluiceError, match=r"but not engine, sluice, msgspec, zmq, packaging; .*pip install"):
        TENSORRT_LLM.check_process(str(python))
    TENSORRT_LLM.check_process(sys.executable)
    TENSORRT_LLM.check_process(None)
