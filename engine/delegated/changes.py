"""Changes of a runtime while it serves: its LoRA adapters, and its sleep."""

import asyncio
import logging
from collections.abc import Callable, Collection

from sluice.engine.delegated.interface import DelegatedRuntime
from sluice.engine.frames import AdapterOutcome, ChangeCommand, LoadAdapter, Sleep, SleepOutcome, UnloadAdapter, WakeUp
from sluice.errors import ErrorCode, SluiceError

log = logging.getLogger(__name__)


async def change_adapters(
    runtime: DelegatedRuntime, command: LoadAdapter | UnloadAdapter, adapters: Collection[str]
) -> AdapterOutcome:
    """Load or unload an adapter beside those that are loaded, and return the answer."""
    name, names = command.name, {*adapters}
    try:
        if isinstance(command, LoadAdapter):
            await runtime.load_adapter(name, command.path)
            names.add(name)
        else:
            await runtime.unload_adapter(name)
            names.discard(name)
    except SluiceError as error:
        return AdapterOutcome(name, error.code, error.message)
    except Exception as error:
        log.exception("%s cannot change LoRA adapter %s", runtime.title, name)
        message = f"{runtime.title} cannot change LoRA adapter {name}: {error}"
        return AdapterOutcome(name, ErrorCode.INTERNAL, message)
    return AdapterOutcome(name, adapters=tuple(sorted(names)), digests=dict(runtime.adapter_digests))


class RuntimeChanges:
    """Makes the changes one after the other, each in a task, and keeps the answers. Used on the executor's loop."""

    def __init__(
        self,
        runtime: DelegatedRuntime,
        adapters: tuple[str, ...],
        on_change: Callable[[], None],
        abort: Callable[[], None],
    ) -> None:
        """`on_change` is called when there is an answer, and before the runtime falls asleep; `abort` ends what the
        runtime has."""
        self._abort = abort
        self._runtime = runtime
        self._on_change = on_change
        self._tasks: set[asyncio.Task[None]] = set()
        self._lock = asyncio.Lock()
        self.adapters = adapters
        """Names of the adapters that requests may use."""
        self.is_asleep = False
        """Whether the runtime is asleep, or falls asleep."""
        self._num_sleeps = 0
        """Commands to sleep that are not answered."""
        self.is_frozen = False
        """Whether those that it has bring nothing."""
        self.adapter_outcomes: list[AdapterOutcome] = []
        self.sleep_outcomes: list[SleepOutcome] = []

    @property
    def holds_requests(self) -> bool:
        """Whether the runtime gets no requests: what comes behind a command to sleep waits, as in a new engine in place
        of one that slept."""
        return self.is_asleep or self._num_sleeps > 0

    def begin(self, command: ChangeCommand) -> None:
        self._num_sleeps += isinstance(command, Sleep)
        task = asyncio.create_task(self._obey(command))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def take_outcomes(self) -> tuple[list[AdapterOutcome], list[SleepOutcome]]:
        outcomes = self.adapter_outcomes, self.sleep_outcomes
        self.adapter_outcomes, self.sleep_outcomes = [], []
        return outcomes

    async def _obey(self, command: ChangeCommand) -> None:
        async with self._lock:
            if isinstance(command, Sleep | WakeUp):
                slept = await self._sleep_or_wake(command)  # meanwhile frames take the lists
                self._num_sleeps -= isinstance(command, Sleep)
                self.sleep_outcomes.append(slept)
            else:
                outcome = await change_adapters(self._runtime, command, self.adapters)
                self.adapters = outcome.adapters if outcome.code is None else self.adapters
                self.adapter_outcomes.append(outcome)
        self._on_change()

    async def _sleep_or_wake(self, command: Sleep | WakeUp) -> SleepOutcome:
        title = self._runtime.title
        try:
            if isinstance(command, Sleep):
                await self._sleep(command)
            elif await self._runtime.wake_up(command.tags):
                self.is_asleep = self.is_frozen = False
        except SluiceError as error:
            return SleepOutcome(self.is_asleep, error.code, error.message)
        except Exception as error:
            log.exception("%s cannot obey %s", title, command)
            return SleepOutcome(self.is_asleep, ErrorCode.INTERNAL, f"{title} cannot obey: {error}")
        return SleepOutcome(self.is_asleep)

    async def _sleep(self, command: Sleep) -> None:
        self._runtime.check_sleep(command.level, command.mode)
        before = self.is_asleep, self.is_frozen
        self.is_asleep, self.is_frozen = True, command.mode != "wait"
        self._on_change()
        if command.mode == "abort":
            self._abort()
        try:
            await self._runtime.sleep(command.level, command.mode)
            self.is_frozen = True
        except BaseException:
            self.is_asleep, self.is_frozen = before
            raise
