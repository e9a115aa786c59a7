"""Changes of all engines of a fleet at once: LoRA adapters, sleep."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence

from sluice.engine.fleet.replica import Replica
from sluice.engine.frames import SleepMode
from sluice.errors import ErrorCode, SluiceError

log = logging.getLogger(__name__)

Replicas = Callable[[], Sequence[Replica]]
"""Returns the replicas that are not given up."""


class FleetSleep:
    """Puts all engines to sleep, and wakes them."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas

    @property
    def is_sleeping(self) -> bool:
        """Whether one of the engines sleeps."""
        return any(each.engine.sleeping.is_sleeping for each in self._replicas())

    async def sleep(self, level: int = 1, mode: SleepMode = "abort") -> None:
        """Have all engines stop generating. Raises the first error of one that cannot; the others sleep then."""
        await _for_all(each.engine.sleeping.sleep(level, mode) for each in self._replicas())

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Have all engines go on. Raises the first error of one that cannot; the others are awake then."""
        await _for_all(each.engine.sleeping.wake_up(tags) for each in self._replicas())


class FleetAdapters:
    """Loads and removes LoRA adapters in all engines, or in none."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._lock = asyncio.Lock()

    async def load(self, name: str, path: str, *, replaces: bool) -> None:
        """Load it everywhere. Raises the error of the replica that does not take it, in whose words it says which."""
        async with self._lock:
            replicas = self._serving()
            before = {each.name: each.engine.adapters.get(name) for each in replicas}
            for number, each in enumerate(replicas):
                try:
                    await each.engine.load_adapter(name, path, replaces=replaces)
                except SluiceError as error:
                    for changed in replicas[:number]:
                        await _restore(changed, name, before[changed.name])
                    raise _of(each, error) from error

    async def unload(self, name: str) -> None:
        """Remove it everywhere. Raises NOT_FOUND where no replica has it."""
        async with self._lock:
            replicas = self._serving()
            having = [each for each in replicas if name in each.engine.info.adapters]
            for each in having or replicas[:1]:
                try:
                    await each.engine.unload_adapter(name)
                except SluiceError as error:
                    raise _of(each, error) if having else error from error

    async def share_with(self, newcomer: Replica) -> None:
        """Load in a replica that is about to join what was loaded in the others from here. One that it does not take is
        left to the others."""
        async with self._lock:
            folders = {name: path for each in self._replicas() for name, path in each.engine.adapters.items()}
            for name, path in sorted(folders.items()):
                if newcomer.has_adapter(name):
                    continue
                try:
                    await newcomer.engine.load_adapter(name, path)
                except SluiceError as error:
                    log.warning(
                        "replica %s joins without the LoRA adapter %s, whose requests go to others: %s",
                        *(newcomer.name, name, error.message),
                    )

    def _serving(self) -> Sequence[Replica]:
        replicas = self._replicas()
        for each in replicas:
            if not each.engine.is_serving:
                message = f"replica {each.name} is restarting; adapters change when all replicas serve"
                raise SluiceError(ErrorCode.UNAVAILABLE, message, retry_after_s=1.0)
        return replicas


async def _restore(replica: Replica, name: str, path: str | None) -> None:
    """Bring the adapter of a replica back to what it was: the folder `path`, or none."""
    try:
        if path is None:
            await replica.engine.unload_adapter(name)
        else:
            await replica.engine.load_adapter(name, path, replaces=True)
    except SluiceError as error:
        log.error("replica %s keeps a LoRA adapter %s that others do not have: %s", replica.name, name, error.message)


def _of(replica: Replica, error: SluiceError) -> SluiceError:
    return error.reworded(f"replica {replica.name}: {error.message}")


async def _for_all(changes: Iterable[Awaitable[None]]) -> None:
    outcomes = await asyncio.gather(*changes, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
