"""Interpreters of workers: the server's, another, or that of an environment (`EXECUTION_ENV_PATH`), also packed."""

import asyncio
import importlib.util
import json
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import SluiceError, invalid_argument
from sluice.run_folder import make_folder

_PARAMETER = "EXECUTION_ENV_PATH"
_MODEL_FOLDER = "$$TRITON_MODEL_DIRECTORY"
IDLE_KEEP_S = 30.0
"""Seconds an unused environment stays unpacked: a model is completed, then loaded, and perhaps soon loaded again."""
WORKER_PACKAGES = ("msgspec", "numpy", "ml_dtypes")
"""Packages that a worker imports beside the standard library. All are compiled for one version of Python."""
OLDEST_PYTHON = (3, 11)
"""Oldest version of Python that runs Sluice's code."""
_PROBE_TIMEOUT_S = 60.0
_PROBE = """
import importlib.util, json, sys, sysconfig
found = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is not None]
print(json.dumps([sys.version_info[:2], sysconfig.get_config_var("SOABI"), found]))
"""


def check_environment(path: Path) -> Path | None:
    """Check an environment without unpacking it. Return its interpreter where it is a folder.

    Raises INVALID where no worker can run in it. Reads files: for a thread.
    """
    if path.is_dir():
        return _executable(path, path)
    _read_key(path)
    if not tarfile.is_tarfile(path):
        raise _unusable(path, "it cannot be unpacked: it is no archive")
    return None


def find_modules(executable: Path, names: Sequence[str]) -> set[str]:
    """Return the modules that an interpreter finds. Raises INVALID where it does not work. For a thread."""
    command = (str(executable), "-I", "-c", _PROBE, *names)
    try:
        done = subprocess.run(command, capture_output=True, timeout=_PROBE_TIMEOUT_S, stdin=subprocess.DEVNULL)
        return set(msgspec.json.decode(done.stdout, type=_Probed).found)
    except (OSError, subprocess.TimeoutExpired, msgspec.DecodeError) as error:
        raise _unusable(executable, f"it does not work: {error}") from None


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python that can run a worker.

    `packages` are provided by the server's installation, each with the folder it is in. `variables` are those of its
    environment, if it has one; `bin_folder` then comes first on the PATH, and variables for the server's own
    interpreter are ignored.
    """

    executable: str
    packages: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    bin_folder: str = ""


SERVER_INTERPRETER = Interpreter(sys.executable)
"""Interpreter that the server itself runs in."""


@dataclass(frozen=True, slots=True)
class WorkerLaunch:
    """How to start a worker. `cores` bind it, none to any. `start_timeout_s` limits the time before its load."""

    interpreter: Interpreter = SERVER_INTERPRETER
    cores: frozenset[int] = frozenset()
    start_timeout_s: float = 30.0

    def arguments(self, script: Path, socket_fd: int, progress_fd: int) -> list[str]:
        """Return the command line of the process; `script` is `worker/start.py`."""
        python = self.interpreter
        launch: dict[str, Any] = {
            "socket": socket_fd,
            "progress": progress_fd,
            "cores": sorted(self.cores),
            "packages": python.packages,
            "variables": python.variables,
            "bin": python.bin_folder,
        }
        isolation = ("-E", "-s") if python.bin_folder else ()
        return [python.executable, *isolation, str(script), json.dumps(launch)]


def environment_path(config: ModelConfig, folder: Path) -> Path | None:
    """Return the path of the environment that a model brings; None where it has none."""
    text = config.parameters[_PARAMETER].string_value if _PARAMETER in config.parameters else ""
    return Path(text.replace(_MODEL_FOLDER, str(folder))) if text else None


class InterpreterLease:
    """An interpreter whose environment is kept until `release`."""

    def __init__(self, interpreter: Interpreter, on_release: Callable[[], None] | None = None) -> None:
        self.interpreter = interpreter
        self._on_release = on_release

    def release(self) -> None:
        """Release the environment. Idempotent."""
        on_release, self._on_release = self._on_release, None
        if on_release is not None:
            on_release()


_Key = tuple[Path, int, int]
"""Identity of an archive: path, time of its last change, size."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Unpacked:
    ready: asyncio.Task[Interpreter]
    remove: Callable[[], Any]
    """Deletes the folder; called when this process ends at the latest."""
    num_users: int = 0
    removal: asyncio.TimerHandle | None = None


class EnvironmentCache:
    """Unpacks each archive once for all models that use it. Event loop's thread only."""

    def __init__(self, idle_keep_s: float = IDLE_KEEP_S) -> None:
        self._idle_keep_s = idle_keep_s
        self._unpacked: dict[_Key, _Unpacked] = {}

    async def lease(self, path: Path) -> InterpreterLease:
        """Lease the interpreter of a folder or an archive. Raises INVALID for anything else."""
        if await asyncio.to_thread(path.is_dir):
            return InterpreterLease(await find_environment_interpreter(path, str(path)))
        key = await asyncio.to_thread(_read_key, path)
        entry = self._unpacked.get(key) or self._unpack(key)
        entry.num_users += 1
        if entry.removal is not None:
            entry.removal.cancel()
            entry.removal = None
        try:
            # One of several models that wait for it may be cancelled; the others go on.
            interpreter = await asyncio.shield(entry.ready)
        except BaseException:
            self._release(key, entry)
            raise
        return InterpreterLease(interpreter, lambda: self._release(key, entry))

    def _unpack(self, key: _Key) -> _Unpacked:
        folder = make_folder("environment")
        ready = asyncio.get_running_loop().create_task(_prepare(key[0], folder))
        ready.add_done_callback(lambda task: None if task.cancelled() else task.exception())
        entry = self._unpacked[key] = _Unpacked(ready, lambda: None)
        entry.remove = weakref.finalize(entry, shutil.rmtree, folder, ignore_errors=True)
        return entry

    def _release(self, key: _Key, entry: _Unpacked) -> None:
        entry.num_users -= 1
        if entry.num_users:
            return
        has_failed = entry.ready.done() and (entry.ready.cancelled() or entry.ready.exception() is not None)
        self._remove_later(key, entry, 0.0 if has_failed else self._idle_keep_s)

    def _remove_later(self, key: _Key, entry: _Unpacked, delay_s: float) -> None:
        entry.removal = asyncio.get_running_loop().call_later(delay_s, self._remove, key, entry)

    def _remove(self, key: _Key, entry: _Unpacked) -> None:
        if not entry.ready.done():  # unused, but its files are still being written
            self._remove_later(key, entry, self._idle_keep_s)
            return
        del self._unpacked[key]
        asyncio.get_running_loop().run_in_executor(None, entry.remove)


