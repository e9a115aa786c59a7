"""`sluice runtime`: its command line."""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from urllib.parse import unquote, urlparse

import msgspec
from rich.console import Console
from rich.table import Table

from sluice.cli.errors import CommandError, reports_errors
from sluice.engine.config import Runtime
from sluice.engine.runtime_spec import PROCESS_NEEDS, RuntimeSpec, own_environment
from sluice.engine.runtimes import BUNDLED, RUNTIMES
from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.options.option import USAGE_ERROR, OneLineParser
from sluice.machine import num_gpus

_OVERVIEW = """\
Show the runtimes that models can run on, and install those that need an environment of their own: they pin other
releases of libraries than the gateway needs.
"""
_EPILOG = """\
examples:
  sluice runtime list                                   which runtimes there are, and where they are installed
  sluice runtime install vllm                           vLLM for this machine's GPUs, without one for its CPU
  sluice runtime install vllm --folder /opt/vllm        the same elsewhere; serve with --engine-python
  sluice runtime install tensorrt_llm                   what TensorRT-LLM needs, and the commands

`sluice serve` finds what is installed into the default folder by itself. An interrupted install is repeated with
--force, and removing the folder uninstalls it.
"""


@reports_errors("sluice runtime")
def command(argv: list[str]) -> int:
    """Show the runtimes that models can run on, and install them."""
    arguments = parse_arguments(argv)
    console = Console()
    if arguments.action == "list":
        _print_list(console)
        return 0
    spec = RUNTIMES[arguments.runtime]
    if spec.install.by_hand:
        sys.stdout.write(spec.install.by_hand)
        return 0
    if spec is BUNDLED:
        sys.stdout.write(f"{spec.title} comes with Sluice; there is nothing to install\n")
        return 0
    folder = Path(arguments.folder or own_environment(spec.runtime)).expanduser().absolute()
    is_on_gpu = {"auto": num_gpus() > 0, "gpu": True, "cpu": False}[arguments.device]
    return _install(spec, folder, console, is_on_gpu=is_on_gpu, is_forced=arguments.force)


def _install(spec: RuntimeSpec, folder: Path, console: Console, *, is_on_gpu: bool, is_forced: bool) -> int:
    if folder.exists() and any(folder.iterdir()) and not is_forced:
        raise CommandError(f"{folder} is not empty; --force makes it anew", USAGE_ERROR)
    if folder.exists() and not _is_environment(folder):
        raise CommandError(f"{folder} holds something else than an environment; name another", USAGE_ERROR)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_overrides(spec, folder)
    device = "GPUs" if is_on_gpu else f"the CPU (about {spec.install.size_gb:g} GB)"
    console.print(f"Installing {spec.title} for {device} into {folder}", highlight=False, soft_wrap=True)
    steps = list(plan_steps(spec, folder, is_on_gpu=is_on_gpu))
    for number, step in enumerate(steps, 1):
        line = f"[{number}/{len(steps)}] {step.what}"
        with console.status(line):  # a spinner on a terminal, and nothing elsewhere
            if not console.is_terminal:
                console.print(line, highlight=False, markup=False, soft_wrap=True)
            run_step(step, folder / LOG)
        if console.is_terminal:
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    is_default = folder == own_environment(spec.runtime)
    option = "" if is_default else f" --engine-python {folder / 'bin' / 'python'}"
    console.print(f"Done: sluice serve MODEL --runtime {spec.runtime}{option}", highlight=False, soft_wrap=True)
    return 0


def _is_environment(folder: Path) -> bool:
    """Whether it is empty, or was made by this command."""
    return not any(folder.iterdir()) or (folder / OVERRIDES).is_file()


def _print_list(console: Console) -> None:
    table = Table("runtime", "runs on", "installed", box=None, pad_edge=False)
    for spec in RUNTIMES.values():
        table.add_row(spec.runtime.value, spec.devices, _place(spec))
    console.print(table)


def _place(spec: RuntimeSpec) -> str:
    if spec is BUNDLED:
        return "with Sluice"
    if not spec.is_installed():
        return f"no: sluice runtime install {spec.runtime}"
    python = spec.default_python()
    return "for this Python" if python in (None, sys.executable) else python


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Parse the command line. Exits the process for bad arguments and after --help."""
    parser = OneLineParser(
        prog="sluice runtime", usage="sluice runtime list | install RUNTIME [OPTIONS]", description=_OVERVIEW,
        epilog=_EPILOG,
    )  # fmt: skip
    parser.add_argument("action", choices=("list", "install"), metavar="list|install")
    parser.add_argument(
        "runtime", nargs="?", type=Runtime, choices=list(RUNTIMES), metavar="RUNTIME",
        help=f"one of {', '.join(RUNTIMES)}",
    )  # fmt: skip
    parser.add_argument("--folder", metavar="FOLDER", help="default: ~/.local/share/sluice/runtimes/RUNTIME")
    parser.add_argument(
        "--device", choices=("auto", "gpu", "cpu"), default="auto", help="default: auto, a GPU where there is one"
    )
    parser.add_argument("--force", action="store_true", help="make an environment anew that is there")
    arguments = parser.parse_args(argv)
    if arguments.action == "install" and arguments.runtime is None:
        parser.error(f"install needs a RUNTIME: {', '.join(RUNTIMES)}")
    return arguments


OVERRIDES = "overrides.txt"
LOG = "install.log"
_SHOWN_LINES = 15
_ENGINE_NEEDS = {"zmq": "pyzmq", "msgspec": "msgspec", "packaging": "packaging"}
"""Distributions by module; those of this package are installed with it."""


@dataclass(frozen=True, slots=True)
class InstallStep:
    """A command of an installation. `what` describes it in the progress."""

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
    """Return pip's requirement for this version of Sluice: the folder that it was installed from, else PyPI."""
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
