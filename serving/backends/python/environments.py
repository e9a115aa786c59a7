"""`EXECUTION_ENV_PATH`: environments that models bring along, packed or not."""

import asyncio
import shutil
import tarfile
import tempfile
import weakref
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.backends.python.interpreters import interpreter_in
from serving.backends.python.launch import Interpreter
from sluice.errors import ErrorCode, SluiceError

PARAMETER = "EXECUTION_ENV_PATH"
MODEL_FOLDER = "$$TRITON_MODEL_DIRECTORY"
IDLE_KEEP_S = 30.0
"""How long one that nobody uses stays unpacked: a model is completed, then loaded, and soon perhaps loaded again."""

_Key = tuple[Path, int, int]
"""An archive as it is now: where it lies, when it was changed, and its size."""


def environment_path(config: ModelConfig, folder: Path) -> Path | None:
    """Where the environment of the model in `folder` lies; None where it has none of its own."""
    text = config.parameters[PARAMETER].string_value if PARAMETER in config.parameters else ""
    return Path(text.replace(MODEL_FOLDER, str(folder))) if text else None


class Lease:
    """An interpreter whose environment stays where it is until `release`."""

    def __init__(self, interpreter: Interpreter, on_release: Callable[[], None] | None = None) -> None:
        self.interpreter = interpreter
        self._on_release = on_release

    def release(self) -> None:
        """Idempotent."""
        on_release, self._on_release = self._on_release, None
        if on_release is not None:
            on_release()


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Unpacked:
    ready: asyncio.Task[Interpreter]
    remove: Callable[[], Any]
    """Delete it; done at the end of this process at the latest."""
    num_users: int = 0
    removal: asyncio.TimerHandle | None = None


class Environments:
    """Environments in use. Each archive is unpacked once, for all that use it. Event loop's thread only."""

    def __init__(self, idle_keep_s: float = IDLE_KEEP_S) -> None:
        self._idle_keep_s = idle_keep_s
        self._unpacked: dict[_Key, _Unpacked] = {}

    async def lease(self, path: Path) -> Lease:
        """The interpreter of a folder or of an archive. Raises SluiceError INVALID for what is neither."""
        if await asyncio.to_thread(path.is_dir):
            return Lease(await interpreter_in(path, str(path)))
        key = await asyncio.to_thread(_key_of, path)
        entry = self._unpacked.get(key) or self._unpack(key)
        self._hold(entry)
        try:
            # One of several models that wait for it may be called off, and the others go on.
            interpreter = await asyncio.shield(entry.ready)
        except BaseException:
            self._release(key, entry)
            raise
        return Lease(interpreter, lambda: self._release(key, entry))

    def _unpack(self, key: _Key) -> _Unpacked:
        folder = tempfile.mkdtemp(prefix="sluice-environment-")
        ready = asyncio.get_running_loop().create_task(_prepare(key[0], Path(folder)))
        ready.add_done_callback(lambda task: None if task.cancelled() else task.exception())
        entry = self._unpacked[key] = _Unpacked(ready, lambda: None)
        entry.remove = weakref.finalize(entry, shutil.rmtree, folder, ignore_errors=True)
        return entry

    def _hold(self, entry: _Unpacked) -> None:
        entry.num_users += 1
        if entry.removal is not None:
            entry.removal.cancel()
            entry.removal = None

    def _release(self, key: _Key, entry: _Unpacked) -> None:
        entry.num_users -= 1
        if entry.num_users:
            return
        has_failed = entry.ready.done() and (entry.ready.cancelled() or entry.ready.exception() is not None)
        self._remove_later(key, entry, 0.0 if has_failed else self._idle_keep_s)

    def _remove_later(self, key: _Key, entry: _Unpacked, delay_s: float) -> None:
        entry.removal = asyncio.get_running_loop().call_later(delay_s, self._remove, key, entry)

    def _remove(self, key: _Key, entry: _Unpacked) -> None:
        if not entry.ready.done():  # nobody wants it any more, but its files are still being written
            self._remove_later(key, entry, self._idle_keep_s)
            return
        del self._unpacked[key]
        asyncio.get_running_loop().run_in_executor(None, entry.remove)


def _key_of(path: Path) -> _Key:
    try:
        found = path.resolve(strict=True)
        state = found.stat()
    except OSError as error:
        raise _unusable(path, error.strerror or str(error)) from None
    return found, state.st_mtime_ns, state.st_size


async def _prepare(archive: Path, folder: Path) -> Interpreter:
    await asyncio.to_thread(_extract, archive, folder)
    interpreter = await interpreter_in(folder, str(archive))
    fix = folder / "bin" / "conda-unpack"
    if await asyncio.to_thread(fix.is_file):
        await _fix_paths(interpreter, fix, archive)
    return interpreter


def _extract(archive: Path, folder: Path) -> None:
    try:
        with tarfile.open(archive) as tar:
            # Links may lead to where the interpreter is installed, but nothing is written outside of the folder.
            tar.extractall(folder, filter="tar")
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise _unusable(archive, f"it cannot be unpacked: {error}") from None


async def _fix_paths(interpreter: Interpreter, script: Path, archive: Path) -> None:
    """conda-pack's own script, which writes the place where it lies now into its files."""
    process = await asyncio.create_subprocess_exec(
        *(interpreter.executable, "-I", str(script)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, complaint = await process.communicate()
    if process.returncode:
        raise _unusable(archive, f"its conda-unpack fails: {complaint.decode(errors='replace').strip()}")


def _unusable(path: Path, reason: str) -> SluiceError:
    return SluiceError(ErrorCode.INVALID, f"the execution environment '{path}' cannot be used: {reason}")