def _read_key(path: Path) -> _Key:
    try:
        found = path.resolve(strict=True)
        state = found.stat()
    except OSError as error:
        raise _unusable(path, error.strerror or str(error)) from None
    return found, state.st_mtime_ns, state.st_size


async def _prepare(archive: Path, folder: Path) -> Interpreter:
    await asyncio.to_thread(_extract, archive, folder)
    interpreter = await find_environment_interpreter(folder, str(archive))
    script = folder / "bin" / "conda-unpack"
    if await asyncio.to_thread(script.is_file):
        await _fix_paths(interpreter, script, archive)
    return interpreter


def _extract(archive: Path, folder: Path) -> None:
    try:
        with tarfile.open(archive) as tar:
            # Links may lead to where the interpreter is installed, but nothing is written outside of the folder.
            tar.extractall(folder, filter="tar")
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise _unusable(archive, f"it cannot be unpacked: {error}") from None


async def _fix_paths(interpreter: Interpreter, script: Path, archive: Path) -> None:
    """Run conda-pack's own script, which writes the environment's present location into its files."""
    process = await asyncio.create_subprocess_exec(
        *(interpreter.executable, "-I", str(script)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await process.communicate()
    if process.returncode:
        raise _unusable(archive, f"its conda-unpack fails: {errors.decode(errors='replace').strip()}")


async def find_environment_interpreter(folder: Path, origin: str) -> Interpreter:
    """Return the environment's interpreter. `origin` is for errors. Raises INVALID where no worker can run in it."""
    executable = _executable(folder, origin)
    packages = await _find_missing_packages(executable, origin)
    variable = "CONDA_PREFIX" if (folder / "conda-meta").is_dir() else "VIRTUAL_ENV"
    return Interpreter(str(executable), packages, {variable: str(folder)}, str(executable.parent))


def _executable(folder: Path, origin: str | Path) -> Path:
    executable = folder / "bin" / "python"
    if not executable.is_file():
        raise _unusable(origin, "it has no bin/python; it is a conda or a virtual environment, or a .tar.gz of one")
    return executable


async def find_interpreter(executable: Path) -> Interpreter:
    """Return the interpreter at a path. Raises INVALID where no worker can run in it."""
    return Interpreter(str(executable), await _find_missing_packages(executable, str(executable)))


async def _find_missing_packages(executable: Path, origin: str) -> dict[str, str]:
    """Return the packages that the server must provide, with folders. The interpreter must be able to load them."""
    probed = await _probe(executable, origin)
    own = "Python {}.{}".format(*sys.version_info)
    if probed.version < OLDEST_PYTHON:
        raise _unusable(
            origin, f"it has {probed.name}, and models run in Python {OLDEST_PYTHON[0]}.{OLDEST_PYTHON[1]} or later"
        )
    missing = [name for name in WORKER_PACKAGES if name not in probed.found]
    if missing and probed.abi != sysconfig.get_config_var("SOABI"):
        raise _unusable(
            origin,
            f"it has {probed.name} and the server {own}, which cannot lend it {', '.join(missing)}: install these in "
            f"the environment, or make it with {own}",
        )
    return {name: _package_folder(name) for name in missing}


class _Probed(msgspec.Struct, array_like=True):
    version: tuple[int, int]
    abi: str | None
    found: list[str]

    @property
    def name(self) -> str:
        return "Python {}.{}".format(*self.version)


async def _probe(executable: Path, origin: str) -> _Probed:
    try:
        process = await asyncio.create_subprocess_exec(
            *(str(executable), "-I", "-c", _PROBE, *WORKER_PACKAGES),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        raise _unusable(origin, f"'{executable}' cannot be run: {error.strerror}") from None
    try:
        async with asyncio.timeout(_PROBE_TIMEOUT_S):
            output, errors = await process.communicate()
        return msgspec.json.decode(output, type=_Probed)
    except TimeoutError:
        process.kill()
        await process.wait()
        raise _unusable(origin, f"'{executable}' does not answer") from None
    except msgspec.DecodeError:
        lines = errors.decode(errors="replace").strip().splitlines()
        raise _unusable(origin, f"'{executable}' does not work: {lines[-1] if lines else 'it says nothing'}") from None


def _package_folder(name: str) -> str:
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None
    return str(Path(spec.origin).parents[1])


def _unusable(origin: str | Path, reason: str) -> SluiceError:
    return invalid_argument(f"the execution environment '{origin}' cannot be used: {reason}")
