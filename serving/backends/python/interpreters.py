"""Other Pythons than the server's own: whether a worker can run in them, and what they need for that."""

import asyncio
import importlib.util
import sys
import sysconfig
from pathlib import Path

import msgspec

from serving.backends.python.launch import Interpreter
from sluice.errors import ErrorCode, SluiceError

NEEDED = ("msgspec", "numpy", "ml_dtypes")
"""What a worker imports beside the standard library. All of it is compiled for one version of Python."""
OLDEST = (3, 11)
"""What Sluice itself is written for."""
_PROBE_TIMEOUT_S = 60.0
_PROBE = """
import importlib.util, json, sys, sysconfig
found = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is not None]
print(json.dumps([sys.version_info[:2], sysconfig.get_config_var("SOABI"), found]))
"""


class _Probed(msgspec.Struct, array_like=True):
    version: tuple[int, int]
    abi: str | None
    found: list[str]

    @property
    def name(self) -> str:
        return "Python {}.{}".format(*self.version)


async def interpreter_in(folder: Path, origin: str) -> Interpreter:
    """That of an environment: its packages are the model's. `origin` names it in errors.

    Raises SluiceError INVALID where it is none, or no worker can run in it.
    """
    executable = folder / "bin" / "python"
    if not executable.is_file():
        reason = "it has no bin/python; it is a conda or a virtual environment, or a .tar.gz of one"
        raise _unusable(origin, reason)
    lent = await _lent_to(executable, origin)
    variable = "CONDA_PREFIX" if (folder / "conda-meta").is_dir() else "VIRTUAL_ENV"
    return Interpreter(str(executable), lent, {variable: str(folder)}, str(executable.parent))


async def interpreter_at(executable: Path) -> Interpreter:
    """One by its own path. Raises SluiceError INVALID where no worker can run in it."""
    return Interpreter(str(executable), await _lent_to(executable, str(executable)))


async def _lent_to(executable: Path, origin: str) -> dict[str, str]:
    """What the server lends to that interpreter: it must be able to load it, or have its own."""
    probed = await _probe(executable, origin)
    own = "Python {}.{}".format(*sys.version_info)
    if probed.version < OLDEST:
        raise _unusable(origin, f"it has {probed.name}, and models run in Python {OLDEST[0]}.{OLDEST[1]} or later")
    missing = [name for name in NEEDED if name not in probed.found]
    if missing and probed.abi != sysconfig.get_config_var("SOABI"):
        raise _unusable(
            origin,
            f"it has {probed.name} and the server {own}, which cannot lend it {', '.join(missing)}: install these in "
            f"the environment, or make it with {own}",
        )
    return {name: _folder_of(name) for name in missing}


async def _probe(executable: Path, origin: str) -> _Probed:
    try:
        process = await asyncio.create_subprocess_exec(
            *(str(executable), "-I", "-c", _PROBE, *NEEDED),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        raise _unusable(origin, f"'{executable}' cannot be run: {error.strerror}") from None
    try:
        async with asyncio.timeout(_PROBE_TIMEOUT_S):
            said, complaint = await process.communicate()
        return msgspec.json.decode(said, type=_Probed)
    except TimeoutError:
        process.kill()
        await process.wait()
        raise _unusable(origin, f"'{executable}' does not answer") from None
    except msgspec.DecodeError:
        lines = complaint.decode(errors="replace").strip().splitlines()
        raise _unusable(origin, f"'{executable}' does not work: {lines[-1] if lines else 'it says nothing'}") from None


def _folder_of(name: str) -> str:
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None
    return str(Path(spec.origin).parents[1])


def _unusable(origin: str, reason: str) -> SluiceError:
    return SluiceError(ErrorCode.INVALID, f"the execution environment '{origin}' cannot be used: {reason}")
