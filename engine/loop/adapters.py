"""The LoRA adapters of a runner, by name. Used by the engine thread alone."""

import logging
from collections.abc import Iterable
from pathlib import Path

from engine.frames import AdapterOutcome, LoadAdapter, UnloadAdapter
from engine.runners.base import AdapterRunner, Runner
from engine.sequence import Sequence
from sluice.errors import ErrorCode, SluiceError

log = logging.getLogger(__name__)


class AdapterTable:
    """Gives every loaded adapter a number of its own, which also keeps its KV blocks apart: one that is loaded again
    under the same name is another adapter. The weights of a removed adapter stay until no sequence uses them."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._numbers: dict[str, int] = {}
        self._last_number = 0
        self.removed: list[int] = []
        """Numbers of the removed adapters that still take memory."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._numbers))

    def number(self, name: str) -> int:
        """Return the number of an adapter; 0 for "" and for one that is not loaded."""
        return self._numbers.get(name, 0)

    def load(self, name: str, path: str) -> None:
        """Load an adapter, in place of one of that name. Raises SluiceError if the runner does not take it; the one of
        that name is then still loaded."""
        if not isinstance(self._runner, AdapterRunner):
            message = f"the runtime {self._runner.info.runtime} has no LoRA adapters; {name} cannot be loaded"
            raise SluiceError(ErrorCode.UNIMPLEMENTED, message, param="lora_modules")
        self._last_number += 1
        self._runner.load_adapter(self._last_number, name, Path(path))
        self._remove(name)
        self._numbers[name] = self._last_number

    def unload(self, name: str) -> None:
        """Remove an adapter. Raises NOT_FOUND for an unknown one."""
        if name not in self._numbers:
            message = f"there is no LoRA adapter {name!r}; loaded: {', '.join(self.names) or 'none'}"
            raise SluiceError(ErrorCode.NOT_FOUND, message, param="lora_name")
        self._remove(name)

    def obey(self, command: LoadAdapter | UnloadAdapter) -> AdapterOutcome:
        """Load or unload. Returns the answer."""
        try:
            match command:
                case LoadAdapter(name, path):
                    self.load(name, path)
                case UnloadAdapter(name):
                    self.unload(name)
        except SluiceError as error:
            return AdapterOutcome(command.name, error.code, error.message)
        except Exception as error:
            log.exception("loading LoRA adapter %s failed", command.name)
            return AdapterOutcome(command.name, ErrorCode.INTERNAL, f"LoRA adapter {command.name}: {error}")
        return AdapterOutcome(command.name, adapters=self.names)

    def free_unused(self, sequences: Iterable[Sequence]) -> None:
        """Free the removed adapters that none of `sequences` uses."""
        assert isinstance(self._runner, AdapterRunner)
        used = {sequence.adapter for sequence in sequences}
        for number in [each for each in self.removed if each not in used]:
            self._runner.unload_adapter(number)
            self.removed.remove(number)

    def _remove(self, name: str) -> None:
        if name in self._numbers:
            self.removed.append(self._numbers.pop(name))
