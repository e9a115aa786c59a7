"""The LoRA adapters of a runner, by name, and the changes to them that are under way."""

import logging
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from sluice.engine.frames import AdapterOutcome, LoadAdapter, UnloadAdapter
from sluice.engine.runners.base import Runner
from sluice.engine.sequence import Sequence
from sluice.errors import ErrorCode, SluiceError
from sluice.files import files_digest

log = logging.getLogger(__name__)


class _Change(NamedTuple):
    """A change under way: the command that asked for it, or None to free memory; the number of the adapter that it
    loads; and its work on the other thread."""

    command: LoadAdapter | UnloadAdapter | None
    number: int = 0
    work: Future[Callable[[], None]] | None = None


class AdapterTable:
    """Gives every loaded adapter a number of its own: one that is loaded again under the same name is another adapter.
    The digest of its files keeps its KV blocks apart, here and in all engines that have loaded them. The weights of a
    removed adapter stay until no sequence uses them.

    Used by the engine thread alone. Adapters are read on a thread of the table's, so that no step waits for a file, and
    put into use in the order of the commands."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._numbers: dict[str, int] = {}
        self._digests: dict[int, str] = {}
        self._last_number = 0
        self._removed: set[int] = set()
        """Numbers of the removed adapters that still take memory."""
        self._changes: deque[_Change] = deque()
        self._reader: ThreadPoolExecutor | None = None
        self.outcomes: list[AdapterOutcome] = []
        """Answers to commands that are to be sent."""
        self.is_changing = False
        """Whether `finish_changes` has something to do, now or later."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._numbers))

    def number_and_digest(self, name: str) -> tuple[int, str]:
        """Return what a sequence needs to know of an adapter; (0, "") for "" and for one that is not loaded."""
        number = self._numbers.get(name, 0)
        return number, self._digests.get(number, "")

    @property
    def digests(self) -> dict[str, str]:
        """Digests of the loaded adapters, by name."""
        return {name: self._digests[number] for name, number in self._numbers.items()}

    def facts(self) -> dict[str, Any]:
        """Return the fields of `EngineInfo` that the adapters fill."""
        return {"adapters": self.names, "adapter_digests": self.digests}

    def load(self, name: str, path: str) -> None:
        """Load an adapter at once. Raises SluiceError if the runner does not take it."""
        number = self._next_number()
        self._read(number, name, path)()
        self._numbers[name] = number

    def begin(self, command: LoadAdapter | UnloadAdapter) -> None:
        """Begin to load or unload; `finish_changes` adds the answer to `outcomes`. A loaded adapter takes the place of
        one of its name, which stays in use until then."""
        self.is_changing = True
        if isinstance(command, UnloadAdapter):
            self._changes.append(_Change(command))
            return
        number = self._next_number()
        self._changes.append(_Change(command, number, self._submit(self._read, number, command.name, command.path)))

    def finish_changes(self, sequences: Callable[[], Iterable[Sequence]]) -> None:
        """Put into use what was read. The memory of removed adapters that none of `sequences`
        uses is freed."""
        while self.is_ready:
            change = self._changes.popleft()
            if change.command is None:
                self._drop(change)
            else:
                self.outcomes.append(self._finish(change, change.command))
        if self._removed and not self._changes:
            unused = self._removed - {sequence.adapter for sequence in sequences()}
            if unused:
                self._removed -= unused
                self._changes.append(_Change(None, work=self._submit(self._runner.drop_adapters, unused)))
        self.is_changing = bool(self._changes or self._removed)

    @property
    def is_ready(self) -> bool:
        """Whether `finish_changes` puts something into use, or takes it out, now."""
        return bool(self._changes) and ((work := self._changes[0].work) is None or work.done())

    def close(self) -> None:
        """Begin nothing more."""
        if self._reader is not None:
            self._reader.shutdown(wait=False, cancel_futures=True)

    def _next_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def _read(self, number: int, name: str, path: str) -> Callable[[], None]:
        put_into_use = self._runner.read_adapter(number, name, Path(path))
        digest = files_digest(Path(path)) or f"{name} {number}"

        def use() -> None:
            put_into_use()
            self._digests[number] = digest

        return use

    def _submit(self, read: Callable[..., Callable[[], None]], *arguments: object) -> Future[Callable[[], None]]:
        if self._reader is None:
            self._reader = ThreadPoolExecutor(1, "adapters")
        return self._reader.submit(read, *arguments)

    def _finish(self, change: _Change, command: LoadAdapter | UnloadAdapter) -> AdapterOutcome:
        name = command.name
        try:
            if change.work is not None:
                change.work.result()()
            elif name not in self._numbers:
                message = f"there is no LoRA adapter {name!r}; loaded: {', '.join(self.names) or 'none'}"
                raise SluiceError(ErrorCode.NOT_FOUND, message, param="lora_name")
        except SluiceError as error:
            return AdapterOutcome(name, error.code, error.message)
        except Exception as error:
            log.exception("loading LoRA adapter %s failed", name)
            return AdapterOutcome(name, ErrorCode.INTERNAL, f"LoRA adapter {name}: {error}")
        if name in self._numbers:
            self._removed.add(removed := self._numbers.pop(name))
            self._digests.pop(removed, None)
        if change.number:
            self._numbers[name] = change.number
        return AdapterOutcome(name, adapters=self.names, digests=self.digests)

    @staticmethod
    def _drop(change: _Change) -> None:
        assert change.work is not None
        try:
            change.work.result()()
        except Exception:
            log.exception("the memory of unloaded LoRA adapters cannot be freed")
