"""An environment for a runtime: a venv with its library and with what the engine's process needs."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from urllib.parse import unquote, urlparse

import msgspec

from sluice.engine.runtime_spec import PROCESS_NEEDS, RuntimeSpec
from sluice.errors import ErrorCode, SluiceError

OVERRIDES = "overrides.txt"
LOG = "install.log"
_SHOWN_LINES = 15
_ENGINE_NEEDS = {"zmq": "pyzmq", "msgspec": "msgspec", "packaging": "packaging"}
"""Distributions by module; those of this package are installed with it."""


@dataclass(frozen=True, slots=True)
class InstallStep:
    """One command. `what` says what it does, for the progress."""

    what: str
    command: tuple[str, ...]


def plan_steps(spec: RuntimeSpec, folder: Path, *, is_on_gpu: bool) -> Iterator[InstallStep]:
    """Yield the commands that make the environment. Raises UNAVAILABLE where the runtime has nothing for the device."""
    install = spec.install
    packages = install.on_gpu if is_on_gpu else install.on_cpu
    if not packages:
        raise SluiceError(ErrorCode.UNAVAILABLE, f"{spec.title} does not run on {'a GPU' if is_on_gpu else 'a CPU'}")
    python = str(folder / "bin" / "python")
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    yield InstallStep("making a virtual environment", (sys.executable, "-m", "venv", str(folder)))
    yield InstallStep("installing uv, which finds fitting versions fast", (*pip, "uv"))
    *first, last = packages
    for package in first:
        # By pip, as it is set up: torch's wheels for a CPU often lie in a place of their own.
        yield InstallStep(f"installing {package}", (*pip, package))
    uv = (str(folder / "bin" / "uv"), "pip", "install", "--quiet", "--python", python)
    overrides = ("--override", str(folder / OVERRIDES)) if install.overrides_on_cpu and not is_on_gpu else ()
    needs = sorted({_ENGINE_NEEDS[module] for module in PROCESS_NEEDS if module in _ENGINE_NEEDS})
    yield InstallStep(f"installing {last} and what it needs", (*uv, *overrides, last, *needs))
    yield InstallStep("installing Sluice's engine", (*pip, "--no-deps", *own_requirement()))
    yield InstallStep(f"loading {spec.title}", (python, "-c", f"import {spec.library}, {spec.process}"))


def own_requirement() -> tuple[str, ...]:
    """Return what pip installs this version of Sluice from: the folder that it was installed from, else PyPI."""
    own = distribution("sluice")
    origin = msgspec.json.decode(own.read_text("direct_url.json") or "{}", type=dict[str, object])
    url = urlparse(str(origin.get("url", "")))
    if url.scheme != "file":
        return (f"sluice=={own.version}",)
    folder = unquote(url.path)
    return ("--editable", folder) if origin.get("dir_info") == {"editable": True} else (folder,)


def write_overrides(spec: RuntimeSpec, folder: Path) -> None:
    (folder / OVERRIDES).write_text("".join(f"{line}\n" for line in spec.install.overrides_on_cpu))


def run_step(step: InstallStep, log: Path) -> None:
    """Run a step. Raises UNAVAILABLE with the end of its output, which `log` has whole."""
    with log.open("a+") as output:
        output.write(f"$ {' '.join(step.command)}\n")
        output.flush()
        start = output.tell()
        done = subprocess.run(step.command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False)
        if done.returncode == 0:
            return
        output.seek(start)
        lines = output.read().splitlines()[-_SHOWN_LINES:]
    raise SluiceError(ErrorCode.UNAVAILABLE, "\n".join((f"{step.what} failed; {log} has all of it:", *lines)))
