"""Sleep: TensorRT-LLM gives the memory of its weights and its KV cache back, and takes it again.

Its workers release memory by tags where `sleep_config` is set (1.3 and 1.4). They keep a copy of the weights in the
host's memory and drop the KV cache. Level 0, which only stops the scheduling, is ours and needs nothing of it.
"""

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any

from packaging.version import Version

from sluice.engine.delegated.tensorrt_llm.configuration.arguments import Resolution
from sluice.engine.frames import SleepMode
from sluice.errors import ErrorCode, SluiceError, invalid

_CONFIG = "sleep_config"
_MODES = f"{_CONFIG}.restore_modes"
_TAGS = {
    "weights": ("model", "model_weights", "draft_model", "draft_model_weights"),
    "kv_cache": ("kv_cache",),
}
"""The library's tags by those of the API. Those of small things, such as its sampler's, stay on the GPU."""
_ALL = tuple(tag for tags in _TAGS.values() for tag in tags)
_LOSES = ("NONE", "MEMSET")
"""Restore modes that keep no copy."""
_LOOK_S = 0.02
_SALT_BYTES = 8


def resolve_sleep(resolution: Resolution) -> None:
    """Add the argument that sleeping needs, where it is enabled. Raises INVALID where the weights would not come back:
    the library has no way to read them again."""
    arguments, version = resolution.arguments, resolution.library.version
    if resolution.config.enable_sleep_mode:
        arguments.add_default(_CONFIG, {}, "enable_sleep_mode")
        if _CONFIG not in resolution.library.arguments(is_engine=resolution.is_engine):
            resolution.notes.append(f"enable_sleep_mode: {_lacks(version)}")
    modes = arguments.get(_MODES)
    for tag, mode in (modes if isinstance(modes, dict) else {}).items():
        if tag in _TAGS["weights"] and str(mode).upper() in _LOSES:
            raise arguments.refusal(_MODES, f"must be CPU or PINNED for {tag}, or it is lost with a sleep, got {mode}")


def _lacks(version: Version) -> str:
    return f"TensorRT-LLM {version} can give no memory back, so it sleeps at level 0 alone; 1.4 ({_CONFIG}) can"


class Sleeper:
    """Puts a loaded LLM to sleep and wakes it. `is_busy` is set while it has requests."""

    def __init__(self, llm: Any, version: Version, *, can_release: bool) -> None:
        self._llm = llm
        self._version = version
        self._can_release = can_release
        self._released: frozenset[str] = frozenset()
        self.salt = ""
        """A text that all salts begin with since the cache was last dropped. Versions differ in whether they forget
        which blocks they had: none of those may be found, since they are empty."""

    @property
    def is_asleep(self) -> bool:
        """Whether memory is away."""
        return bool(self._released)

    def check(self, level: int, mode: SleepMode, is_busy: asyncio.Event) -> None:
        """Raise SluiceError where it cannot sleep so."""
        if level > 1:
            message = "TensorRT-LLM cannot read weights again that it has dropped; level must be 0 or 1, got 2"
            raise SluiceError(ErrorCode.UNIMPLEMENTED, message, param="level")
        if level and not self._can_release:
            raise SluiceError(ErrorCode.UNIMPLEMENTED, _lacks(self._version), param="level")
        if mode == "keep" and is_busy.is_set():
            message = "mode must be wait or abort while requests run: TensorRT-LLM cannot halt them, got 'keep'"
            raise invalid("mode", message)

    async def sleep(self, level: int, is_busy: asyncio.Event) -> None:
        """Fall asleep once all requests have ended."""
        while is_busy.is_set():  # noqa: ASYNC110 - the executor's event is waited for the other way round
            await asyncio.sleep(_LOOK_S)
        if not level or self._released == {*_ALL}:
            return
        await self.wake_up(None)  # the library releases no more while something is away
        # Where it fails half way, nobody knows what is away: all is woken, and no block of before is found.
        self._released, self.salt = frozenset(_ALL), secrets.token_hex(_SALT_BYTES)
        try:
            await self._call("sleep", _ALL)
        except SluiceError:
            self._released = frozenset()
            raise
        except Exception:
            await self.wake_up(None)
            raise

    async def wake_up(self, tags: list[str] | None) -> bool:
        """See `DelegatedRuntime.check_sleep`."""
        wanted = [tag for name in tags or _TAGS for tag in _TAGS.get(name, ()) if tag in self._released]
        if wanted:
            await self._call("wakeup", wanted)
            self._released -= {*wanted}
        return not self._released

    async def _call(self, method: str, tags: Sequence[str]) -> None:
        """Have all workers do something, which blocks."""
        call = getattr(self._llm, "_collective_rpc")  # noqa: B009 - a private member, which NVIDIA's tests use
        try:
            await asyncio.to_thread(call, method, (list(tags),))
        except (NotImplementedError, ValueError) as error:
            message = f"TensorRT-LLM {self._version} refuses {method}: {error}"
            raise SluiceError(ErrorCode.UNIMPLEMENTED, message, param="level") from error
