"""`POST /sleep`, `POST /wake_up` and `GET /is_sleeping`, in vLLM's shapes: models that give up memory."""

from collections.abc import Sequence
from typing import Annotated, get_args

from fastapi import APIRouter, Query, Response

from sluice.engine.fleet.client import Engine
from sluice.engine.frames import SleepMode
from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.gateway.front.http.bodies import json_response
from sluice.gateway.plane.data_plane import Plane

_MODEL = Annotated[str, Query(description="The model; without it all that can sleep.")]
_TAGS = ("weights", "kv_cache", "scheduling")
_LEVELS = {"0": 0, "1": 1, "2": 2}


def router(plane: Plane) -> APIRouter:
    """Return the routes, which change the engines of `plane`."""
    routes = SleepRoutes(plane)
    api = APIRouter(tags=["OpenAI"], default_response_class=Response)
    api.post("/sleep")(routes.sleep)
    api.post("/wake_up")(routes.wake_up)
    api.get("/is_sleeping")(routes.is_sleeping)
    return api


class SleepRoutes:
    """Handlers of the routes over one data plane."""

    def __init__(self, plane: Plane) -> None:
        self._plane = plane

    async def sleep(
        self,
        level: Annotated[
            str, Query(description="0: generate nothing. 1: weights leave the GPU. 2: they are dropped.")
        ] = "1",
        mode: Annotated[str, Query(description="What becomes of running requests: abort, wait or keep.")] = "abort",
        model: _MODEL = "",
    ) -> Response:
        """Put the engines to sleep."""
        if level not in _LEVELS:
            raise invalid("level", f"level must be 0, 1 or 2, got {level[:40]!r}")
        found = next((each for each in get_args(SleepMode) if each == mode), None)
        if found is None:
            raise invalid("mode", f"mode must be abort, wait or keep, got {mode[:40]!r}")
        for engine in self._engines(model):
            await engine.sleep(_LEVELS[level], found)
        return json_response({"status": "sleeping", "level": _LEVELS[level]})

    async def wake_up(
        self,
        tags: Annotated[Sequence[str], Query(description="Parts of the memory; without them all.")] = (),
        model: _MODEL = "",
    ) -> Response:
        """Wake the engines."""
        unknown = next((each for each in tags if each not in _TAGS), None)
        if unknown is not None:
            raise invalid("tags", f"tags must be of {', '.join(_TAGS)}, got {unknown[:40]!r}")
        engines = self._engines(model)
        for engine in engines:
            await engine.wake_up(list(tags) or None)
        is_asleep = any(engine.is_sleeping for engine in engines)
        return json_response({"status": "sleeping" if is_asleep else "awake", "tags": list(tags) or None})

    async def is_sleeping(self, model: _MODEL = "") -> Response:
        """Tell whether one of the engines sleeps."""
        return json_response({"is_sleeping": any(each.is_sleeping for each in self._find(model))})

    def _engines(self, model: str) -> list[Engine]:
        """Return the engines that can sleep. Raises NOT_FOUND where there are none."""
        engines = self._find(model)
        if not engines:
            what = f"model {model!r} cannot sleep" if model else "no model of this server can sleep"
            raise SluiceError(ErrorCode.NOT_FOUND, f"{what}: it takes --enable-sleep-mode, and vLLM or TensorRT-LLM")
        return engines

    def _find(self, model: str) -> list[Engine]:
        """Return the engines that can sleep, of one model or all. Raises NOT_FOUND for an unknown model."""
        texts = self._plane.llms()
        if model and model not in {text.name for text in texts}:
            known = ", ".join(text.name for text in texts) or "none"
            raise SluiceError(
                ErrorCode.NOT_FOUND, f"model {model!r} not found; language models: {known}", param="model"
            )
        return [text.engine for text in texts if model in ("", text.name) and text.info.can_sleep]
