"""The profiler of a server: records its engines and its event loop for some seconds."""

import asyncio
import logging
from time import perf_counter
from typing import Any

from sluice.engine.client.base import EngineClient
from sluice.engine.frames import ProfiledStep
from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.tracing.loop_profile import LoopProfile
from sluice.gateway.tracing.profile import build_profile
from sluice.pipelines.llm.model import language_models
from sluice.record.timelines import TimelineRing
from sluice.serving.repository.repository import ModelRepository

log = logging.getLogger(__name__)


class Profiler:
    """Records one profile at a time. Belongs to the event loop; costs nothing while nobody asks."""

    def __init__(self, repository: ModelRepository, timelines: TimelineRing | None) -> None:
        """`timelines` None: profiles have no requests."""
        self._repository = repository
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
        return {
            f"{model.name} {model.version} {each.name}".rstrip(): each.engine
            for model in language_models(self._repository.models())
            for each in model.engine.replicas
        }


async def _record_steps(name: str, engine: EngineClient, seconds: float) -> list[ProfiledStep]:
    """Return an engine's steps; none, with a line in the log, of one that is lost."""
    try:
        return await engine.record_steps(seconds)
    except SluiceError as error:
        log.warning("the profile has no steps of engine %s: %s", name, error.message)
        return []
