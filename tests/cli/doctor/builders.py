"""Builds the facts of machines and models that do not exist."""

from pathlib import Path

from sluice.cli.doctor.facts import InstalledLibraries, MachineFacts, ModelFacts, ModelSize
from sluice.cli.gpus import ComputeCapability, GpuFacts
from sluice.cli.gpus import NvidiaDriver as Driver
from sluice.engine.config import Runtime
from sluice.engine.model_folder import ModelFormat

GIB = 1 << 30
LLAMA_70B = ModelSize(weight_bytes=141 * GIB, kv_bytes_per_token=327_680, max_model_len=131_072)
LLAMA_8B = ModelSize(weight_bytes=16 * GIB, kv_bytes_per_token=131_072, max_model_len=131_072)


def gpu(index: int = 0, *, name: str = "NVIDIA H100", capability: tuple[int, int] = (9, 0), free: int = 79) -> GpuFacts:
    return GpuFacts(index, name, ComputeCapability(*capability), 80 * GIB, free * GIB, num_processes=int(free < 79))


def driver(*gpus: GpuFacts, cuda: tuple[int, int] = (13, 0)) -> Driver:
    return Driver("580.65", cuda, gpus or (gpu(),))


def machine(
    driver: Driver,
    *,
    versions: dict[str, str] | None = None,
    torch_cuda: tuple[int, int] | None = (13, 0),
    memory: int = 64,
    disk: int = 100,
    ports: tuple[int, ...] = (),
    dtypes: tuple[str, ...] = ("FP32", "BF16"),
) -> MachineFacts:
    installed = {"sluice": "0.1.0", "transformers": "5.5.0", "tensorrt-llm": "1.2.1", "torch": "2.9.0"}
    return MachineFacts(
        "3.12.3",
        32,
        memory * GIB,
        dtypes,
        Path("/var/cache/sluice"),
        disk * GIB,
        driver,
        InstalledLibraries(installed if versions is None else versions, torch_cuda),
        ports,
    )


def model(
    *,
    kind: ModelFormat = ModelFormat.HUGGINGFACE,
    size: ModelSize = LLAMA_8B,
    quantization: str = "none",
    num_gpus: int = 1,
    has_tokenizer: bool = True,
    built_by: str = "",
    built_for: ComputeCapability | None = None,
    transformers_version: str = "4.57.1",
    problems: dict[Runtime, str] | None = None,
    manifest: dict[str, str] | None = None,
    tokenizer_sha256: str = "",
) -> ModelFacts:
    return ModelFacts(
        "llama",
        Path("/models/llama/1"),
        kind,
        "LlamaForCausalLM",
        "bfloat16",
        quantization,
        size,
        has_tokenizer,
        num_gpus,
        built_by,
        built_for,
        transformers_version,
        problems or {},
        manifest or {},
        tokenizer_sha256,
    )
