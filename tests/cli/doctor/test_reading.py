"""Facts read from real folders, a stand-in for NVML and real distributions."""

import json
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sluice.cli.doctor.machine import read_libraries
from sluice.cli.doctor.models import cache_width, read_model
from sluice.cli.gpus import ComputeCapability, read_driver
from sluice.engine.model_folder import ModelFormat
from sluice.errors import ErrorCode, SluiceError
from tests import paths
from tests.stand_ins.model_folders import make_checkpoint

LLAMA = paths.DATA / "checkpoints" / "llama_tiny"


def nvml(num_gpus: int, *, hides: tuple[str, ...] = ()) -> Any:
    """Return a stand-in for pynvml. The functions named in `hides` raise NVMLError."""

    class NVMLError(Exception):
        pass

    def hidden(handle: int) -> None:
        raise NVMLError("Not Supported")

    functions = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: b"580.65.06",
        "nvmlSystemGetCudaDriverVersion": lambda: 13000,
        "nvmlDeviceGetCount": lambda: num_gpus,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda handle: f"GPU {handle}",
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=100, free=60),
        "nvmlDeviceGetCudaComputeCapability": lambda handle: (9, 0),
        "nvmlDeviceGetMigMode": lambda handle: (1, 1),
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: [1, 2],
    }
    return SimpleNamespace(NVMLError=NVMLError, **functions | dict.fromkeys(hides, hidden))


def test_gpus_are_read_once() -> None:
    found = read_driver(lambda: nvml(2))
    assert (found.version, found.cuda_version) == ("580.65.06", (13, 0))
    assert [(each.name, each.capability, each.num_processes) for each in found.gpus] == [
        ("GPU 0", ComputeCapability(9, 0), 2),
        ("GPU 1", ComputeCapability(9, 0), 2),
    ]
    assert found.gpus[0].is_partitioned and found.gpus[0].memory_free_bytes == 60


def test_what_a_gpu_hides_is_left_out() -> None:
    hidden = ("nvmlDeviceGetMigMode", "nvmlDeviceGetCudaComputeCapability", "nvmlDeviceGetComputeRunningProcesses")
    (found,) = read_driver(lambda: nvml(1, hides=hidden)).gpus
    assert (found.capability, found.is_partitioned, found.num_processes) == (None, False, 0)


def test_a_driver_without_gpus_says_so() -> None:
    assert "no GPU" in read_driver(lambda: nvml(0)).reason


def test_the_driver_of_this_machine_or_its_absence_is_no_error() -> None:
    found = read_driver()
    assert bool(found.gpus) != bool(found.reason)


@pytest.mark.parametrize(
    ("torch_version", "requirements", "cuda"),
    [
        ("2.9.0+cu128", [], (12, 8)),
        ("2.9.0+cu130", [], (13, 0)),
        ("2.13.0+cpu", ["nvidia-cuda-runtime==13.0.48"], None),
        ("2.9.0", ["numpy", "nvidia-cuda-runtime-cu12==12.8.90; platform_system == 'Linux'"], (12, 8)),
        ("2.9.1", ["nvidia-cuda-runtime==13.0.48; platform_system == 'Linux'"], (13, 0)),
        ("2.9.0", None, None),
    ],
)
def test_the_cuda_of_torch(torch_version: str, requirements: list[str] | None, cuda: tuple[int, int] | None) -> None:
    def version_of(name: str) -> str:
        if name != "torch":
            raise PackageNotFoundError(name)
        return torch_version

    found = read_libraries(version_of, lambda name: requirements)
    assert (found.versions, found.torch_cuda) == ({"torch": torch_version}, cuda)


def test_a_checkpoint_is_sized_by_its_config() -> None:
    config = json.loads((LLAMA / "config.json").read_text())
    found = read_model("tiny", LLAMA)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    width = 4 if "32" in found.dtype else 2
    expected = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim * width
    assert found.format is ModelFormat.HUGGINGFACE and found.problems == {}
    assert found.size.kv_bytes_per_token == expected
    assert found.size.weight_bytes == sum(file.stat().st_size for file in LLAMA.glob("*.safetensors"))
    assert found.has_tokenizer == (LLAMA / "tokenizer.json").is_file()


def test_a_compiled_engine_tells_its_version_and_its_gpus(tmp_path: Path) -> None:
    config = {
        "version": "1.2.1",
        "pretrained_config": {
            "architecture": "LlamaForCausalLM",
            "dtype": "float16",
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "hidden_size": 32,
            "mapping": {"world_size": 2, "tp_size": 2},
            "quantization": {"quant_algo": "FP8"},
        },
        "build_config": {"max_seq_len": 512},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    for rank in range(2):
        (tmp_path / f"rank{rank}.engine").write_bytes(b"x" * 10)
    (tmp_path / "sluice-build.json").write_text('{"compute_capability": "9.0"}')
    found = read_model("llama", tmp_path)
    assert (found.format, found.built_by, found.num_gpus) == (ModelFormat.TENSORRT_LLM_ENGINE, "1.2.1", 2)
    assert (found.quantization, found.built_for) == ("fp8", ComputeCapability(9, 0))
    assert (found.size.weight_bytes, found.size.max_model_len) == (20, 512)
    assert found.size.kv_bytes_per_token == 2 * 2 * 2 * 8 * 2
    assert found.problems == {}


def test_weights_that_a_build_compressed_are_known(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model")
    (folder / "model-int8.safetensors").write_bytes(b"x" * 100)
    found = read_model("model", folder)
    assert (found.quantization, found.size.weight_bytes) == ("int8", 100)


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SluiceError) as raised:
        read_model("x", tmp_path)
    assert raised.value.code is ErrorCode.NOT_FOUND
    shutil.copy(LLAMA / "config.json", tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SluiceError, match=r"cannot read .*config\.json"):
        read_model("x", tmp_path)


def test_how_wide_a_cached_value_is() -> None:
    assert cache_width("auto", "bfloat16") == 1.0
    assert cache_width("fp8", "torch.bfloat16") == 0.5
    assert cache_width("u8", "float32") == 0.25
    assert cache_width("nvfp4", "bfloat16") < 0.3


@pytest.mark.slow
def test_the_engines_own_python_is_asked_for_its_libraries(tmp_path: Path) -> None:
    """The Python stands for an environment with TensorRT-LLM: it has two distributions on its path."""
    for name, number, requirement in (
        ("tensorrt_llm", "1.2.1", ""),
        ("torch", "2.9.1", "Requires-Dist: nvidia-cuda-runtime==13.0.48\n"),
    ):
        folder = tmp_path / f"{name}-{number}.dist-info"
        folder.mkdir()
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n{requirement}"
        (folder / "METADATA").write_text(text)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec env PYTHONPATH={tmp_path} {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    found = read_libraries(engine_python=str(python))
    assert (found.versions["tensorrt-llm"], found.versions["torch"], found.torch_cuda) == ("1.2.1", "2.9.1", (13, 0))
    assert found.versions["openvino"] == version("openvino")
    with pytest.raises(SluiceError, match="--engine-python must be a Python that can be run, got '/no/python'"):
        read_libraries(engine_python="/no/python")
