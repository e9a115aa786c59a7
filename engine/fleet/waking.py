"""Requests that come while a fleet has no engine: they are held until the first one joins, within bounds."""

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec

from sluice.engine.config import EngineConfig
from sluice.engine.model_folder import read_json
from sluice.engine.sampling_fields import OPTIONAL_FIELDS
from sluice.engine.types import EngineInfo
from sluice.errors import ErrorCode, SluiceError

_USUAL_WAKE_S = 30.0
"""How long an engine is thought to take of which none has woken yet."""
_MIN_RETRY_S, _MAX_RETRY_S = 1.0, 60.0
_BLOCK_SIZE = 32
_USUAL_MODEL_LEN = 4096


class WakeSettings(msgspec.Struct, frozen=True):
    """For how long a request is held, and how many are at a time."""

    timeout_s: float
    max_requests: int


class WakingRoom:
    """Holds requests until the fleet has an engine. Belongs to the fleet's event loop."""

    def __init__(self, settings: WakeSettings, clock: Callable[[], float] = perf_counter) -> None:
        self._settings = settings
        self._clock = clock
        self._held: set[asyncio.Future[None]] = set()
        self._began: float | None = None
        """When a request asked for an engine that has not come yet."""
        self._last_left = -math.inf
        self._last_wake_s: float | None = None

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def waking_s(self) -> float:
        """Seconds since an engine is being waited for; 0 while nobody waits."""
        return self._clock() - self._began if self._held and self._began is not None else 0.0

    def expected_s(self) -> float:
        """Return how long it will take until there is an engine: what the last one took; where that is over, or none
        has woken yet, as long again as it has taken so far."""
        elapsed_s = 0.0 if self._began is None else self._clock() - self._began
        usual_s = _USUAL_WAKE_S if self._last_wake_s is None else self._last_wake_s
        return usual_s - elapsed_s if elapsed_s < usual_s else elapsed_s

    def refuse_if_full(self) -> None:
        """Raise OVERLOADED where as many requests are held as may be."""
        if len(self._held) >= self._settings.max_requests:
            limit = f"the limit is {self._settings.max_requests} (--wake-max-requests)"
            raise self._error(
                ErrorCode.OVERLOADED, f"{len(self._held)} requests wait for an engine to start, and {limit}"
            )

    async def wait(self, *, has_begun: bool = False) -> None:
        """Wait for an engine. Raises OVERLOADED where the room is full, UNAVAILABLE where none comes in time; both say
        when to try again. There is always room for a stream that `has_begun`: its engine had taken it."""
        if not has_begun:
            self.refuse_if_full()
        self._note_arrival()
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._held.add(woken)
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                await woken
        except TimeoutError:
            problem = f"no engine of this model has started within {self._settings.timeout_s:g} s (--wake-timeout-secs)"
            raise self._error(ErrorCode.UNAVAILABLE, problem) from None
        finally:
            self._held.discard(woken)
            self._last_left = self._clock()

    def _note_arrival(self) -> None:
        """Begin to measure, unless an engine is waited for since a while: those who gave up may have come back."""
        now = self._clock()
        if self._began is None or (not self._held and now - self._last_left > self._settings.timeout_s):
            self._began = now

    def wake(self) -> None:
        """Let all go on, since there is an engine."""
        if self._began is not None:
            self._last_wake_s, self._began = self._clock() - self._began, None
        for each in self._held:
            if not each.done():
                each.set_result(None)

    def close(self, error: SluiceError) -> None:
        """End all with `error`."""
        for each in self._held:
            if not each.done():
                each.set_exception(error)

    def _error(self, code: ErrorCode, problem: str) -> SluiceError:
        retry_after_s = min(max(math.ceil(self.expected_s()), _MIN_RETRY_S), _MAX_RETRY_S)
        message = f"{problem}; try again in {retry_after_s:.0f} s"
        return SluiceError(code, message, retry_after_s=retry_after_s)


def presume_info(config: EngineConfig) -> EngineInfo:
    """Return what is known of an engine before there is one: what its checkpoint says. It may support everything, and
    has no KV blocks. Raises NOT_FOUND or INVALID for a checkpoint without a readable config.json."""
    fields = read_json(Path(config.model_path) / "config.json")
    text = fields | _part(fields, "text_config")
    end = text.get("eos_token_id")
    longest = text.get("max_position_embeddings")
    return EngineInfo(
        runtime="none",
        model_type=str(fields.get("model_type", "")),
        dtype="",
        vocab_size=text["vocab_size"] if isinstance(text.get("vocab_size"), int) else 0,
        eos_token_ids=tuple(each for each in (end if isinstance(end, list) else [end]) if isinstance(each, int)),
        max_model_len=config.max_model_len or (longest if isinstance(longest, int) else _USUAL_MODEL_LEN),
        block_size=_BLOCK_SIZE,
        num_blocks=0,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        load_seconds=0.0,
        sampling_fields=OPTIONAL_FIELDS,
        max_beam_width=1,
    )


def _part(fields: dict[str, Any], name: str) -> dict[str, Any]:
    part = fields.get(name)
    return part if isinstance(part, dict) else {}
