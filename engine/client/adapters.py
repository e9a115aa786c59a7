"""The LoRA adapters of a client's engine: changes to them, and what a new engine in place of a lost one must have."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from sluice.engine.client.answers import AnsweredCommands
from sluice.engine.config import EngineConfig
from sluice.engine.frames import AdapterOutcome, LoadAdapter, UnloadAdapter
from sluice.engine.types import EngineInfo
from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.files import files_mark

log = logging.getLogger(__name__)


class AdapterControl:
    """Loads and unloads adapters, and holds requests of those that a new engine is still to load."""

    def __init__(
        self,
        config: EngineConfig,
        answers: AnsweredCommands,
        info: Callable[[], EngineInfo],
        refuse_if_lost: Callable[[], None],
    ) -> None:
        """`info` returns what is known of the engine now."""
        self.folders = dict(config.lora_modules)
        """Folders of the adapters that were given or loaded, by name. A new engine gets the same ones."""
        self.marks = {name: files_mark(Path(path), is_flat=True) for name, path in self.folders.items()}
        """Marks of the files in those folders when they were given or loaded, by name."""
        self._answers = answers
        self._info = info
        self._refuse_if_lost = refuse_if_lost
        self.missing: set[str] = set()
        """Adapters that a new engine is still to load again: hold their requests."""
        self._held: list[int] = []

    async def load(self, name: str, path: str, *, replaces: bool) -> None:
        """Load the adapter in the folder `path`. Raises INVALID for a name that is taken, unless it `replaces` that
        adapter, and the engine's error for one that it does not take; nothing has changed then."""
        async with self._answers.lock:
            if name in self._info().adapters and not replaces:
                raise invalid("lora_name", f"LoRA adapter {name!r} has already been loaded; load_inplace replaces it")
            mark = await asyncio.to_thread(files_mark, Path(path), is_flat=True)  # whatever is in there
            self._refuse_if_lost()
            await self._answers.ask(LoadAdapter(name, path))
            self.folders[name], self.marks[name] = path, mark

    async def unload(self, name: str) -> None:
        """Remove an adapter. Requests in flight with it end as usual. Raises NOT_FOUND for an unknown name."""
        async with self._answers.lock:
            if name not in (names := self._info().adapters):
                message = f"there is no LoRA adapter {name!r}; loaded: {', '.join(names) or 'none'}"
                raise SluiceError(ErrorCode.NOT_FOUND, message, param="lora_name")
            self._refuse_if_lost()
            await self._answers.ask(UnloadAdapter(name))
            self.folders.pop(name, None)

    def take(self, outcome: AdapterOutcome) -> EngineInfo:
        """Take what became of a change. Returns what is known of the engine from then on."""
        info = self._info()
        is_answer = self._answers.is_awaited(outcome)
        if outcome.code is None:  # those of the last engine are still to come
            info = with_adapters(info, (*outcome.adapters, *(() if is_answer else self.folders)))
            info = msgspec.structs.replace(info, adapter_digests=outcome.digests)
        elif not is_answer:
            log.error("LoRA adapter %s is lost with the last engine: %s", outcome.name, outcome.message)
            self.folders.pop(outcome.name, None)
            info = with_adapters(info, (name for name in info.adapters if name != outcome.name))
        if is_answer:
            self._answers.take(outcome)
        return info

    # -- a new engine in place of a lost one

    def config_now(self, config: EngineConfig) -> EngineConfig:
        """Return `config` for another engine: without the adapters that were unloaded or replaced since."""
        modules = config.lora_modules
        kept = {name: path for name, path in modules.items() if self.folders.get(name) == path}
        enables = config.enable_lora or kept != modules  # those that are loaded again need room
        return msgspec.structs.replace(config, lora_modules=kept, enable_lora=enables)

    def commands_for_new_engine(self, config: EngineConfig) -> list[LoadAdapter]:
        """Return what loads the adapters that an engine started with `config_now` lacks; requests of them wait."""
        self.missing = self.folders.keys() - self.config_now(config).lora_modules.keys()
        return [LoadAdapter(name, self.folders[name]) for name in self.missing]

    def expect(self, names: Iterable[str]) -> None:
        """Have requests of these adapters wait, which somebody else is to load."""
        self.missing = set(names)

    def with_missing(self) -> EngineInfo:
        """Return what is known of the engine, with the adapters that it is still to load."""
        return with_adapters(self._info(), (*self._info().adapters, *self.missing))

    def lose_engine(self) -> None:
        """Forget whose adapter is missing: the engine is lost, and all requests are sent again."""
        self.missing, self._held = set(), []

    def hold(self, stream_id: int) -> None:
        """Keep a request whose adapter is missing for `take_held`."""
        self._held.append(stream_id)

    def take_held(self, name: str) -> list[int]:
        """Return the requests to send, now that the adapter is loaded or lost. Some may be held again."""
        if name not in self.missing:
            return []
        self.missing.discard(name)
        held, self._held = self._held, []
        return held


def with_adapters(info: EngineInfo, names: Iterable[str]) -> EngineInfo:
    """Return `info` with these adapters."""
    return msgspec.structs.replace(info, adapters=tuple(sorted(set(names))))
