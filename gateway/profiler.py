"""The profiler of a server: records its engines and its event loop for some seconds."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any

from sluice.engine.client.base import EngineClient
from sluice.engine.fleet.client import FleetClient
from sluice.engine.frames import ProfiledStep
from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.tracing.loop_profile import LoopProfile
from sluice.gateway.tracing.profile import build_profile
from sluice.gateway.tracing.timelines import TimelineRing
from sluice.pipelines.llm.model import LlmModel

log = logging.getLogger(__name__)


class Profiler:
    """Records one profile at a time. Belongs to the event loop; costs nothing while nobody asks."""

    def __init__(self, models: Callable[[], Iterable[LlmModel]], timelines: TimelineRing | None) -> None:
        """`models` returns the loaded language models. `timelines` None: profiles have no requests."""
        self._models = models
        self._timelines = timelines
        self._is_recording = False

    async def record(self, seconds: float) -> dict[str, Any]:
        """Record for `seconds`, and return the file's content. Raises OVERLOADED while another profile is recorded."""
        if self._is_recording:
            message = "a profile of this server is being recorded; try again when it is done"
            raise SluiceError(ErrorCode.OVERLOADED, message, retry_after_s=seconds)
        self._is_recording = True
        try:
            return await self._record(seconds)
        finally:
            self._is_recording = False

    async def _record(self, seconds: float) -> dict[str, Any]:
        loop, began = LoopProfile(), perf_counter()
        engines = self._engines()
        tasks = [asyncio.create_task(_record_steps(name, each, seconds)) for name, each in engines.items()]
        loop.start()
        try:
            await asyncio.sleep(seconds)
        finally:
            loop.stop()
        try:
            steps = await asyncio.gather(*tasks)
        finally:
            for each in tasks:
                each.cancel()
        recordings = [] if self._timelines is None else self._timelines.recordings()
        seen = [each for each in recordings if not each.root.ended_ns or each.root.ended_ns / 1e9 >= began]
        return await asyncio.to_thread(build_profile, loop, dict(zip(engines, steps, strict=True)), seen, began)

    def _engines(self) -> dict[str, EngineClient]:
        found: dict[str, EngineClient] = {}
        for model in self._models():
            name, engine = f"{model.name} {model.version}", model.engine
            if isinstance(engine, FleetClient):
                replicas = {f"{name} {each.name}": each.engine for each in engine.replicas}
                found |= {key: each for key, each in replicas.items() if isinstance(each, EngineClient)}
            elif isinstance(engine, EngineClient):
                found[name] = engine
        return found


async def _record_steps(name: str, engine: EngineClient, seconds: float) -> list[ProfiledStep]:
    """Return an engine's steps; none, with a line in the log, of one that is lost."""
    try:
        return await engine.record_steps(seconds)
    except SluiceError as error:
        log.warning("the profile has no steps of engine %s: %s", name, error.message)
        return []
